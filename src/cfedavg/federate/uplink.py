"""A client's channel to the server, as the protocol asks for it: updates go in, messages come out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cfedavg.channel import Channel, Outgoing
from cfedavg.core.arrays import Array
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.core.payload import Payload
from cfedavg.federate.protocol import Request
from cfedavg.wire import decode, encode


@dataclass(frozen=True)
class Uplink:
    """What client number `client` sends is drawn from (seed, round, client), as in a simulation."""

    channel: Channel
    client: int
    seed: int = 0

    def outgoing(
        self,
        g: Array,
        memory: Array,
        request: Request,
        *,
        shared: Array | None = None,
        max_norm: float = math.inf,
    ) -> Outgoing:
        """Lines 12 to 15; NotFinite if what is to be sent holds NaN or Inf."""
        word = signed(key(self.seed, request.t, self.client, Purpose.SELECT))
        return self.channel.send(g, memory, word, request.t, shared=shared, max_norm=max_norm)

    def message(self, payload: Payload, request: Request) -> bytes:
        """The payload as it travels."""
        sequence = request.stamp.sequence
        return encode(
            payload.numpy(), self.channel.layout, client=self.client, sequence=sequence, round=request.t
        )

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """The message to send, and the memory after it."""
        made = self.outgoing(g, memory, request)
        return self.message(made.payload, request), made.memory

    def restore(self, memory: Array, message: bytes) -> Array:
        """The memory after a message got lost. With `ef` exact where values were sent as they are."""
        return self.channel.restore(memory, decode(message, layout=self.channel.layout))
