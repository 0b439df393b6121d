"""How updates and the model travel: the server decides, and each request says so."""

from __future__ import annotations

from dataclasses import dataclass

from cfedavg.channel import Downlink, make_downlink
from cfedavg.compress import Compressor
from cfedavg.core.layout import Layout
from cfedavg.federate.replica import ModelReplica
from cfedavg.feedback import Feedback


@dataclass(frozen=True)
class Channels:
    """Compressor and feedback of the clients, compressor of the server, and what else decides messages."""

    compressor: Compressor
    compressor_down: Compressor
    feedback: Feedback
    update: str  # "sum" or "mean": line 10 or line 11 of Algorithm 1
    seed: int  # of all random draws

    def downlink(self, layout: Layout) -> Downlink | None:
        """Return the server's way to the clients; None where it broadcasts the whole model."""
        return make_downlink(self.compressor_down, layout)

    def replica(self, layout: Layout) -> ModelReplica | None:
        """Return how copies of the model are kept; None where there are none."""
        return ModelReplica(layout, down.rounds) if (down := self.downlink(layout)) else None
