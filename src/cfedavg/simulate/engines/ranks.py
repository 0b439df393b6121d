"""Ranks: processes that share the clients of a run. Rank 0 leads, the others do what it asks for.

Clients are dealt out to the ranks in turn, and a client's residual lives with its rank. All words between
ranks go through `torch.distributed`: objects over gloo, the model over NCCL if each rank has its own GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way to change it later

from cfedavg.core.errors import InputError
from cfedavg.core.interrupts import defer_stops

_FOREVER = timedelta(days=30)  # a round may take long; a rank that dies closes its connection, which shows
# While ranks join, there is no connection yet: one that dies or stops then shows only by its absence.
JOIN = timedelta(minutes=2)  # on this machine, where all are about to; it takes 0.1 s
_JOIN_TORCHRUN = timedelta(minutes=30)  # on others, which may start later


class RankLost(InputError):
    """A process of the run is gone."""


class Ranks:
    """The group as one of its members sees it; alone if there is only one."""

    under_torchrun: ClassVar[bool] = False  # whether this process has joined a group of torchrun's

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._nccl = rank, size, None
        if size > 1:
            init = {"init_method": "env://"} if store is None else {"store": store}
            join = _JOIN_TORCHRUN if store is None else JOIN
            with self.together():
                dist.init_process_group("gloo", rank=rank, world_size=size, timeout=join, **init)
                _set_pg_timeout(_FOREVER)

    @classmethod
    def from_environment(cls) -> Ranks | None:
        """The group that torchrun has set up, if it has."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in os.environ:
            return None
        Ranks.under_torchrun = True
        return cls(int(os.environ["RANK"]), size)

    def mine(self, clients: Iterable[int]) -> list[int]:
        """Those of the clients that live here."""
        return [i for i in clients if i % self.size == self.rank]

    def device(self, device: torch.device) -> torch.device:
        """Where this rank computes: ranks of one machine share its GPUs out among them."""
        if device.type != "cuda" or device.index is not None or self.size == 1:
            return device
        here = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) <= torch.cuda.device_count():
            self._nccl = dist.new_group(backend="nccl", timeout=_FOREVER)
        return torch.device("cuda", here)

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, in the order of the ranks; only rank 0 gets it."""
        if self.size == 1:
            return [mine]
        found = [None] * self.size if self.rank == 0 else None
        with _whole():
            dist.gather_object(mine, found, dst=0)
        return found or []

    def share(self, thing: Any = None) -> Any:
        """What rank 0 has, for everyone."""
        if self.size == 1:
            return thing
        box = [thing]
        with _whole():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_tensor(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, for everyone; the others give one of the same shape."""
        if self.size == 1:
            return tensor
        with _whole():
            if self._nccl is not None:
                dist.broadcast(tensor, src=0, group=self._nccl)
                return tensor
            plain = tensor.cpu()
            dist.broadcast(plain, src=0)
            return plain.to(tensor.device)

    def deal(self, things: Sequence[Any] | None = None) -> Any:
        """One thing for each rank; rank 0 has them all."""
        if self.size == 1:
            assert things is not None
            return things[0]
        box = [None]
        with _whole():
            dist.scatter_object_list(box, list(things) if things else None, src=0)
        return box[0]

    def together(self) -> AbstractContextManager[None]:
        """Around words that belong together: broken off between them, the ranks would misunderstand."""
        return nullcontext() if self.size == 1 else _whole()

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _whole() -> Iterator[None]:
    """Something that all ranks do together: an interrupt waits, a lost connection is a lost rank."""
    with defer_stops():
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankLost(f"a process of the run is gone ({str(error).splitlines()[0][:160]})") from None
