"""Stores of the clients' residuals e_i: their base class, and the store in the memory of device or host.

With control variates, a store keeps a client's c_i behind the residual, in the same vector (see `MemoryRow`).

`update` returns a new store. The old store stays valid until the new store is updated in turn. So an
interrupted round can start again from the old store. Threads may still be writing the residuals of a new
store (see `Mover`); whoever needs such a residual waits for its thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.arrays import norms2, to_bf16_at_random, to_single
from cfedavg.core.keys import bits
from cfedavg.simulate.tables import Norms, Table

Put = Callable[[int, Tensor], None]  # puts a client's residual where the store keeps it


class MemoryRow(NamedTuple):
    """What a store keeps of a client in one vector: the residual, and behind it the control variate c_i.

    The two numbers are their lengths; 0 means that clients do not keep it.

    >>> MemoryRow(2, 1).split(torch.tensor([[1, 2, 3]]))
    (tensor([[1, 2]]), tensor([[3]]))
    """

    residual: int
    control: int = 0

    @property
    def length(self) -> int:
        """The length of the vector."""
        return self.residual + self.control

    def split(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return residual and c_i of one vector or of some, a row for each; None for what is not kept."""
        residual, control = rows[..., : self.residual], rows[..., self.residual :]
        return residual if self.residual else None, control if self.control else None

    def join(self, residual: Tensor | None, control: Tensor | None) -> Tensor | None:
        """Return the vector or vectors from which `split` makes these two."""
        kept = [each for each in (residual, control) if each is not None]
        return torch.cat(kept, -1) if len(kept) > 1 else next(iter(kept), None)


class Writes:
    """The residuals of one round that threads are writing."""

    def __init__(self, of_clients: Mapping[int, Future[None]], *others: Future[None]) -> None:
        self._of_clients, self._others = of_clients, others

    def wait(self, client: int | None = None) -> None:
        """Wait for one client's residual, or for all; raise the error of the thread that writes it."""
        if client is None:
            for work in {*self._others, *self._of_clients.values()}:
                work.result()
        elif client in self._of_clients:
            self._of_clients[client].result()

    def has_ended(self, client: int) -> bool:
        """Return whether no thread has to write this client's residual any more."""
        return client not in self._of_clients or self._of_clients[client].done()


# Begins to call the function once, and then `Put` for each residual, in threads.
Write = Callable[[Mapping[int, Tensor], Put, Callable[[], None]], Writes]


@dataclass(eq=False)
class Residuals(ABC):
    """A store of residuals e_i; the residual of a client that never took part is zero."""

    norms2: Norms = field(default_factory=Norms, kw_only=True)  # |e_i|^2 if i took part
    writes: Writes | None = field(default=None, kw_only=True)  # that may not have ended
    row: MemoryRow | None = field(default=None, kw_only=True)  # None: the whole vector is the residual

    def __post_init__(self) -> None:
        for name, table in self._tables().items():
            if not isinstance(table, Table):
                setattr(self, name, (Norms if name == "norms2" else Table)(table))

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {**vars(self), "writes": None}

    def get(self, client: int, like: Tensor) -> Tensor:
        """Return the client's residual in the dtype and on the device of `like`."""
        if client not in self.norms2:
            return torch.zeros_like(like)
        return self.stored(client, like.shape).to(like.device, like.dtype)

    def stored(self, client: int, shape: torch.Size) -> Tensor:
        """Return the stored residual of a client that took part; it must have this shape."""
        if self.writes:
            self.writes.wait(client)
        return self._find(client, shape)

    def is_being_written(self, client: int) -> bool:
        """Return whether a thread still has to write the client's residual."""
        return self.writes is not None and not self.writes.has_ended(client)

    def copy_to(self, client: int, target: Tensor) -> None:
        """Copy the stored residual of a client that took part into `target`, a vector on the host."""
        if self.writes:
            self.writes.wait(client)
        copy(target, self._find(client, target.shape))

    @abstractmethod
    def _find(self, client: int, shape: torch.Size) -> Tensor:
        """Return the residual of a client, which no thread is writing."""

    @abstractmethod
    def lives_on(self, device: torch.device) -> bool:
        """Return whether the residuals are in the memory of this device."""

    def update(self, new: Mapping[int, Tensor], write: Write | None = None) -> Self:
        """Return a new store in which the residuals of `new` replace the old residuals.

        With `write`, threads write them while this store and the new one are used.
        """
        residuals = new.values() if self.row is None else [e[: self.row.residual] for e in new.values()]
        return self._updated(new, dict(zip(new, norms2(residuals), strict=True)), write)

    def _updated(self, new: Mapping[int, Tensor], norms: Mapping[int, float], write: Write | None) -> Self:
        return replace(self, norms2=self.norms2.update(norms), **self._store(new, write))

    @abstractmethod
    def _store(self, new: Mapping[int, Tensor], write: Write | None) -> dict[str, Any]:
        """Store the residuals in `new`; return the fields in which the next store differs, beside norms."""

    def shape(self, x: Tensor) -> torch.Size:
        """Return the shape of a client's vector for the model x."""
        return x.shape if self.row is None else torch.Size([self.row.length])

    def adopt(self, other: Residuals, shape: torch.Size) -> Self:
        """Return a store of the kind and in the place of this one, with the residuals of `other`."""
        new = {i: other.stored(i, shape) for i in other.norms2}
        return self._updated(new, other.norms2, None)  # another device may not compute the same norms

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

    def wait(self) -> None:
        """Wait until no thread writes a residual of this store; raise the error of a thread that failed."""
        if self.writes:
            self.writes.wait()

    def flush(self) -> None:
        """Make the residuals durable; call this before a checkpoint refers to this store."""
        self.wait()  # the checkpoint itself holds residuals in memory

    def settle(self) -> None:  # noqa: B027 - Python frees older residuals in memory
        """Delete older residuals; call this when a checkpoint that refers to this store is durable."""


@dataclass(eq=False)
class InMemory(Residuals):
    """A store of residuals as tensors, in the memory of a device; None is where the engine made each."""

    vectors: Mapping[int, Tensor] = field(default_factory=Table)
    device: torch.device | None = None

    def _find(self, client: int, shape: torch.Size) -> Tensor:
        return self.vectors[client]

    def lives_on(self, device: torch.device) -> bool:
        return self.device is None or self.device.type == device.type

    def _store(self, new: Mapping[int, Tensor], write: Write | None) -> dict[str, Any]:
        assert isinstance(self.vectors, Table)
        places = {client: self.device or e.device for client, e in new.items()}
        if write is None:
            here = {client: e.to(places[client]) for client, e in new.items()}
            return {"vectors": self.vectors.update(here), "writes": None}
        empty = {client: torch.empty_like(e, device=places[client]) for client, e in new.items()}
        writes = write(new, lambda client, e: copy(empty[client], e), lambda: None)
        return {"vectors": self.vectors.update(empty), "writes": writes}


def copy(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`; both are vectors. On the host, use the calling thread only."""
    if target.is_cuda or source.is_cuda or target.dtype != source.dtype or not source.is_contiguous():
        target.copy_(source)
    else:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def gather(residuals: Residuals, clients: Sequence[int], like: Tensor) -> Tensor:
    """Return the residuals of some clients, a row for each, in the dtype and on the device of `like`."""
    known = [row for row, client in enumerate(clients) if client in residuals.norms2]
    if not known:
        return like.new_zeros(len(clients), *like.shape)
    stored = torch.stack([residuals.stored(clients[row], like.shape) for row in known])
    return spread(stored.to(like.device, like.dtype), known, len(clients))


def spread(rows: Tensor, places: Sequence[int], n: int) -> Tensor:
    """Return a matrix of n rows that has `rows` at these places, in increasing order, and zeros elsewhere."""
    if len(places) == n:
        return rows
    matrix = rows.new_zeros(n, *rows.shape[1:])
    matrix[list(places)] = rows
    return matrix


def stochastic_bf16(e: Tensor, keys: Tensor) -> Tensor:
    """Round residuals to bf16, up or down at random so that the mean stays `e`.

    `e` is one vector with one key, or a matrix with one key for each row. float64 is rounded to float32
    first. Rounding to the nearest would lose every update below 2^-9 of the residual.
    """
    draws = bits(keys[..., None], torch.arange(e.shape[-1], device=e.device)) >> 48 & 0xFFFF
    rounded: Tensor = to_bf16_at_random(to_single(e), draws)
    return rounded.view(torch.bfloat16)
