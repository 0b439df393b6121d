"""Ranks: processes that divide the clients of a run. Rank 0 sends commands, the other ranks obey.

Client i belongs to rank i modulo the number of ranks; that rank keeps the client's residual. Ranks exchange
data by `torch.distributed`: objects over gloo, the model over NCCL if each rank has its own GPU.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # no public function does this

from cfedavg.algorithm import ServerMemory
from cfedavg.core.config import Config, toml_value
from cfedavg.core.errors import InputError
from cfedavg.core.interrupts import defer_stops
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.residuals import InMemory, Residuals
from cfedavg.simulate.state import State
from cfedavg.task import Task, fingerprint_content

_FOREVER = timedelta(days=30)  # a round may take long; a rank that dies is noticed by its closed connection
# While ranks join, there is no connection yet: only a timeout shows that a rank has died or stopped.
JOIN = timedelta(minutes=2)  # for ranks on this machine, which are ready to join; joining takes 0.1 s
_JOIN_TORCHRUN = timedelta(minutes=30)  # for ranks on other machines, which may start later


class RankLost(InputError):
    """The error that a process of the run has ended or cannot be reached."""


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"`device` {name} cannot be used here; try auto or cpu") from None
    return device


class Ranks:
    """The group of processes (ranks) of a run, as one of them sees it."""

    under_torchrun: ClassVar[bool] = False  # whether this process has joined torchrun's group

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._nccl = rank, size, None
        if size > 1:
            init = {"init_method": "env://"} if store is None else {"store": store}
            join = _JOIN_TORCHRUN if store is None else JOIN
            with self.uninterrupted():
                dist.init_process_group("gloo", rank=rank, world_size=size, timeout=join, **init)
                _set_pg_timeout(_FOREVER)

    @classmethod
    def from_environment(cls) -> Ranks | None:
        """Join and return torchrun's group of ranks; return None outside torchrun."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in os.environ:
            return None
        Ranks.under_torchrun = True
        return cls(int(os.environ["RANK"]), size)

    def own(self, clients: Iterable[int]) -> list[int]:
        """Return the clients that belong to this rank."""
        return [i for i in clients if i % self.size == self.rank]

    def device(self, device: torch.device) -> torch.device:
        """Return the device of this rank; the ranks of a machine divide the machine's GPUs."""
        if device.type != "cuda" or device.index is not None or self.size == 1:
            return device
        here = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) <= torch.cuda.device_count():
            self._nccl = dist.new_group(backend="nccl", timeout=_FOREVER)
        return torch.device("cuda", here)

    def gather(self, value: Any) -> list[Any]:
        """Return on rank 0 the values of all ranks, in order of rank; on other ranks an empty list."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.rank == 0 else None
        with _exchange():
            dist.gather_object(value, found, dst=0)
        return found or []

    def share(self, value: Any = None) -> Any:
        """Return the value of rank 0 on every rank; there must be two ranks or more."""
        box = [value]
        with _exchange():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_tensor(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank; the other ranks pass a tensor of the same shape.

        There must be two ranks or more.
        """
        with _exchange():
            if self._nccl is not None:
                dist.broadcast(tensor, src=0, group=self._nccl)
                return tensor
            plain = tensor.cpu()
            dist.broadcast(plain, src=0)
            return plain.to(tensor.device)

    def scatter(self, values: list[Any] | None = None) -> Any:
        """Return `values[i]` on rank i; only rank 0 passes `values`. There must be two ranks or more."""
        box = [None]
        with _exchange():
            dist.scatter_object_list(box, values, src=0)
        return box[0]

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Delay interrupts inside `with`: an interrupt between two exchanges would put ranks out of step."""
        return nullcontext() if self.size == 1 else _exchange()

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _exchange() -> Iterator[None]:
    """Inside `with`, delay interrupts and turn a lost connection between ranks into RankLost."""
    with defer_stops():
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankLost(f"a process of the run is gone ({str(error).splitlines()[0][:160]})") from None


class RankCommands:
    """The sender of rank 0's commands to the other ranks. With one process, commands do nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._waiting = False  # whether results of other ranks are due

    def begin(self, state: State, m: int) -> State:
        """Send each rank the residuals of its clients; return the state with rank 0's residuals.

        The run has `m` clients.
        """
        size = self.ranks.size
        if size == 1:
            return state
        parts = [state.residuals.select(range(rank, m, size)) for rank in range(size)]
        with self.ranks.uninterrupted():
            self.send("begin", state)
            self.ranks.scatter(parts)
        return dataclasses.replace(state, residuals=parts[0])

    def send(self, command: str, state: State | None) -> None:
        """Send a command; after `round`, `evaluate` or `residuals`, the caller must call `collect`."""
        if self.ranks.size == 1:
            return
        with self.ranks.uninterrupted():
            if self._waiting:  # a round was interrupted: receive and drop its results
                self.collect(None)
            self.ranks.share((command, state and (state.t, state.doublings)))
            if command in ("round", "evaluate"):
                assert state is not None
                for tensor in _shared_tensors(state).values():
                    self.ranks.share_tensor(tensor)
            self._waiting = command in ("round", "evaluate", "residuals")

    def collect(self, mine: Any) -> list[Any]:
        """Return the results of all ranks; `mine`, the result of rank 0, is first."""
        with self.ranks.uninterrupted():
            found = self.ranks.gather(None)  # not `mine`, which pickle may be unable to send
            self._waiting = False
        return [mine, *found[1:]]

    def dismiss(self) -> None:
        """End the other ranks."""
        with self.ranks.uninterrupted():
            self.send("stop", None)
            self.collect(None)  # then all ranks have received the command, and connections may be closed


def obey(ranks: Ranks, state: State, compute: Callable[[str, State], tuple[Any, Residuals]]) -> State:
    """Carry out rank 0's commands until rank 0 ends this rank; return the last state received.

    `compute` runs the command `round` or `evaluate`; it returns the result and the new residuals. This rank
    keeps the residuals from before and after the last round: rank 0 may run an interrupted round again.
    """
    residuals = dict[int, Residuals]()
    while True:
        command, when = ranks.share()
        if command == "stop":
            ranks.gather(None)
            return state
        t, doublings = when
        if command == "begin":
            residuals = {t: ranks.scatter()}
        elif command == "residuals":
            ranks.gather(_when_written(residuals[t]))
        elif command == "settle":
            residuals[t].settle()
        else:
            known = {name: ranks.share_tensor(v.clone()) for name, v in _shared_tensors(state).items()}
            memory = ServerMemory(known.get("feedback"))
            control = state.control and dataclasses.replace(state.control, c=known["c"])
            mine, vectors = residuals.get(t, InMemory()), (known["x"], known["b"])
            state = State(t, *vectors, mine, memory=memory, control=control, doublings=doublings)
            try:
                found, after = compute(command, state)
                if command == "round":
                    residuals[t + 1] = after
                    residuals.pop(t - 1, None)
            except Exception as error:  # rank 0 raises it
                found = _make_portable(error)
            ranks.gather(found)


def _when_written(residuals: Residuals) -> Residuals | Exception:
    """Wait until threads have written the residuals; return an error of such a thread."""
    try:
        residuals.wait()
    except Exception as error:  # rank 0 raises it
        return _make_portable(error)
    return residuals


def _shared_tensors(state: State) -> dict[str, Tensor]:
    """Return what every rank needs of a state: broadcast model, buffers, the feedback's server memory, c."""
    found = {"x": state.broadcast, "b": state.b, "feedback": state.memory.feedback}
    found["c"] = state.control and state.control.c
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _make_portable(error: Exception) -> Exception:
    """Return an error that pickle can send to rank 0: `error`, or else a RuntimeError with its text.

    Add the traceback to `error` as a note, unless `error` is a plain InputError, whose text is enough.
    """
    if not isinstance(error, InputError) or error.__cause__:  # the cause may be in the user's code
        error.add_note("on another rank: " + "".join(traceback.format_exception(error)))
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # an error class of the user may raise anything
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def describe_run(config: Config, task: Task) -> dict[str, str]:
    """Return the named values that must be equal on every rank of torchrun.

    Ranks may differ in the data folder and in the index of the GPU. Either all ranks use GPUs, or none. The
    values of trainable parameters may differ: all ranks start from rank 0's values.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config) if f.name != "data_dir"}
    device = choose_device(config.device)
    values["device"] = device.type + (":N" if device.index is not None else "")
    sizes = [len(samples) for samples in task.clients]
    return {f"`{name}`": "none" if value is None else toml_value(value) for name, value in values.items()} | {
        "the number of clients": str(len(sizes)),
        "the number of samples": str(sum(sizes)),
        "the number of test samples": "none" if task.test is None else str(len(task.test)),
        "the hash of layout and frozen values": f"{Vectors(task.model).identity():08x}",
        "the hash of the data": fingerprint_content(task),
    }


def check_same(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Raise the same InputError on every rank if a value of any rank differs from rank 0's value."""
    everyone: list[Mapping[str, str]] = ranks.share(ranks.gather(dict(mine)))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            values = ", ".join(
                f"{name} is {other.get(name, 'missing')} instead of {first.get(name, 'missing')}"
                for name in differing
            )
            raise InputError(
                f"rank {rank} differs from rank 0: {values}; start all ranks with the same options and data"
            )
