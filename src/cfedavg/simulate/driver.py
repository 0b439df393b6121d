"""The driver of an NVIDIA GPU, which a thread starts while the command imports torch.

The driver and its context of a GPU take up to seconds to start. Calls of a C library leave Python free, so
this costs no time beside the imports; torch then finds the context ready.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread


def sees_gpu() -> bool:
    """Return whether the system seems to have an NVIDIA GPU, without the import of torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def start_driver(device: str) -> None:
    """Start the driver for a run with this option `device`; do nothing where torchrun chooses the GPU."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdecimal() or "LOCAL_RANK" in os.environ:
        return
    if sys.platform == "linux" and sees_gpu():
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch sets it, too late for this thread
        Thread(target=_start, args=(int(number or 0),), daemon=True, name="driver").start()


def _start(number: int) -> None:
    """Start the driver and keep its context of GPU `number`; torch says what is wrong if this fails."""
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(gpu), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
