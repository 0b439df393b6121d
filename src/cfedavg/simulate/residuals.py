"""Residuals: e_i of every client that has one, in memory or on disk.

A store is never changed: `updated` gives a new one, and the old one stays valid until the new one is updated
in turn, so a round that is broken off goes back to where it began.

On disk every client has a file for each version of its residual that somebody may still need: the last
checkpoint, the state that the round started from, the state that it makes. No other file is kept, and none of
these is deleted, so a run can be killed between any two steps and go on from its checkpoint.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor

from cfedavg.core.arrays import norms2
from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.files import exists, is_temporary, sync
from cfedavg.core.keys import bits
from cfedavg.core.tensors import UNREADABLE, checksum, free_memory, read_tensors, save_tensors

_NAME = re.compile(r"\d+-\d+\.safetensors")  # 000123-000007.safetensors: client 123, the seventh version
T = TypeVar("T")
_SHARE = 3  # residuals may take up a third of the memory that is free; the rest is the training's


class Residuals(ABC):
    """e_i of the clients that have one; a client that never took part has none, which means zero."""

    norms2: Mapping[int, float]

    def get(self, client: int, like: Tensor) -> Tensor:
        """e_i, of the dtype and on the device of `like`."""
        if client not in self.norms2:
            return torch.zeros_like(like)
        return self.stored(client, like.shape).to(like.device, like.dtype)

    @abstractmethod
    def stored(self, client: int, shape: torch.Size) -> Tensor:
        """e_i of a client that has one, as it is kept."""

    @abstractmethod
    def updated(self, new: Mapping[int, Tensor]) -> Self:
        """These residuals with some replaced."""

    @abstractmethod
    def adopted(self, other: Residuals, like: Tensor) -> Self:
        """The residuals of another store, kept in the way of this one."""

    @abstractmethod
    def only(self, clients: Container[int]) -> Self:
        """The residuals of some clients."""

    @classmethod
    @abstractmethod
    def merged(cls, parts: Sequence[Self]) -> Self:
        """The union of stores of different clients."""

    @abstractmethod
    def flush(self) -> None:
        """Before a checkpoint refers to this store: makes sure that a power cut loses nothing of it."""

    @abstractmethod
    def settled(self) -> None:
        """A checkpoint that refers to this store is durable: nobody goes back to what was before."""


@dataclass(frozen=True)
class InMemory(Residuals):
    """Residuals as tensors, on the device where the engine made them."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    norms2: Mapping[int, float] = field(default_factory=dict)

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        return self.vectors[client]

    def updated(self, new: Mapping[int, Tensor]) -> InMemory:
        norms = dict(zip(new, norms2(new.values()), strict=True))
        return InMemory({**self.vectors, **new}, {**self.norms2, **norms})

    def adopted(self, other: Residuals, like: Tensor) -> InMemory:
        if isinstance(other, InMemory):
            return other
        vectors = {client: other.stored(client, like.shape).to(like.device) for client in other.norms2}
        return InMemory(vectors, other.norms2)

    def only(self, clients: Container[int]) -> InMemory:
        return InMemory(_among(clients, self.vectors), _among(clients, self.norms2))

    @classmethod
    def merged(cls, parts: Sequence[InMemory]) -> InMemory:
        return InMemory(_union(part.vectors for part in parts), _union(part.norms2 for part in parts))

    def flush(self) -> None:
        """Memory needs none: the checkpoint holds the vectors themselves."""

    def settled(self) -> None:
        """Memory needs none: what nobody refers to is gone."""


@dataclass(eq=False)
class OnDisk(Residuals):
    """Residuals as files of a folder; in memory are only their versions and norms."""

    folder: Path
    versions: Mapping[int, int] = field(default_factory=dict)
    norms2: Mapping[int, float] = field(default_factory=dict)
    fresh: frozenset[int] = frozenset()  # clients whose version here is not in the last checkpoint
    vouched: Mapping[int, int] = field(default_factory=dict)  # the versions of theirs that are
    replaced: Mapping[int, int] = field(default_factory=dict)  # what the state before needs, and it alone

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}-{version:06d}.safetensors"

    def paths(self) -> set[Path]:
        """The files that this store refers to."""
        return {self.path(*item) for item in self.versions.items()}

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        version = self.versions[client]
        path = self.path(client, version)
        try:
            tensors, about = read_tensors(path)
            if about.pop("checksum") != checksum(tensors, about):
                raise ValueError("its checksum is wrong")
            e: Tensor = tensors["e"]
            if about != {"client": client, "version": version} or e.shape != shape:
                raise ValueError("it holds another residual")
            if not e.is_floating_point():
                raise ValueError(f"a residual must be of floats, not of {e.dtype}")
        except UNREADABLE as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
            raise InputError(f"the residual file {path} {why}; start the run again") from None
        return e.clone()  # from the mapped file into memory: the file may be deleted

    def updated(self, new: Mapping[int, Tensor]) -> OnDisk:
        _delete(self.path(*item) for item in self.replaced.items())  # whoever needed them is two rounds back
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
        """Not synced yet: most versions are replaced before any checkpoint refers to them."""
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
            f"the residuals cannot be kept in {self.folder} ({error}); make room there and set `resume`, or "
            "start again with another `out`, or with `residual_precision` bf16, which needs half the bytes"
        )

    def adopted(self, other: Residuals, like: Tensor) -> OnDisk:
        if isinstance(other, OnDisk):
            return other
        made = self.updated({client: other.stored(client, like.shape) for client in other.norms2})
        made.norms2 = other.norms2  # to the bit, wherever they were computed
        return made

    def only(self, clients: Container[int]) -> OnDisk:
        return OnDisk(
            self.folder,
            _among(clients, self.versions),
            _among(clients, self.norms2),
            frozenset(client for client in self.fresh if client in clients),
            _among(clients, self.vouched),
            _among(clients, self.replaced),
        )

    @classmethod
    def merged(cls, parts: Sequence[OnDisk]) -> OnDisk:
        return OnDisk(
            parts[0].folder,
            _union(part.versions for part in parts),
            _union(part.norms2 for part in parts),
            frozenset().union(*(part.fresh for part in parts)),
            _union(part.vouched for part in parts),
            _union(part.replaced for part in parts),
        )

    def check(self) -> None:
        """Whether all files are there, before a run goes on with them; what they hold shows when read."""
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

    def settled(self) -> None:
        outdated = [self.path(*item) for old in (self.vouched, self.replaced) for item in old.items()]
        # First this, then the files: were it broken off in between, `updated` must not take what is now
        # the checkpoint's for something that only the state before needs.
        self.fresh, self.vouched, self.replaced = frozenset(), {}, {}
        _delete(outdated)


def sweep(folder: Path, residuals: Residuals) -> None:
    """Deletes what broken-off rounds left in the folder: all files of residuals but those of this store."""
    if not exists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, and must be a folder; move it away")
    keep = residuals.paths() if isinstance(residuals, OnDisk) else set()
    _delete(path for path in folder.iterdir() if path not in keep and _is_ours(path.name))
    with suppress(OSError):  # not empty
        folder.rmdir()


def _is_ours(name: str) -> bool:
    """Whether a file is a residual's, or what was left of one."""
    return _NAME.fullmatch(name) is not None or is_temporary(name)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"cannot delete {path} ({error.strerror}), a residual of the past") from None


def _among(clients: Container[int], values: Mapping[int, T]) -> dict[int, T]:
    return {client: value for client, value in values.items() if client in clients}


def _union(parts: Iterable[Mapping[int, T]]) -> dict[int, T]:
    found: dict[int, T] = {}
    for part in parts:
        if not found.keys().isdisjoint(part):
            raise ValueError("a client is in two of the parts")
        found |= part
    return found


def choose(where: str, size: int, device: torch.device) -> str:
    """`memory` or `disk`, for residuals of `size` bytes in all; `auto` looks at what is free."""
    if where != "auto":
        return where
    return "memory" if size <= free_memory(device) / _SHARE else "disk"


def stochastic_bf16(e: Tensor, keys: Tensor) -> Tensor:
    """A block (n, d) with n keys, or one vector with one key, rounded to bf16 up or down at random.

    The mean is e itself (float64 goes through float32 first). To the nearest, an update below 2^-9 of the
    residual would be lost, round after round; at random it counts on average. 16 random bits added to those
    that bf16 has no room for carry over as often as they should; what is bf16 already stays as it is.
    """
    top = torch.finfo(torch.bfloat16).max  # beyond it there would only be infinity to round up to
    pattern = e.clamp(-top, top).float().contiguous().view(torch.int32)
    draws = bits(keys[..., None], torch.arange(e.shape[-1], device=e.device)) >> 48 & 0xFFFF
    rounded: Tensor = (pattern + draws.int() >> 16).to(torch.int16)
    return rounded.view(torch.bfloat16)
