"""Running statistics, as of batch norms: they travel as values, and how many bytes they take."""

from __future__ import annotations

import torch
from torch import Tensor

from cfedavg.compress import Compressor
from cfedavg.core.arrays import round_to_bf16, to_bf16
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.simulate.engines.ledger import dense_bytes
from cfedavg.wire import measure


class Statistics:
    """The buffers of a model in one direction: in bf16 where that direction's compressor rounds values.

    Counters, which are whole numbers, always travel as they are.
    """

    def __init__(self, layout: Layout, compressor: Compressor) -> None:
        self.layout, self.rounds = layout, compressor.rounds
        floats = [dtype.startswith(("float", "bfloat")) for dtype in layout.dtypes]
        self._is_float = torch.tensor(
            [yes for yes, n in zip(floats, layout.sizes, strict=True) for _ in range(n)]
        )

    def travel(self, b: Tensor) -> Tensor:
        """Return buffers, or a row of them for each client, as they arrive."""
        if not self.rounds or not b.shape[-1]:
            return b
        return torch.where(self._is_float.to(b.device), round_to_bf16(b), b)

    def bytes(self, b: Tensor) -> int:
        """Return the bytes of one model's buffers."""
        if not self.rounds or not len(b):
            return dense_bytes(b, self.layout)
        is_float = self._is_float.to(b.device)
        counters = b[~is_float]
        return _coded_bytes(b[is_float]) + dense_bytes(counters, Layout.flat(len(counters)))


def _coded_bytes(values: Tensor) -> int:
    """The bytes of values in bf16; none where there are none."""
    n = len(values)
    if not n:
        return 0
    payload = Payload(n, torch.tensor([0, n]), None, Floats(to_bf16(values.float()), "bf16"))
    return measure(payload.numpy(), Layout.flat(n))[0]
