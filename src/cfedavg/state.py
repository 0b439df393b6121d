"""State: what a run is at the end of a round, and its checkpoint, one safetensors file.

A state goes into a round and a new one comes out; nothing is changed in place, so a round that is broken
off leaves the last state as it was. Residuals in memory are written into the checkpoint; of those on disk it
holds the versions, and their files lie beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfedavg.errors import CannotResume, InputError
from cfedavg.residuals import InMemory, OnDisk, Residuals
from cfedavg.tensors import UNREADABLE, checksum, read_tensors, save_tensors

FORMAT = "cfedavg checkpoint 2"


@dataclass(frozen=True)
class State:
    """After t rounds: the model x, its travelling buffers b, the residuals, the iterate z of Theorem 2."""

    t: int
    x: Tensor
    b: Tensor
    residuals: Residuals = field(default_factory=InMemory)
    z: tuple[Tensor, Tensor] | None = None  # x and b of the iterate
    eta_sum: float = 0.0


def save(state: State, path: Path, identity: int) -> None:
    """Writes a checkpoint that is whole or not there; `identity` is the model's (see Vectors)."""
    tensors = {"x": state.x, "b": state.b, **_as_tensors(state.residuals)}
    if state.z is not None:
        tensors["z.x"], tensors["z.b"] = state.z
    plain = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    about: dict[str, Any] = {
        "format": FORMAT,
        "t": state.t,
        "eta_sum": state.eta_sum.hex(),
        "identity": identity,
    }
    save_tensors(plain, path, {**about, "checksum": checksum(plain, about)})


def _as_tensors(residuals: Residuals) -> dict[str, Tensor]:
    """Who has one and its norm, which another device would sum to other bits; then vectors or versions."""
    clients = sorted(residuals.norms2)
    tensors = {
        "residuals.client": torch.tensor(clients, dtype=torch.int64),
        "residuals.norm2": torch.tensor([residuals.norms2[i] for i in clients], dtype=torch.float64),
    }
    if isinstance(residuals, OnDisk):
        versions = [residuals.versions[i] for i in clients]
        return {**tensors, "residuals.version": torch.tensor(versions, dtype=torch.int64)}
    assert isinstance(residuals, InMemory)
    return {**tensors, **{f"e.{client}": e for client, e in residuals.vectors.items()}}


def load(path: Path, identity: int, like: State, folder: Path) -> State:
    """Reads a checkpoint, in the shapes and onto the device of `like`; an InputError says what is wrong.

    `folder` is where the files of residuals are that live on disk.
    """
    try:
        tensors, about = read_tensors(path)
        if about["format"] != FORMAT:
            raise InputError(f"--resume: {path} was written by another version ({about['format']})")
        if about["identity"] != identity or not _fits(tensors, like):
            raise InputError(
                f"--resume: {path} holds another model: names, shapes, dtypes or frozen values differ"
            )
        if about.pop("checksum") != checksum(tensors, about) or about["t"] < 0:
            raise ValueError("its checksum is wrong")
        return _state(about, tensors, like.x.device, folder)
    except InputError:
        raise
    except UNREADABLE as error:
        raise CannotResume(f"the checkpoint {path} is damaged ({error}); start again") from None


def _state(about: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, folder: Path) -> State:
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
    return State(about["t"], there["x"], there["b"], residuals, z, float.fromhex(about["eta_sum"]))


def _fits(tensors: dict[str, Tensor], like: State) -> bool:
    """Whether every vector has the length and dtype of x, or of b; a residual may be bf16."""
    for name, tensor in tensors.items():
        if name.startswith("residuals."):
            continue
        wanted = like.b if name in ("b", "z.b") else like.x
        dtypes = {wanted.dtype, torch.bfloat16} if name.startswith("e.") else {wanted.dtype}
        if tensor.shape != wanted.shape or tensor.dtype not in dtypes:
            return False
    return True
