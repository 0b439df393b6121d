"""Stores of the clients' residuals e_i, in memory or on disk.

`update` returns a new store. The old store stays valid until the new store is updated in turn. So an
interrupted round can start again from the old store.

On disk, each version of a client's residual is a file. A version is kept as long as the last checkpoint, the
state before the round or the state after the round needs it; then its file is deleted. So a run can be killed
at any moment and resumed from its checkpoint.
"""

from __future__ import annotations

import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from cfedavg.core.arrays import norms2
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, is_temporary, sync
from cfedavg.core.keys import bits
from cfedavg.core.tensors import UNREADABLE, checksum, free_memory, read_tensors, save_tensors

_NAME = re.compile(r"\d+-\d+\.safetensors")  # 000123-000007.safetensors: client 123, version 7
_SHARE = 3  # residuals in memory may take a third of the free memory; training needs the rest


@dataclass(eq=False)
class Residuals(ABC):
    """A store of residuals e_i; the residual of a client that never took part is zero."""

    norms2: Mapping[int, float] = field(default_factory=dict, kw_only=True)  # |e_i|^2 if i took part

    def get(self, client: int, like: Tensor) -> Tensor:
        """Return the client's residual in the dtype and on the device of `like`."""
        if client not in self.norms2:
            return torch.zeros_like(like)
        return self.stored(client, like.shape).to(like.device, like.dtype)

    @abstractmethod
    def stored(self, client: int, shape: torch.Size) -> Tensor:
        """Return the stored residual of a client that took part; it must have this shape."""

    def update(self, new: Mapping[int, Tensor]) -> Self:
        """Return a new store in which the residuals of `new` replace the old residuals."""
        norms = dict(zip(new, norms2(new.values()), strict=True))
        return replace(self, norms2={**self.norms2, **norms}, **self._store(new))

    @abstractmethod
    def _store(self, new: Mapping[int, Tensor]) -> dict[str, Any]:
        """Store the residuals in `new`; return the arguments from which `update` makes the next store."""

    def adopt(self, other: Residuals, like: Tensor) -> Self:
        """Return a store of this class (in memory or on disk) with the residuals of the store `other`."""
        if isinstance(other, type(self)):
            return other
        made = self.update({i: other.stored(i, like.shape).to(like.device) for i in other.norms2})
        made.norms2 = other.norms2  # the same bits, which another device may not compute
        return made

    def select(self, clients: Container[int]) -> Self:
        """Return a store with the residuals of `clients` only."""
        fields: dict[str, Any] = {
            name: {client: value for client, value in table.items() if client in clients}
            for name, table in self._tables().items()
        }
        return replace(self, **fields)

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return one store with the residuals of all `parts`, which share no client."""
        tables = [part._tables() for part in parts]
        fields: dict[str, Any] = {
            name: {client: value for each in tables for client, value in each[name].items()}
            for name in tables[0]
        }
        if len(fields["norms2"]) < sum(len(part.norms2) for part in parts):
            raise ValueError("two stores hold a residual of the same client")
        return replace(parts[0], **fields)

    def _tables(self) -> dict[str, Mapping[int, Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Mapping)}

    def paths(self) -> set[Path]:
        """Return the paths of the residual files that this store refers to."""
        return set()

    def flush(self) -> None:  # noqa: B027 - the checkpoint itself holds residuals in memory
        """Make the residuals durable; call this before a checkpoint refers to this store."""

    def settle(self) -> None:  # noqa: B027 - Python frees older residuals in memory
        """Delete older residuals; call this when a checkpoint that refers to this store is durable."""


@dataclass(eq=False)
class InMemory(Residuals):
    """A store of residuals as tensors, on the device where the engine made the residuals."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        return self.vectors[client]

    def _store(self, new: Mapping[int, Tensor]) -> dict[str, Any]:
        return {"vectors": {**self.vectors, **new}}


@dataclass(eq=False)
class OnDisk(Residuals):
    """A store of residuals as files of a folder; memory holds only their version numbers and norms."""

    folder: Path
    versions: Mapping[int, int] = field(default_factory=dict)
    # For each client whose version is newer than in the last checkpoint: the checkpoint's version, 0 if none.
    checkpointed: Mapping[int, int] = field(default_factory=dict)
    replaced: Mapping[int, int] = field(default_factory=dict)  # versions that only the old store needs

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}-{version:06d}.safetensors"

    def paths(self) -> set[Path]:
        return {self.path(*item) for item in self.versions.items()}

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        version = self.versions[client]
        path = self.path(client, version)
        try:
            tensors, about = read_tensors(path)
            if about.pop("checksum") != checksum(tensors, about):
                raise ValueError("the checksum is wrong")
            e: Tensor = tensors["e"]
            if about != {"client": client, "version": version} or e.shape != shape:
                raise ValueError("the residual is of another client, version or model")
            if not e.is_floating_point():
                raise ValueError(f"the residual must hold floats, got {e.dtype}")
        except UNREADABLE as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
            raise InputError(f"the residual file {path} {why}; start the run again") from None
        return e.clone()  # copies the mapped file into memory, since the file may be deleted

    def _store(self, new: Mapping[int, Tensor]) -> dict[str, Any]:
        _delete(self.path(*item) for item in self.replaced.items())  # no store needs these versions now
        before = {client: self.versions.get(client, 0) for client in new}
        versions = {client: version + 1 for client, version in before.items()}
        with self._naming_folder():
            for client, version in versions.items():
                self.folder.mkdir(exist_ok=True)
                tensors, about = {"e": new[client].contiguous().cpu()}, {"client": client, "version": version}
                about["checksum"] = checksum(tensors, about)
                # Without a sync: most versions are replaced before a checkpoint refers to them.
                save_tensors(tensors, self.path(client, version), about, durable=False)
        return {
            "versions": {**self.versions, **versions},
            "checkpointed": {**before, **self.checkpointed},
            "replaced": {
                client: version for client, version in before.items() if client in self.checkpointed
            },
        }

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
        self.checkpointed, self.replaced = {}, {}
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
def open_store(where: str, size: int, device: torch.device, folder: Path | None) -> Iterator[Residuals]:
    """Yield an empty store in `memory` or on `disk`, as `where` says; for `auto`, free memory decides.

    All residuals together have `size` bytes. A store on disk is temporary if `folder` is None.
    """
    if where == "memory" or (where == "auto" and size <= free_memory(device) / _SHARE):
        yield InMemory()
    elif folder:
        yield OnDisk(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="cfedavg-residuals-") as path:
            yield OnDisk(Path(path))


def stochastic_bf16(e: Tensor, keys: Tensor) -> Tensor:
    """Round residuals to bf16, up or down at random so that the mean stays `e`.

    `e` is one vector with one key, or a matrix with one key for each row. float64 is rounded to float32
    first. Rounding to the nearest would lose every update below 2^-9 of the residual. The function adds 16
    random bits to the 16 bits that bf16 drops. A carry rounds the value up, with the right probability. A
    value that is already bf16 stays unchanged.
    """
    top = torch.finfo(torch.bfloat16).max  # a larger value could be rounded up only to infinity
    pattern = e.clamp(-top, top).float().contiguous().view(torch.int32)
    draws = bits(keys[..., None], torch.arange(e.shape[-1], device=e.device)) >> 48 & 0xFFFF
    rounded: Tensor = (pattern + draws.int() >> 16).to(torch.int16)
    return rounded.view(torch.bfloat16)
