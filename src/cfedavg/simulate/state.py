"""The state of a run between two rounds, and the checkpoint of a state, one safetensors file.

A round takes a state and returns a new state. Nothing is changed in place, so an interrupted round leaves the
last state unchanged. If residuals are in memory, the checkpoint holds the residuals. If residuals are on
disk, the checkpoint holds their version numbers, and the residual files lie beside the checkpoint.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator
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
from cfedavg.simulate.host_copies import Copy, copy_here
from cfedavg.simulate.residual_files import OnDisk
from cfedavg.simulate.residuals import InMemory, Residuals
from cfedavg.simulate.tables import Norms, Table

FORMAT = "cfedavg checkpoint 2"
SERVER = "server."  # prefix of the names of the server's memory vectors
CONTROL = "control."  # prefix of the names of what the server keeps for the control variates
_STORED = ("e.", "residuals.")  # prefixes of the names of residuals, which may not live on the device


@dataclass(frozen=True)
class Control:
    """What the server keeps for the control variates (see `cfedavg.control`)."""

    # What clients get: the mean of all c_i; with a compressed broadcast, the clients' copy of this mean.
    c: Tensor
    total: Tensor  # the sum of all c_i
    downloads: Downloads | None = None  # with a compressed broadcast: the record of each client's copy


@dataclass(frozen=True)
class State:
    """A run after t rounds: the model x, its buffers b, and the clients' residuals.

    The state also holds the iterate z of Theorem 2, the server's memory, and the clients' model copy w.
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
    doublings: int = 0  # how often the guard has doubled what clients send; the rows of metrics tell it
    control: Control | None = None

    @property
    def broadcast(self) -> Tensor:
        """Return the model that clients train from: w if the broadcast is compressed, else x."""
        return self.x if self.w is None else self.w


def save(state: State, path: Path, about: dict[str, Any], copy: Copy = copy_here) -> None:
    """Write a checkpoint atomically; `copy` copies its tensors to main memory.

    `about` holds what a resume checks: `identity` (see `Vectors.identity`); `rows`, a checksum of the rows of
    metrics; and `options`, the options that must not change.
    """
    tensors = copy(_as_tensors(state))
    about = {"format": FORMAT, "t": state.t, "eta_sum": state.eta_sum.hex(), **about}
    save_tensors(tensors, path, {**about, "checksum": checksum(tensors, about)})


def _as_tensors(state: State) -> dict[str, Tensor]:
    """Return the content of a state as tensors, by their names in a checkpoint."""
    known, clients = state.residuals, sorted(state.residuals.norms2)
    found = {"x": state.x, "b": state.b, "residuals.client": _integers(clients)}
    # Norms are stored: another device might compute other bits.
    found["residuals.norm2"] = torch.tensor([known.norms2[i] for i in clients], dtype=torch.float64)
    if isinstance(known, OnDisk):
        found["residuals.version"] = _integers(known.versions[i] for i in clients)
    else:
        assert isinstance(known, InMemory)
        found |= {f"e.{client}": e for client, e in known.vectors.items()}
    found |= {SERVER + name: vector for name, vector in state.memory.vectors().items()}
    if state.z is not None:
        found["z.x"], found["z.b"] = state.z
    if state.w is not None and state.downloads is not None:
        found |= {"w": state.w, **_tables_of(state.downloads)}
    if control := state.control:
        tables = {} if control.downloads is None else _tables_of(control.downloads)
        both = {"c": control.c, "total": control.total, **tables}
        found |= {CONTROL + name: tensor for name, tensor in both.items()}
    return found


def _tables_of(downloads: Downloads) -> dict[str, Tensor]:
    return {
        "downloads.changed": downloads.changed,
        "downloads.length": _integers(downloads.lengths),
        "downloads.client": _integers(downloads.held.keys()),
        "downloads.version": _integers(downloads.held.values()),
    }


def _integers(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)


def load(path: Path, identity: int, like: State, folder: Path, clients: int) -> tuple[State, dict[str, Any]]:
    """Return the state in a checkpoint, and the dictionary `about` that was saved with it.

    Raise InputError if the checkpoint is damaged or does not fit the run. The run has `clients` clients, a
    model with this `identity`, and states like `like`, whose device the result gets. `folder` holds residual
    files. A checkpoint of cfedavg 0.5 has neither `rows` nor `options` in `about`.
    """
    try:
        tensors, about = read_tensors(path)
        if about["format"] != FORMAT:
            raise InputError(
                f"cannot resume: {path} was written by another version of cfedavg "
                f"({reprlib.repr(about['format'])}); use that version, or start again in another folder"
            )
        if ("w" in tensors) != (like.w is not None):
            kind = "with" if "w" in tensors else "without"
            raise InputError(
                f"cannot resume: {path} is from a run {kind} a compressed broadcast; "
                "`compressor_down` must be the same as in that run"
            )
        expected = _as_tensors(replace(like, residuals=InMemory()))
        row = like.residuals.shape(like.x)
        if about["identity"] != identity or not _fits(tensors, expected, row):
            raise InputError(
                f"cannot resume: {path} holds another model: names, shapes, dtypes or frozen values differ; "
                "use the model of that run, or start again in another folder"
            )
        if about.pop("checksum") != checksum(tensors, about):
            raise ValueError("the checksum is wrong")
        # The checksum of a forged file may be right, so the content is checked too.
        for holds, rule in _rules(about, tensors, clients, set(expected)):
            if not holds:
                raise ValueError(rule)
        return _state(about, tensors, like.x.device, folder), about
    except InputError:
        raise
    except UNREADABLE as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CannotResume(
            f"the checkpoint {path} is damaged ({why}); start again in another folder"
        ) from None


def _fits(tensors: dict[str, Tensor], expected: dict[str, Tensor], row: torch.Size) -> bool:
    """Return whether every vector has its expected length and dtype; a residual may also be bf16.

    `row` is the shape of what a client keeps.
    """
    x, b = expected["x"], expected["b"]
    for name, tensor in tensors.items():
        table = name.removeprefix(CONTROL)
        if table.startswith(("residuals.", "downloads.")) and table != "downloads.changed":
            continue  # its length varies
        if name.startswith("e."):
            shape, dtypes = row, {x.dtype, torch.bfloat16}
        else:
            wanted = b if name == "z.b" else expected.get(name, x)
            shape, dtypes = wanted.shape, {wanted.dtype}
        if tensor.shape != shape or tensor.dtype not in dtypes:
            return False
    return True


def _rules(
    about: dict[str, Any], tensors: dict[str, Tensor], m: int, names: set[str]
) -> Iterator[tuple[bool, str]]:
    """Yield, for each rule on a checkpoint of m clients, whether the rule holds, and the rule as a sentence.

    The caller must stop at a rule that does not hold: later rules rely on earlier ones. `names` are the names
    of the tensors that every checkpoint has.
    """
    t, eta_sum = about["t"], float.fromhex(about["eta_sum"])
    whole = type(t) is int and 0 <= t < 2**53
    yield whole, f"t must be an integer of at least 0 and below 2^53, got {reprlib.repr(t)}"
    yield 0 <= eta_sum < math.inf, f"eta_sum must be finite and at least 0, got {eta_sum}"
    typed = type(about.get("rows", 0)) is int and isinstance(about.get("options", {}), dict)
    yield typed, "rows must be an integer and options a table"
    clients, norm2 = tensors["residuals.client"], tensors["residuals.norm2"]
    version = tensors.get("residuals.version", torch.ones_like(clients))
    typed = [each.dtype for each in (clients, norm2, version)] == [torch.int64, torch.float64, torch.int64]
    yield typed, "residuals.client and residuals.version must be int64, residuals.norm2 float64"
    equal = clients.dim() == 1 and clients.shape == norm2.shape == version.shape
    yield equal, "the tables of residuals must be 1-D tensors of equal length"
    numbers = clients.tolist()
    yield _increase_below(numbers, m), f"residuals.client must hold increasing numbers from 0 to {m - 1}"
    right = norm2.isfinite() & (norm2 >= 0) & (version > 0) & (version < 2**53)
    rule = "residuals.norm2 must be finite and at least 0, residuals.version 1 to 2^53 - 1"
    yield bool(right.all()), rule
    for name in names & {"w", CONTROL + "c", CONTROL + "total"}:
        yield bool(tensors[name].isfinite().all()), f"{name} holds NaN or Inf"
    for prefix in ("", CONTROL):
        if prefix + "downloads.changed" in names:
            yield from _download_rules(t, _below(prefix, tensors), m)
    names |= {"residuals.version"} if "residuals.version" in tensors else {f"e.{i}" for i in numbers}
    names |= {"z.x", "z.b"} if "z.x" in tensors else set()
    odd = min(tensors.keys() ^ names, default=None)
    yield odd is None, f"the tensor {odd!r} is missing or unknown"


def _download_rules(t: int, tensors: dict[str, Tensor], m: int) -> Iterator[tuple[bool, str]]:
    """Yield, as `_rules` does, the rules on the record of downloads after t rounds with m clients."""
    clients, versions = tensors["downloads.client"], tensors["downloads.version"]
    lengths, changed = tensors["downloads.length"], tensors["downloads.changed"]
    typed = {each.dtype for each in (clients, versions, lengths)} == {torch.int64}
    yield typed and clients.dim() == 1, "the tables of downloads must be 1-D tensors of int64"
    least, most = min(t, 1), min(t, KEPT)
    yield (
        clients.shape == versions.shape and lengths.dim() == 1 and least <= len(lengths) <= most,
        "downloads.client and downloads.version must have equal lengths, "
        f"and downloads.length {least} to {most} entries",
    )
    different = _increase_below(sorted(clients.tolist()), m)
    yield different, f"downloads.client must hold different numbers from 0 to {m - 1}"
    bounds = ((versions, max(t, 1)), (changed, t + 1), (lengths, 2**53))
    yield (
        all(not len(each) or 0 <= int(each.min()) <= int(each.max()) < below for each, below in bounds),
        f"a version or length in the tables of downloads is impossible after {t} rounds",
    )


def _increase_below(numbers: list[int], m: int) -> bool:
    """Return whether the numbers increase strictly and are all from 0 to m - 1."""
    return all(a < b for a, b in pairwise([-1, *numbers, m]))


def _state(about: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, folder: Path) -> State:
    """Return the state in a checkpoint for which all rules hold."""

    vectors = {name: each.to(device) for name, each in tensors.items() if not name.startswith(_STORED)}
    norms2 = _table(tensors, "residuals.client", "residuals.norm2")
    residuals: Residuals
    if "residuals.version" in tensors:
        versions = _table(tensors, "residuals.client", "residuals.version")
        residuals = OnDisk(folder, versions, norms2=Norms(norms2))
    else:
        residuals = InMemory({client: tensors[f"e.{client}"] for client in norms2}, norms2=Norms(norms2))
    control = _below(CONTROL, vectors)
    return State(
        about["t"],
        vectors["x"],
        vectors["b"],
        residuals,
        z=(vectors["z.x"], vectors["z.b"]) if "z.x" in vectors else None,
        eta_sum=float.fromhex(about["eta_sum"]),
        memory=ServerMemory.from_vectors(_below(SERVER, vectors)),
        w=vectors.get("w"),
        downloads=_downloads(vectors),
        control=Control(control["c"], control["total"], _downloads(control)) if control else None,
    )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _table(tensors: dict[str, Tensor], keys: str, values: str) -> dict[int, Any]:
    return dict(zip(tensors[keys].tolist(), tensors[values].tolist(), strict=True))


def _downloads(tensors: dict[str, Tensor]) -> Downloads | None:
    """Return the record of downloads that `_tables_of` made these tensors of; None without such tensors."""
    if "downloads.changed" not in tensors:
        return None
    held = _table(tensors, "downloads.client", "downloads.version")
    return Downloads(tensors["downloads.changed"], tuple(tensors["downloads.length"].tolist()), Table(held))
