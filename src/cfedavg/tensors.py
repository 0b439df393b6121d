"""Tensors in files, whole or not there, with a checksum; their norms; the memory that is left for them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cfedavg.files import replacing
from cfedavg.kernel import kernel


def norm2(v: Tensor) -> float:
    """|v|^2, summed in float64."""
    if v.device.type == "cpu" and v.dtype in (torch.float32, torch.float64):
        return float(_squares(v.detach().reshape(-1).numpy()))
    return float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2


def norms2(vectors: Iterable[Tensor]) -> list[float]:
    """|v|^2 of each, waiting for a GPU once."""
    vectors = list(vectors)
    if not any(v.is_cuda for v in vectors):
        return list(map(norm2, vectors))
    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors]
    return [norm**2 for norm in torch.stack(norms).tolist()]


def rows_norms2(block: Tensor) -> list[float]:
    """|v|^2 of each row of a block."""
    if not block.is_cuda:
        return list(map(norm2, block))
    return [norm**2 for norm in torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64).tolist()]


@kernel
def _squares(v: np.ndarray) -> float:
    """The sum of squares: eight sums side by side, for speed, and so alike with any number of threads."""
    a = b = c = d = e = f = g = h = 0.0
    end = len(v) // 8 * 8
    for i in range(0, end, 8):
        a += np.float64(v[i]) * np.float64(v[i])
        b += np.float64(v[i + 1]) * np.float64(v[i + 1])
        c += np.float64(v[i + 2]) * np.float64(v[i + 2])
        d += np.float64(v[i + 3]) * np.float64(v[i + 3])
        e += np.float64(v[i + 4]) * np.float64(v[i + 4])
        f += np.float64(v[i + 5]) * np.float64(v[i + 5])
        g += np.float64(v[i + 6]) * np.float64(v[i + 6])
        h += np.float64(v[i + 7]) * np.float64(v[i + 7])
    for i in range(end, len(v)):
        a += np.float64(v[i]) * np.float64(v[i])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def save_tensors(
    tensors: dict[str, Tensor], path: Path, about: dict[str, Any] | None = None, *, durable: bool = True
) -> None:
    """A safetensors file that is whole or not there; one that is not `durable` awaits its sync."""
    with replacing(path, durable=durable) as temporary:
        try:
            save_file(tensors, temporary, metadata=about and {"cfedavg": json.dumps(about)})
        except SafetensorError as error:  # a full disk comes as this
            raise OSError(str(error)) from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, on the CPU. What is wrong with a file shows as one of UNREADABLE."""
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {})["cfedavg"])
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 - no mapping


UNREADABLE = (OSError, SafetensorError, KeyError, ValueError, TypeError)


def checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> int:
    """CRC-32 over names, shapes, dtypes, bytes and what is said of them: a disk's mistake shows."""
    found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        if tensor.numel():  # of nothing there is no view
            found = zlib.crc32(tensor.view(torch.uint8).numpy().data, found)
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that are free where tensors of this device live."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
