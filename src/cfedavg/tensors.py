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
from torch import Tensor

from cfedavg.files import check_regular, replacing
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


# As safetensors names them, in the order in which it writes them.
_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(
    tensors: dict[str, Tensor], path: Path, about: dict[str, Any] | None = None, *, durable: bool = True
) -> None:
    """A safetensors file that is whole or not there; one that is not `durable` awaits its sync."""
    with replacing(path, durable=durable) as temporary:
        save_file(tensors, temporary, metadata=about and {"cfedavg": json.dumps(about)})


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, to the byte as safetensors does, which writes to a name of its own first.

    That name would stay behind, with a whole checkpoint, if the process were killed. Only one tensor at a
    time is copied, and only if it is not contiguous or not on the CPU.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise OSError(f"a safetensors file cannot hold {name!r}, which is of {tensor.dtype}")
    order = list(_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name.encode()))
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(_bytes(tensors[name].detach().cpu()))


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where they lie side by side."""
    if not tensor.numel():  # of nothing there is no view
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, on the CPU. What is wrong with a file shows as one of UNREADABLE."""
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {})["cfedavg"])
        if not isinstance(about, dict):
            raise ValueError("its description is not a table")
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 - no mapping


UNREADABLE = (
    OSError,
    SafetensorError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> int:
    """CRC-32 over names, shapes, dtypes, bytes and what is said of them: a disk's mistake shows."""
    found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(_bytes(tensor), found)
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that are free where tensors of this device live."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
