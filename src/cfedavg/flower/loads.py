"""What leads nodes to the model of a round: one load for each version that some of them hold."""

from __future__ import annotations

from typing import NamedTuple

from cfedavg.federate.replica import Broadcaster, Packed
from cfedavg.federate.versions import Version
from cfedavg.flower.array_layout import Form
from cfedavg.flower.channels import Channels
from cfedavg.flower.federation_state import FederationState
from cfedavg.flower.records import Body, Load


class NodeDownload(NamedTuple):
    """What one node downloads: its load, of which kind it is, in how many messages and bytes."""

    load: Load
    kind: str  # "chain", "changes" or "whole"
    messages: int
    bytes: int
    is_first: bool  # nothing is known of a copy that the node has had


class Loads:
    """The loads that lead to the model of a state."""

    def __init__(self, form: Form, channels: Channels, state: FederationState) -> None:
        replica, primary = channels.replica(form.layout), state.server.primary
        rounds = replica is not None and replica.rounds
        self._whole = form.shorten(state.whole) if rounds else state.whole
        self._broadcaster = Broadcaster(primary, replica) if primary and replica else None
        self._model = Packed("whole", 0, b"" if self._broadcaster else state.server.x.tobytes())
        self._made: dict[Packed, Load] = {}

    def load_for(self, held: Version | None, *, is_first: bool) -> NodeDownload:
        """Return what a node downloads that holds this version; None: the whole model."""
        packed = self._broadcaster.broadcast_to(held) if self._broadcaster else self._model
        if packed not in self._made:
            self._made[packed] = Load(Body(packed.data, self._whole))
        load = self._made[packed]
        return NodeDownload(load, packed.kind, packed.messages, load.size, is_first)
