"""The state of a run between two rounds, and the checkpoint of a state, one safetensors file.

A round takes a state and returns a new state. Nothing is changed in place, so an interrupted round leaves the
last state unchanged. If residuals are in memory, the checkpoint holds the residuals. If residuals are on
disk, the checkpoint holds their version numbers, and the residual files lie beside the checkpoint.
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
SERVER = "server."  # prefix of the names of the server's memory vectors


@dataclass(frozen=True)
class State:
    """A run after t rounds: the model x, its buffers b, and the clients' residuals.

    Also the iterate z of Theorem 2, the server's memory, and the model copy w that clients hold.
    """

    t: int
    x: Tensor
    b: Tensor
    residuals: Residuals = field(default_factory=InMemory)
    z: tuple[Tensor, Tensor] | None = None  # x and b of the iterate
    eta_sum: float = 0.0  # of the local rates so far, if z is sampled
    memory: ServerMemory = field(default_factory=ServerMemory)
    # With a compressed broadcast: the clients' model copy, and the record of each client's downloads.
    w: Tensor | None = None
    downloads: Downloads | None = None

    @property
    def broadcast(self) -> Tensor:
        """Return the model that clients train from: w if the broadcast is compressed, else x."""
        return self.x if self.w is None else self.w


@dataclass(frozen=True)
class Vouched:
    """What a checkpoint requires of the other files of a run.

    `rows` is a checksum of the rows of the checkpoint's rounds. `options` are options that must not change.
    """

    rows: int
    options: dict[str, Any]


def save(state: State, path: Path, identity: int, vouched: Vouched) -> None:
    """Write a checkpoint atomically; `identity` is the model's checksum (see `Vectors.identity`)."""
    clients = sorted(state.residuals.norms2)
    tensors = {
        "x": state.x,
        "b": state.b,
        "residuals.client": torch.tensor(clients, dtype=torch.int64),
        # Norms are stored: another device might compute other bits.
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
    """Return the clients' model copy and the tables of their downloads as named tensors."""
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
    """Return the state in a checkpoint and what the checkpoint requires of other files.

    Raise InputError if the checkpoint does not fit. The state gets the shapes and the device of `like`.
    `folder` holds residual files; the run has `clients` clients. A checkpoint of version 0.5 requires nothing
    of other files (None).
    """
    try:
        tensors, about = read_tensors(path)
        if about["format"] != FORMAT:
            raise InputError(
                f"cannot resume: {path} was written by another version of cfedavg "
                f"({reprlib.repr(about['format'])})"
            )
        if ("w" in tensors) != (like.w is not None):
            kind = "with" if "w" in tensors else "without"
            raise InputError(
                f"cannot resume: {path} is from a run {kind} a compressed broadcast; "
                "`compressor_down` must be the same as in that run"
            )
        if about["identity"] != identity or not _fits(tensors, like):
            raise InputError(
                f"cannot resume: {path} holds another model: names, shapes, dtypes or frozen values differ"
            )
        if about.pop("checksum") != checksum(tensors, about):
            raise ValueError("the checksum is wrong")
        _check_numbers(about, tensors, clients, like)
        vouched = Vouched(about["rows"], about["options"]) if "rows" in about else None
        return _state(about, tensors, like.x.device, folder), vouched
    except InputError:
        raise
    except UNREADABLE as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CannotResume(f"the checkpoint {path} is damaged ({why}); start again") from None


def _fits(tensors: dict[str, Tensor], like: State) -> bool:
    """Return whether every vector has the length and dtype of x or b; a residual may also be bf16."""
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
    """Raise ValueError for a number that `save` cannot have written; a forged checksum may be right."""
    t, eta_sum = about["t"], float.fromhex(about["eta_sum"])
    if type(t) is not int or not 0 <= t < 2**53:
        raise ValueError(f"t must be an integer of at least 0 and below 2^53, got {reprlib.repr(t)}")
    if not 0 <= eta_sum < math.inf:
        raise ValueError(f"eta_sum must be finite and at least 0, got {eta_sum}")
    if type(about.get("rows", 0)) is not int or not isinstance(about.get("options", {}), dict):
        raise ValueError("rows must be an integer and options a table")
    clients, norm2 = tensors["residuals.client"], tensors["residuals.norm2"]
    version = tensors.get("residuals.version", torch.ones_like(clients))
    if [each.dtype for each in (clients, norm2, version)] != [torch.int64, torch.float64, torch.int64]:
        raise ValueError("residuals.client and residuals.version must be int64, residuals.norm2 float64")
    if clients.dim() != 1 or not clients.shape == norm2.shape == version.shape:
        raise ValueError("the tables of residuals must be 1-D tensors of equal length")
    if not _increase_below(clients.tolist(), m):
        raise ValueError(f"residuals.client must hold increasing numbers from 0 to {m - 1}")
    if not bool((norm2.isfinite() & (norm2 >= 0) & (version > 0) & (version < 2**53)).all()):
        raise ValueError("residuals.norm2 must be finite and at least 0, residuals.version 1 to 2^53 - 1")
    if like.w is not None:
        _check_downloads(t, tensors, m)
    known = {"x", "b", "residuals.client", "residuals.norm2", *_copy_as_tensors(like)}
    known |= {SERVER + name for name in like.memory.vectors()}
    known |= {"residuals.version"} if "residuals.version" in tensors else {f"e.{i}" for i in clients.tolist()}
    known |= {"z.x", "z.b"} if "z.x" in tensors else set()
    if tensors.keys() != known:
        raise ValueError(f"the tensor {min(tensors.keys() ^ known)!r} is missing or unknown")


def _check_downloads(t: int, tensors: dict[str, Tensor], m: int) -> None:
    """Raise ValueError if t rounds with m clients cannot produce these tables of downloads."""
    if not bool(tensors["w"].isfinite().all()):
        raise ValueError("w holds NaN or Inf")
    clients, versions = tensors["downloads.client"], tensors["downloads.version"]
    lengths, changed = tensors["downloads.length"], tensors["downloads.changed"]
    if {each.dtype for each in (clients, versions, lengths)} != {torch.int64} or clients.dim() != 1:
        raise ValueError("the tables of downloads must be 1-D tensors of int64")
    if clients.shape != versions.shape or lengths.dim() != 1 or not min(t, 1) <= len(lengths) <= min(t, KEPT):
        raise ValueError(
            "downloads.client and downloads.version must have equal lengths, "
            f"and downloads.length {min(t, 1)} to {min(t, KEPT)} entries"
        )
    if not _increase_below(sorted(clients.tolist()), m):
        raise ValueError(f"downloads.client must hold different numbers from 0 to {m - 1}")
    least = [int(each.min()) if len(each) else 0 for each in (versions, changed, lengths)]
    most = [int(each.max()) if len(each) else 0 for each in (versions, changed, lengths)]
    if min(least) < 0 or most[0] >= max(t, 1) or most[1] > t or most[2] >= 2**53:
        raise ValueError(f"a version or length in the tables of downloads is impossible after {t} rounds")


def _increase_below(numbers: list[int], m: int) -> bool:
    """Return whether the numbers increase strictly and are all from 0 to m - 1."""
    return all(a < b for a, b in pairwise([-1, *numbers, m]))


def _state(about: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, folder: Path) -> State:
    """Return the state in a checkpoint whose numbers were checked before."""
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
