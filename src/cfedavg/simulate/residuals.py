"""Stores of the clients' residuals e_i, in memory or on disk.

A store is never changed: `update` returns a new store. The old store stays valid until the new store is
updated in turn. So an interrupted round can start again from the old store.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from cfedavg.core.arrays import norms2
from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.files import exists, is_temporary, sync
from cfedavg.core.keys import bits
from cfedavg.core.tensors import UNREADABLE, checksum, free_memory, read_tensors, save_tensors

_NAME = re.compile(r"\d+-\d+\.safetensors")  # 000123-000007.safetensors: client 123, version 7
T = TypeVar("T")
_SHARE = 3  # residuals in memory may take a third of the free memory; training needs the rest


class Residuals(ABC):
    """A store of residuals e_i; the residual of a client that never took part is zero."""

    norms2: Mapping[int, float]  # |e_i|^2 of each client that took part

    def get(self, client: int, like: Tensor) -> Tensor:
        """Return the client's residual in the dtype and on the device of `like`."""
        if client not in self.norms2:
            return torch.zeros_like(like)
        return self.stored(client, like.shape).to(like.device, like.dtype)

    @abstractmethod
    def stored(self, client: int, shape: torch.Size) -> Tensor:
        """Return the residual of a client that took part, in the stored dtype."""

    @abstractmethod
    def update(self, new: Mapping[int, Tensor]) -> Self:
        """Return a new store in which the residuals of `new` replace the old residuals."""

    @abstractmethod
    def adopt(self, other: Residuals, like: Tensor) -> Self:
        """Return a store of this class with the residuals of the store `other`."""

    @abstractmethod
    def select(self, clients: Container[int]) -> Self:
        """Return a store with the residuals of `clients` only."""

    @classmethod
    @abstractmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return one store with the residuals of all `parts`, which share no client."""

    @abstractmethod
    def flush(self) -> None:
        """Make the residuals durable, before a checkpoint refers to this store."""

    @abstractmethod
    def settle(self) -> None:
        """Drop older versions, once a checkpoint that refers to this store is durable."""


@dataclass(frozen=True)
class InMemory(Residuals):
    """A store of residuals as tensors, on the device where the engine made the residuals."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    norms2: Mapping[int, float] = field(default_factory=dict)

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        return self.vectors[client]

    def update(self, new: Mapping[int, Tensor]) -> InMemory:
        norms = dict(zip(new, norms2(new.values()), strict=True))
        return InMemory({**self.vectors, **new}, {**self.norms2, **norms})

    def adopt(self, other: Residuals, like: Tensor) -> InMemory:
        if isinstance(other, InMemory):
            return other
        vectors = {client: other.stored(client, like.shape).to(like.device) for client in other.norms2}
        return InMemory(vectors, other.norms2)

    def select(self, clients: Container[int]) -> InMemory:
        return InMemory(_among(clients, self.vectors), _among(clients, self.norms2))

    @classmethod
    def merge(cls, parts: Sequence[InMemory]) -> InMemory:
        return InMemory(_union(part.vectors for part in parts), _union(part.norms2 for part in parts))

    def flush(self) -> None:
        """Do nothing: the checkpoint itself holds the residuals."""

    def settle(self) -> None:
        """Do nothing: Python frees older versions."""


@dataclass(eq=False)
class OnDisk(Residuals):
    """A store of residuals as files of a folder; memory holds only their version numbers and norms."""

    folder: Path
    versions: Mapping[int, int] = field(default_factory=dict)
    norms2: Mapping[int, float] = field(default_factory=dict)
    fresh: frozenset[int] = frozenset()  # clients whose version is newer than in the last checkpoint
    vouched: Mapping[int, int] = field(default_factory=dict)  # versions of `fresh` clients in the checkpoint
    replaced: Mapping[int, int] = field(default_factory=dict)  # versions that only the old store needs

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}-{version:06d}.safetensors"

    def paths(self) -> set[Path]:
        """Return the paths of the files that this store refers to."""
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

    def update(self, new: Mapping[int, Tensor]) -> OnDisk:
        _delete(self.path(*item) for item in self.replaced.items())  # no store needs these versions now
        norms = dict(zip(new, norms2(new.values()), strict=True))
        versions = {client: self.versions.get(client, 0) + 1 for client in new}
        for client, e in new.items():
            self._write(client, versions[client], e)
        before = _among(new, self.versions)
        return OnDisk(
            self.folder,
            {**self.versions, **versions},
            {**self.norms2, **norms},
            self.fresh | new.keys(),
            {**self.vouched, **{client: v for client, v in before.items() if client not in self.fresh}},
            _among(self.fresh, before),
        )

    def _write(self, client: int, version: int, e: Tensor) -> None:
        """Write a residual without sync: most versions are replaced before a checkpoint refers to them."""
        tensors = {"e": e.contiguous().cpu()}
        about = {"client": client, "version": version}
        try:
            self.folder.mkdir(exist_ok=True)
            about["checksum"] = checksum(tensors, about)
            save_tensors(tensors, self.path(client, version), about, durable=False)
        except (OSError, InputError) as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: Exception) -> InputError:
        return InputError(
            f"the residuals cannot be kept in {self.folder} ({error}); free space there and set `resume`, or "
            "start again with another `out`, or with `residual_precision` bf16, which needs half the bytes"
        )

    def adopt(self, other: Residuals, like: Tensor) -> OnDisk:
        if isinstance(other, OnDisk):
            return other
        made = self.update({client: other.stored(client, like.shape) for client in other.norms2})
        made.norms2 = other.norms2  # the same bits, which another device may not compute
        return made

    def select(self, clients: Container[int]) -> OnDisk:
        fresh = frozenset(client for client in self.fresh if client in clients)
        versions, norms, vouched, replaced = (_among(clients, each) for each in self._tables())
        return OnDisk(self.folder, versions, norms, fresh, vouched, replaced)

    def _tables(self) -> tuple[Mapping[int, Any], ...]:
        return self.versions, self.norms2, self.vouched, self.replaced

    @classmethod
    def merge(cls, parts: Sequence[OnDisk]) -> OnDisk:
        fresh = frozenset[int]().union(*(part.fresh for part in parts))
        tables = zip(*(part._tables() for part in parts), strict=True)
        versions, norms, vouched, replaced = (_union(each) for each in tables)
        return OnDisk(parts[0].folder, versions, norms, fresh, vouched, replaced)

    def check(self) -> None:
        """Raise CannotResume if a residual file is missing; `stored` checks the content of a file."""
        for path in sorted(self.paths()):
            if not exists(path):
                raise CannotResume(f"the residual file {path} is missing; start the run again")

    def flush(self) -> None:
        if not self.fresh:
            return
        try:
            for client in sorted(self.fresh):
                sync(self.path(client, self.versions[client]))
            sync(self.folder)
            sync(self.folder.parent)
        except OSError as error:
            raise self._unwritable(error) from None

    def settle(self) -> None:
        outdated = [self.path(*item) for old in (self.vouched, self.replaced) for item in old.items()]
        # Clear the tables before the files are deleted. After an interrupt between the two steps, `update`
        # would otherwise take versions of the new checkpoint for outdated versions and delete their files.
        self.fresh, self.vouched, self.replaced = frozenset(), {}, {}
        _delete(outdated)


def sweep(folder: Path, residuals: Residuals) -> None:
    """Delete residual files that this store does not refer to; interrupted rounds leave such files."""
    if not exists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder, got a file; move the file away")
    keep = residuals.paths() if isinstance(residuals, OnDisk) else set()
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


def _among(clients: Container[int], values: Mapping[int, T]) -> dict[int, T]:
    return {client: value for client, value in values.items() if client in clients}


def _union(parts: Iterable[Mapping[int, T]]) -> dict[int, T]:
    found: dict[int, T] = {}
    for part in parts:
        if not found.keys().isdisjoint(part):
            raise ValueError("two stores hold a residual of the same client")
        found |= part
    return found


def choose(where: str, size: int, device: torch.device) -> str:
    """Return `memory` or `disk` for `size` bytes of residuals; for `where` = `auto`, free memory decides."""
    if where != "auto":
        return where
    return "memory" if size <= free_memory(device) / _SHARE else "disk"


@contextmanager
def open_store(where: str, size: int, device: torch.device, folder: Path | None) -> Iterator[Residuals]:
    """Yield an empty store; a store on disk is temporary if `folder` is None."""
    if choose(where, size, device) == "memory":
        yield InMemory()
    elif folder:
        yield OnDisk(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="cfedavg-residuals-") as path:
            yield OnDisk(Path(path))


def stochastic_bf16(e: Tensor, keys: Tensor) -> Tensor:
    """Round residuals to bf16, up or down at random so that the mean stays `e`.

    `e` is a block (n, d) with n keys, or one vector with one key. float64 is rounded to float32 first.
    Rounding to the nearest would lose every update below 2^-9 of the residual. The function adds 16 random
    bits to the 16 bits that bf16 drops; the sum carries with the right probability. A value that is already
    bf16 stays unchanged.
    """
    top = torch.finfo(torch.bfloat16).max  # a larger value could be rounded up only to infinity
    pattern = e.clamp(-top, top).float().contiguous().view(torch.int32)
    draws = bits(keys[..., None], torch.arange(e.shape[-1], device=e.device)) >> 48 & 0xFFFF
    rounded: Tensor = (pattern + draws.int() >> 16).to(torch.int16)
    return rounded.view(torch.bfloat16)
