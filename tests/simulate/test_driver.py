"""The driver of a GPU that a thread starts: for which options it does, and that its errors are torch's."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from cfedavg.simulate import driver


class Cuda:
    """A stand-in for the driver's library, which notes what it is asked for."""

    def __init__(self, works: bool) -> None:
        self.works, self.calls = works, list[str]()

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return 0 if self.works else 100

    def cuDeviceGet(self, gpu: Any, number: int) -> int:
        self.calls.append(f"device {number}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, gpu: Any) -> int:
        self.calls.append("context")
        return 0


def started(monkeypatch: pytest.MonkeyPatch, device: str, *, works: bool = True) -> list[str]:
    """The calls of the driver's library for a run on this device."""
    cuda = Cuda(works)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    driver.start_driver(device)
    for thread in threading.enumerate():
        if thread.name == "driver":
            thread.join()
    return cuda.calls


@pytest.mark.skipif(driver.sys.platform != "linux", reason="the driver is started on Linux alone")
def test_the_driver_starts_for_the_gpu_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(driver, "sees_gpu", lambda: True)
    assert started(monkeypatch, "auto") == ["init", "device 0", "context"]
    assert started(monkeypatch, "cuda:3") == ["init", "device 3", "context"]
    assert started(monkeypatch, "cuda", works=False) == ["init"]
    assert [started(monkeypatch, device) for device in ("cpu", "cuda:x", "mps")] == [[], [], []]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert started(monkeypatch, "cuda") == []
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(driver, "sees_gpu", lambda: False)
    assert started(monkeypatch, "cuda") == []


def test_a_missing_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver._start(0)
