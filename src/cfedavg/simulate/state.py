"""State: a run between two rounds, and its checkpoint, one safetensors file.

A state goes into a round and a new one comes out. Nothing is changed in place, so a round that is broken off
leaves the last state unchanged. A checkpoint holds residuals in memory whole, and of those on disk the
versions; their files lie beside it.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfedavg.algorithm import ServerMemory
from cfedavg.channel import KEPT
from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.tensors import UNREADABLE, checksum, read_tensors, save_tensors
from cfedavg.simulate.downloads import Downloads
from cfedavg.simulate.residuals import InMemory, OnDisk, Residuals

FORMAT = "cfedavg checkpoint 2"
SERVER = "server."  # before the names of what the server remembers


@dataclass(frozen=True)
class State:
    """A run after t rounds: the model x and its travelling buffers b, what the clients' feedback remembers
    (residuals), the iterate z of Theorem 2, the server's memory, and the copy w that clients hold.
    """

    t: int
    x: Tensor
    b: Tensor
    residuals: Residuals = field(default_factory=InMemory)
    z: tuple[Tensor, Tensor] | None = None  # x and b of the iterate
    eta_sum: float = 0.0
    memory: ServerMemory = field(default_factory=ServerMemory)
    # With a compressed broadcast: the copy that all clients hold, and what each of them has downloaded.
    w: Tensor | None = None
    downloads: Downloads | None = None

    @property
    def broadcast(self) -> Tensor:
        """Return the model that clients train from."""
        return self.x if self.w is None else self.w


@dataclass(frozen=True)
class Vouched:
    """What a checkpoint requires of the other files of a run.

    `rows` is a checksum of the rows of its rounds, `options` the options that may not change.
    """

    rows: int
    options: dict[str, Any]


def save(state: State, path: Path, identity: int, vouched: Vouched) -> None:
    """Write a checkpoint atomically; `identity` is the model's (see Vectors)."""
    clients = sorted(state.residuals.norms2)
    tensors = {
        "x": state.x,
        "b": state.b,
        "residuals.client": torch.tensor(clients, dtype=torch.int64),
        # Another device would sum a norm to other bits.
        "residuals.norm2": torch.tensor([state.residuals.norms2[i] for i in clients], dtype=torch.float64),
    }
    if isinstance(state.residuals, OnDisk):
        versions = [state.residuals.versions[i] for i in clients]
        tensors["residuals.version"] = torch.tensor(versions, dtype=torch.int64)
    else:
        assert isinstance(state.residuals, InMemory)
        tensors |= {f"e.{client}": e for client, e in state.residuals.vectors.items()}
    tensors |= {SERVER + name: vector for name, vector in state.memory.vectors().items()}
    if state.z is not None:
        tensors["z.x"], tensors["z.b"] = state.z
    tensors |= _copy_as_tensors(state)
    plain = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    about: dict[str, Any] = {
        "format": FORMAT,
        "t": state.t,
        "eta_sum": state.eta_sum.hex(),
        "identity": identity,
        "rows": vouched.rows,
        "options": vouched.options,
    }
    save_tensors(plain, path, {**about, "checksum": checksum(plain, about)})


def _copy_as_tensors(state: State) -> dict[str, Tensor]:
    """Return the copy that clients hold, and the tables of what they have downloaded."""
    if state.w is None or state.downloads is None:
        return {}
    known = state.downloads
    return {
        "w": state.w,
        "downloads.changed": known.changed,
        "downloads.length": torch.tensor(known.lengths, dtype=torch.int64),
        "downloads.client": torch.tensor(list(known.held.keys()), dtype=torch.int64),
        "downloads.version": torch.tensor(list(known.held.values()), dtype=torch.int64),
    }


def load(path: Path, identity: int, like: State, folder: Path, clients: int) -> tuple[State, Vouched | None]:
    """Read a checkpoint in the shapes and onto the device of `like`; raise InputError if it does not fit.

    `folder` holds the files of residuals on disk; a run has so many `clients`. Checkpoints of version 0.5
    vouch for nothing else.
    """
    try:
        tensors, about = read_tensors(path)
        if about["format"] != FORMAT:
            raise InputError(
                f"cannot resume: {path} was written by another version ({reprlib.repr(about['format'])})"
            )
        if ("w" in tensors) != (like.w is not None):
            some, kind = ("a", "with") if "w" in tensors else ("no", "without")
            found = f"{some} copy of the model, as runs {kind}"
            raise InputError(
                f"cannot resume: {path} holds {found} a compressed broadcast do; "
                "`compressor_down` must stay as it was"
            )
        if about["identity"] != identity or not _fits(tensors, like):
            raise InputError(
                f"cannot resume: {path} holds another model: names, shapes, dtypes or frozen values differ"
            )
        if about.pop("checksum") != checksum(tensors, about):
            raise ValueError("its checksum is wrong")
        _check_numbers(about, tensors, clients, like)
        vouched = Vouched(about["rows"], about["options"]) if "rows" in about else None
        return _state(about, tensors, like.x.device, folder), vouched
    except InputError:
        raise
    except UNREADABLE as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CannotResume(f"the checkpoint {path} is damaged ({why}); start again") from None


def _fits(tensors: dict[str, Tensor], like: State) -> bool:
    """Return whether every vector has the length and dtype of x or b; a residual may be bf16."""
    for name, tensor in tensors.items():
        wanted: Tensor = like.b if name in ("b", "z.b") else like.x
        if name == "downloads.changed" and like.downloads is not None:
            wanted = like.downloads.changed
        elif name.startswith(("residuals.", "downloads.")) and name != "downloads.changed":
            continue
        dtypes = {wanted.dtype, torch.bfloat16} if name.startswith("e.") else {wanted.dtype}
        if tensor.shape != wanted.shape or tensor.dtype not in dtypes:
            return False
    return True


def _check_numbers(about: dict[str, Any], tensors: dict[str, Tensor], m: int, like: State) -> None:
    """Raise ValueError unless `save` can have written every number: a checksum proves nothing."""
    t, eta_sum = about["t"], float.fromhex(about["eta_sum"])
    if type(t) is not int or not 0 <= t < 2**53:
        raise ValueError(f"t must be a whole number from 0 to 2^53, got {reprlib.repr(t)}")
    if not 0 <= eta_sum < math.inf:
        raise ValueError(f"eta_sum must be finite and 0 or more, got {eta_sum}")
    if type(about.get("rows", 0)) is not int or not isinstance(about.get("options", {}), dict):
        raise ValueError("rows must be a checksum and options a table")
    clients, norm2 = tensors["residuals.client"], tensors["residuals.norm2"]
    version = tensors.get("residuals.version", torch.ones_like(clients))
    if [each.dtype for each in (clients, norm2, version)] != [torch.int64, torch.float64, torch.int64]:
        raise ValueError("a table of residuals is of another dtype")
    if clients.dim() != 1 or not clients.shape == norm2.shape == version.shape:
        raise ValueError("the tables of residuals have different lengths")
    if not _increase_below(clients.tolist(), m):
        raise ValueError(f"its residuals must be of clients from 0 to {m - 1}, in order")
    if not bool((norm2.isfinite() & (norm2 >= 0) & (version > 0) & (version < 2**53)).all()):
        raise ValueError("a norm or a version of a residual is out of range")
    if like.w is not None:
        _check_downloads(t, tensors, m)
    known = {"x", "b", "residuals.client", "residuals.norm2", *_copy_as_tensors(like)}
    known |= {SERVER + name for name in like.memory.vectors()}
    known |= {"residuals.version"} if "residuals.version" in tensors else {f"e.{i}" for i in clients.tolist()}
    known |= {"z.x", "z.b"} if "z.x" in tensors else set()
    if tensors.keys() != known:
        raise ValueError(f"{min(tensors.keys() ^ known)!r} is missing or one too many")


def _check_downloads(t: int, tensors: dict[str, Tensor], m: int) -> None:
    """Raise ValueError unless t rounds with m clients can leave these tables of downloads."""
    if not bool(tensors["w"].isfinite().all()):
        raise ValueError("w holds NaN or Inf")
    clients, versions = tensors["downloads.client"], tensors["downloads.version"]
    lengths, changed = tensors["downloads.length"], tensors["downloads.changed"]
    if {each.dtype for each in (clients, versions, lengths)} != {torch.int64} or clients.dim() != 1:
        raise ValueError("a table of downloads is of another dtype")
    if clients.shape != versions.shape or lengths.dim() != 1 or not min(t, 1) <= len(lengths) <= min(t, KEPT):
        raise ValueError("a table of downloads has another length")
    if not _increase_below(sorted(clients.tolist()), m):
        raise ValueError(f"its downloads must be of clients from 0 to {m - 1}, each once")
    least = [int(each.min()) if len(each) else 0 for each in (versions, changed, lengths)]
    most = [int(each.max()) if len(each) else 0 for each in (versions, changed, lengths)]
    if min(least) < 0 or most[0] >= max(t, 1) or most[1] > t or most[2] >= 2**53:
        raise ValueError("a version or a length of its downloads is out of range")


def _increase_below(numbers: list[int], m: int) -> bool:
    """Return whether the numbers increase strictly from 0 or more to below m."""
    return all(a < b for a, b in pairwise([-1, *numbers, m]))


def _state(about: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, folder: Path) -> State:
    """Return the state that a checked checkpoint holds."""
    there = {name: tensor.to(device) for name, tensor in tensors.items() if "residuals." not in name}
    z = (there["z.x"], there["z.b"]) if "z.x" in there else None
    clients = tensors["residuals.client"].tolist()
    norms2 = dict(zip(clients, tensors["residuals.norm2"].tolist(), strict=True))
    residuals: Residuals
    if "residuals.version" in tensors:
        versions = dict(zip(clients, tensors["residuals.version"].tolist(), strict=True))
        residuals = OnDisk(folder, versions, norms2)
    else:
        residuals = InMemory({client: there[f"e.{client}"] for client in clients}, norms2)
    server = {name.removeprefix(SERVER): vector for name, vector in there.items() if name.startswith(SERVER)}
    memory, eta_sum = ServerMemory.from_vectors(server), float.fromhex(about["eta_sum"])
    state = State(about["t"], there["x"], there["b"], residuals, z, eta_sum, memory)
    if "w" not in there:
        return state
    lengths = tuple(there["downloads.length"].tolist())
    pairs = zip(there["downloads.client"].tolist(), there["downloads.version"].tolist(), strict=True)
    return replace(state, w=there["w"], downloads=Downloads(there["downloads.changed"], lengths, dict(pairs)))
