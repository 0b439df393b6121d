"""Copies of a GPU's tensors in main memory, which a thread makes while the GPU trains the next rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

_PIECE = 2**23  # bytes of pinned memory, through which tensors are copied piece by piece

Copy = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # copies tensors, by name, to main memory


def copy_here(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, contiguous and in main memory; wait for the GPU's work."""
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


class HostCopies:
    """The stream and the pinned memory for copies of tensors that no one changes any more.

    On the GPU's usual stream, each copy would wait for the training steps that are queued, and keep the next
    ones waiting while the host gets its memory page by page.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0)

    def begin(self, device: torch.device) -> Copy:
        """Return a function that copies tensors which the work queued so far computes.

        Call `begin` in the thread that queues this work, and the function in any thread.
        """
        if device.type != "cuda":
            return copy_here
        ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        return partial(self._copy, device, ready)

    def _copy(
        self, device: torch.device, ready: torch.cuda.Event, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            return {name: self._copy_one(tensor, self._stream) for name, tensor in tensors.items()}

    def _copy_one(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        if not tensor.is_cuda or not tensor.numel():
            return tensor.contiguous().cpu()
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, found))
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE].numpy()
            pinned = self._pinned[: len(piece)]
            pinned.copy_(source[start : start + len(piece)], non_blocking=True)
            stream.synchronize()
            np.copyto(piece, pinned.numpy())  # other threads can run Python code meanwhile
        return found
