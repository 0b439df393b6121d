"""CUDA graphs: record the work of a function on a GPU once, then replay it with one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.utils import checkpoint


def record_graph(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record the GPU work of `work`, without running it; return a function that runs the recorded work.

    `work` must have run once before: the first use of a kernel loads its code, which cannot be recorded. If
    `work` raises an error, or waits for the GPU, raise the error.
    """
    graph, pool, failure = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    with torch.cuda.stream(_stream(device)):
        # Threads that count bytes use the GPU meanwhile. The default mode forbids them to wait for it.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with _without_saved_generators():
                work()
        except BaseException as error:
            failure = error
        try:
            with warnings.catch_warnings(action="ignore"):  # of work that failed, nothing may be recorded
                graph.capture_end()
        except RuntimeError as error:
            failure = failure or error
            _recover(device, pool)
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # its traceback holds this frame, and memory of the GPU with it
    return graph.replay


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream of all recordings: torch keeps memory for products of matrices for each stream."""
    stream: Any = torch.cuda.Stream
    return stream(device)


@contextmanager
def _without_saved_generators() -> Iterator[None]:
    """Inside `with`, torch.utils.checkpoint does not save the state of the GPU's generator.

    A recording cannot save it. Only work that draws random numbers under `checkpoint` needs it; its recording
    gives other numbers, which a trial must find.
    """
    module: Any = checkpoint
    original = module.get_device_states
    module.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        module.get_device_states = original


def _recover(device: torch.device, pool: Any) -> None:
    """Undo what torch leaves behind after a recording that failed.

    Its allocator would raise an error at the next `empty_cache`, and its generator at the next draw.
    """
    index, internal = device.index or 0, vars(torch._C)
    with suppress(RuntimeError):  # torch has done it
        internal["_cuda_endAllocateToPool"](index, pool)
        internal["_cuda_releasePool"](index, pool)
    # The end of any recording takes the generator out of the recording.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    graph.capture_end()
