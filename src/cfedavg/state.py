"""State: what a run is at the end of a round, and its checkpoint, one safetensors file.

A state goes into a round and a new one comes out; nothing is changed in place, so a round that is broken
off leaves the last state as it was.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cfedavg.errors import InputError
from cfedavg.files import replacing

FORMAT = "cfedavg checkpoint 1"


@dataclass(frozen=True)
class Residuals:
    """e_i of the clients that have one; a client that never took part has none, which means zero."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    norms2: Mapping[int, float] = field(default_factory=dict)

    def get(self, client: int, like: Tensor) -> Tensor:
        e = self.vectors.get(client)
        return torch.zeros_like(like) if e is None else e

    def updated(self, new: Mapping[int, Tensor]) -> Residuals:
        norms2 = {client: norm2(e) for client, e in new.items()}
        return Residuals({**self.vectors, **new}, {**self.norms2, **norms2})

    def mean_norm2(self, m: int) -> float:
        """The mean of |e_i|^2 over all m clients."""
        return math.fsum(self.norms2.values()) / m


@dataclass(frozen=True)
class State:
    """After t rounds: the model x, its travelling buffers b, the residuals, the iterate z of Theorem 2."""

    t: int
    x: Tensor
    b: Tensor
    residuals: Residuals = field(default_factory=Residuals)
    z: tuple[Tensor, Tensor] | None = None  # x and b of the iterate
    eta_sum: float = 0.0


def norm2(v: Tensor) -> float:
    """|v|^2, summed in float64."""
    return float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2


def save(state: State, path: Path, identity: int) -> None:
    """Writes a checkpoint that is whole or not there; `identity` is the model's (see Vectors)."""
    tensors = {"x": state.x, "b": state.b}
    if state.z is not None:
        tensors["z.x"], tensors["z.b"] = state.z
    tensors |= {f"e.{client}": e for client, e in state.residuals.vectors.items()}
    plain = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    about = {
        "format": FORMAT,
        "t": state.t,
        "eta_sum": state.eta_sum.hex(),
        "identity": identity,
        "checksum": _checksum(plain),
    }
    save_tensors(plain, path, {"cfedavg": json.dumps(about)})


def save_tensors(tensors: dict[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """A safetensors file that is whole or not there."""
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=about)
        except SafetensorError as error:  # a full disk comes as this
            raise OSError(str(error)) from None


def load(path: Path, identity: int, like: State) -> State:
    """Reads a checkpoint, in the shapes and onto the device of `like`; an InputError says what is wrong."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["cfedavg"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if about["format"] != FORMAT:
            raise InputError(f"--resume: {path} was written by another version ({about['format']})")
        if about["identity"] != identity or not _fits(tensors, like):
            raise InputError(
                f"--resume: {path} holds another model: names, shapes, dtypes or frozen values differ"
            )
        if about["checksum"] != _checksum(tensors) or about["t"] < 0:
            raise ValueError("its checksum is wrong")
        return _state(about, {name: tensor.to(like.x.device) for name, tensor in tensors.items()})
    except InputError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"--resume: the checkpoint {path} is damaged ({error}); start again") from None


def _state(about: dict[str, Any], tensors: dict[str, Tensor]) -> State:
    vectors = {int(name[2:]): e for name, e in tensors.items() if name.startswith("e.")}
    residuals = Residuals().updated(dict(sorted(vectors.items())))
    z = (tensors["z.x"], tensors["z.b"]) if "z.x" in tensors else None
    eta_sum = float.fromhex(about["eta_sum"])
    return State(about["t"], tensors["x"], tensors["b"], residuals, z, eta_sum)


def _fits(tensors: dict[str, Tensor], like: State) -> bool:
    """Whether every vector has the length and dtype of x, or of b."""
    for name, tensor in tensors.items():
        wanted = like.b if name in ("b", "z.b") else like.x
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            return False
    return True


def _checksum(tensors: dict[str, Tensor]) -> int:
    """CRC-32 over names and bytes: a disk's mistake shows."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].numpy().data, zlib.crc32(name.encode(), found))
    return found
