"""Residuals on disk, one file for each version of a client's residual; and the choice of the place.

A version is kept as long as the last checkpoint, the state before the round or the state after the round
needs it; then its file is deleted. So a run can be killed at any moment and resumed from its checkpoint.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, is_temporary, sync
from cfedavg.core.tensors import UNREADABLE, checksum, free_memory, read_one, save_tensors
from cfedavg.simulate.residuals import InMemory, MemoryRow, Residuals, Write, copy
from cfedavg.simulate.tables import Table

_NAME = re.compile(r"\d+-\d+\.safetensors")  # 000123-000007.safetensors: client 123, version 7
_SHARE = 3  # residuals in memory may take a third of the free memory; training needs the rest


@dataclass(eq=False)
class OnDisk(Residuals):
    """A store of residuals as files of a folder; memory holds only their version numbers and norms."""

    folder: Path
    versions: Mapping[int, int] = field(default_factory=Table)
    # For each client whose version is newer than in the last checkpoint: the checkpoint's version, 0 if none.
    checkpointed: Mapping[int, int] = field(default_factory=Table)
    replaced: Mapping[int, int] = field(default_factory=dict)  # versions that only the old store needs

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}-{version:06d}.safetensors"

    def paths(self) -> set[Path]:
        return {self.path(*item) for item in self.versions.items()}

    def lives_on(self, device: torch.device) -> bool:
        return False

    def copy_to(self, client: int, target: Tensor) -> None:
        if self.writes:
            self.writes.wait(client)
        e = self._read(client, target.shape, target)
        if e is not target:
            copy(target, e)

    def _find(self, client: int, shape: torch.Size) -> Tensor:
        return self._read(client, shape, None)

    def _read(self, client: int, shape: torch.Size, target: Tensor | None) -> Tensor:
        """Read a residual into `target` and return `target`; return a new tensor if its dtype differs."""
        version = self.versions[client]
        path = self.path(client, version)

        def make(dtype: str, found: list[int]) -> Tensor:
            if found != list(shape) or not getattr(torch, dtype).is_floating_point:
                raise ValueError(
                    f"the residual must hold floats of shape {list(shape)}, got {dtype}, {found}"
                )
            if target is not None and target.dtype == getattr(torch, dtype):
                return target
            return torch.empty(shape, dtype=getattr(torch, dtype))

        try:
            e: Tensor
            e, about = read_one(path, "e", make)
            if about.pop("checksum") != checksum({"e": e}, about):
                raise ValueError("the checksum is wrong")
            if about != {"client": client, "version": version}:
                raise ValueError("the residual is of another client or version")
        except UNREADABLE as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
            raise InputError(f"the residual file {path} {why}; start the run again") from None
        return e

    def adopt(self, other: Residuals, shape: torch.Size) -> Self:
        return replace(other, row=self.row) if isinstance(other, type(self)) else super().adopt(other, shape)

    def _store(self, new: Mapping[int, Tensor], write: Write | None) -> dict[str, Any]:
        before = {client: self.versions.get(client, 0) for client in new}
        versions = {client: version + 1 for client, version in before.items()}
        # No store needs the replaced versions now, and no thread is writing one: `write` has waited for it.
        outdated = [self.path(*item) for item in self.replaced.items()]
        with self._naming_folder():
            if new:
                self.folder.mkdir(exist_ok=True)
        delete = partial(_delete, outdated)
        writes = None
        if write:
            writes = write(new, lambda client, e: self._save(client, versions[client], e), delete)
        else:
            delete()
            for client, e in new.items():
                self._save(client, versions[client], e)
        new_here = {client: version for client, version in before.items() if client not in self.checkpointed}
        assert isinstance(self.versions, Table)
        assert isinstance(self.checkpointed, Table)
        return {
            "versions": self.versions.update(versions),
            "checkpointed": self.checkpointed.update(new_here),
            "replaced": {client: version for client, version in before.items() if client not in new_here},
            "writes": writes,
        }

    def _save(self, client: int, version: int, e: Tensor) -> None:
        tensors, about = {"e": e.contiguous().cpu()}, {"client": client, "version": version}
        about["checksum"] = checksum(tensors, about)
        with self._naming_folder():
            # Without a sync: most versions are replaced before a checkpoint refers to them.
            save_tensors(tensors, self.path(client, version), about, durable=False)

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Inside `with`, turn an error of the disk into an InputError that names the folder."""
        try:
            yield
        except (OSError, InputError) as error:
            raise InputError(
                f"the residuals cannot be kept in {self.folder} ({error}); free space there and set "
                "`resume`, or start again with another `out`, or with `residual_precision` bf16, which needs "
                "half the bytes"
            ) from None

    def flush(self) -> None:
        self.wait()
        if not self.checkpointed:
            return
        with self._naming_folder():
            for client in sorted(self.checkpointed):
                sync(self.path(client, self.versions[client]))
            sync(self.folder)
            sync(self.folder.parent)

    def settle(self) -> None:
        known = [*self.checkpointed.items(), *self.replaced.items()]
        outdated = [self.path(client, version) for client, version in known if version]
        # Clear the tables before the files are deleted. After an interrupt between the two steps, `update`
        # would otherwise take versions of the new checkpoint for outdated versions and delete their files.
        self.checkpointed, self.replaced = Table(), Table()
        _delete(outdated)


def sweep(folder: Path, residuals: Residuals) -> None:
    """Delete the residual files that `residuals` does not need; interrupted rounds leave such files."""
    if not exists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder, got a file; move the file away")
    keep = residuals.paths()
    _delete(
        path
        for path in folder.iterdir()
        if path not in keep and (_NAME.fullmatch(path.name) or is_temporary(path.name))
    )
    with suppress(OSError):  # not empty
        folder.rmdir()


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"cannot delete the outdated residual file {path} ({error.strerror})") from None


@contextmanager
def open_store(
    where: str, size: int, device: torch.device, folder: Path | None, row: MemoryRow | None = None
) -> Iterator[Residuals]:
    """Yield an empty store on the `device`, in `memory` of the host, or on `disk`, as `where` says.

    All residuals together have `size` bytes. For `auto`, take the first of the three places where this is at
    most a third of the free memory, or else the disk. A store on disk is temporary if `folder` is None.
    """
    host = torch.device("cpu")
    places = {"device": device, "memory": host}
    if where == "auto":
        fitting = (name for name, place in places.items() if size <= free_memory(place) / _SHARE)
        where = next(fitting, "disk")
    if where in places:
        yield InMemory(device=places[where], row=row)
    elif folder:
        yield OnDisk(folder, row=row)
    else:
        with tempfile.TemporaryDirectory(prefix="cfedavg-residuals-") as path:
            yield OnDisk(Path(path), row=row)
