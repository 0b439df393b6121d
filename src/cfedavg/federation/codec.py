"""A client's compressor and wire, as the protocol asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cfedavg.algorithm import subtract
from cfedavg.compress import Compressor, values_of
from cfedavg.federation.protocol import Request
from cfedavg.keys import Purpose, key, signed
from cfedavg.layout import Layout
from cfedavg.payload import Payload
from cfedavg.wire import decode, encode


@dataclass(frozen=True)
class Wire:
    """What client number `client` sends is drawn from (seed, round, client), as in a simulation."""

    compressor: Compressor
    layout: Layout
    client: int
    seed: int = 0

    def shrink(self, p: Tensor, request: Request) -> tuple[bytes, Tensor]:
        """Lines 13 to 15; NotFinite if p holds NaN or Inf."""
        word = signed(key(self.seed, request.t, self.client, Purpose.SELECT))
        payload = self.compressor.compress(p, word, self.layout)
        message = encode(
            payload.numpy(),
            self.layout,
            client=self.client,
            sequence=request.stamp.sequence,
            round=request.t,
        )
        return message, subtract(p, payload)

    def restored(self, e: Tensor, message: bytes) -> Tensor:
        """Exact where values were sent as they are, since e is zero there."""
        payload = decode(message, layout=self.layout).map(torch.from_numpy)
        return added(e, payload)


def added(e: Tensor, payload: Payload) -> Tensor:
    """e + C(p), at the cost of the coordinates sent."""
    values = values_of(payload).to(e.dtype)
    if payload.indices is None:
        return e + values
    return e.index_add(0, payload.indices, values)
