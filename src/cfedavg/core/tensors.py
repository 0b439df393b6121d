"""Safetensors files, written atomically, with a checksum; and the free memory of a device."""

from __future__ import annotations

import io
import json
import math
import os
import re
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from cfedavg.core.arrays import Array, dtype_of, module_of
from cfedavg.core.files import check_regular, open_regular, replace_file
from cfedavg.core.system import free_host_memory

# The names of dtypes in a safetensors file, in the order in which safetensors writes them.
_NAMES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
    "float32": "F32", "uint32": "U32", "int32": "I32",
    "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def save_tensors(
    tensors: Mapping[str, Array], path: Path, about: dict[str, Any] | None = None, *, durable: bool = True
) -> None:
    """Write tensors, and the dict `about` as metadata, to a safetensors file, atomically.

    Without `durable`, the caller must sync the file for it to survive a power cut.
    """
    with replace_file(path, durable=durable) as temporary:
        save_file(tensors, temporary, metadata=about and {"cfedavg": json.dumps(about)})


def save_file(tensors: Mapping[str, Array], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, byte for byte as the library safetensors does.

    The library would first write to a temporary file with a name of its own choice; a killed process would
    leave that file behind. This function copies a tensor only if it is not contiguous or not on the CPU, and
    holds one copy at a time.
    """
    order = list(_NAMES)
    for name, tensor in tensors.items():
        if dtype_of(tensor) not in order:
            raise OSError(f"a safetensors file cannot hold {name!r} of dtype {dtype_of(tensor)}")
    names = sorted(tensors, key=lambda name: (order.index(dtype_of(tensors[name])), name.encode()))
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name in names:
        dtype, shape = _NAMES[dtype_of(tensors[name])], list(tensors[name].shape)
        end = start + math.prod(shape) * tensors[name].dtype.itemsize
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(_bytes(tensors[name]))


def _bytes(array: Array) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous and on the CPU."""
    if not math.prod(array.shape):  # an empty array has no view
        return memoryview(b"")
    if module_of(array) is np:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    flat: np.ndarray = array.detach().cpu().contiguous().reshape(-1).view(module_of(array).uint8).numpy()
    return flat.data


def read_tensors(path: Path, library: str = "pt") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the dict `about` that `save_tensors` wrote.

    If the file is missing or damaged, an error of a type in UNREADABLE is raised. The tensors are torch's,
    and their memory is mapped from the file until they are changed. If `library` is "np", they are NumPy
    arrays in memory of their own. NumPy cannot hold bf16.
    """
    check_regular(path)
    if sys.platform == "win32":  # which cannot replace a mapped file
        data = np.fromfile(path, np.uint8)
    else:
        data = np.asarray(np.memmap(path, np.uint8, "c"))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < start:
        raise ValueError("the file ends in its header")
    table, about = _read_header(data[8:start].tobytes())
    data, tensors = data[start:], dict[str, Array]()
    for name, dtype, shape, place in _locate_tensors(table, len(data)):
        if library == "np":
            tensors[name] = np.array(data[place].view(dtype)).reshape(shape)
        else:
            import torch

            tensors[name] = torch.from_numpy(data[place]).view(getattr(torch, dtype)).reshape(shape)
    return tensors, about


def read_one(path: Path, name: str, make: Callable[[str, list[int]], Array]) -> tuple[Array, dict[str, Any]]:
    """Return the tensor `name`, the only one of a file, and the dict `about` that `save_tensors` wrote.

    `make` gets the tensor's dtype and shape, and returns a tensor in main memory, into which it is read. If
    the file is missing or damaged, an error of a type in UNREADABLE is raised. The file is not mapped: while
    a thread maps or unmaps a file, no other thread can run Python code.
    """
    with open_regular(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        rest = os.fstat(file.fileno()).st_size - 8 - length
        if rest < 0:
            raise ValueError("the file ends in its header")
        table, about = _read_header(file.read(length))
        [(found, dtype, shape, _)] = _locate_tensors(table, rest)
        if found != name:
            raise ValueError(f"the tensor {name!r} is missing")
        tensor = make(dtype, shape)
        left = _bytes(tensor)
        while left and (count := cast(io.BufferedReader, file).readinto(left)):
            left = left[count:]
        if left:
            raise ValueError("the file ends in its tensor")
    return tensor, about


def _read_header(header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the table of tensors in the header of a file, and the dict `about`."""
    table = json.loads(header)
    about = json.loads((table.pop("__metadata__", None) or {})["cfedavg"])
    if not isinstance(about, dict):
        raise ValueError("the metadata `cfedavg` of the file must be a JSON object")
    return table, about


def _locate_tensors(table: dict[str, Any], length: int) -> Iterator[tuple[str, str, list[int], slice]]:
    """Yield each tensor's name, dtype, shape and place in the `length` bytes that follow the header.

    Raise ValueError unless the tensors follow each other, from the first byte to the last.
    """
    dtypes, end = {code: dtype for dtype, code in _NAMES.items()}, 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        code, shape, start = entry["dtype"], entry["shape"], end
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(n or 1 for n in shape) >= 2**63:
            raise ValueError(f"the tensor {reprlib.repr(name)} has the wrong shape {reprlib.repr(shape)}")
        bits = 8 if code == "BOOL" else int(re.findall(r"\d+", code)[0])
        end = start + math.prod(shape) * bits // 8
        if entry["data_offsets"] != [start, end] or end > length:
            where = f"at bytes {start} to {end} of {length}"
            raise ValueError(
                f"the tensor {reprlib.repr(name)} must lie {where}, got {reprlib.repr(entry['data_offsets'])}"
            )
        yield name, dtypes[code], shape, slice(start, end)
    if end != length:
        raise ValueError(f"the tensors of the file must have {length} bytes, got {end}")


UNREADABLE = (
    OSError,
    KeyError,
    IndexError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def checksum(tensors: Mapping[str, Array], about: dict[str, Any]) -> int:
    """Return one CRC-32 of the dict `about` and of all tensors' names, shapes, dtypes and bytes."""
    found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} torch.{dtype_of(tensor)} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(_bytes(tensor), found)
    return found


def free_memory(device: Any) -> int:
    """Return the number of free bytes in the memory of a torch device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()
