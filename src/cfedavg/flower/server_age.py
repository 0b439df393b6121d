"""Whether the server is an older copy of itself, as its nodes can tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cfedavg.flower.averaging import Outcome
from cfedavg.flower.records import CAUSES, REFUSED


class ServerAge:
    """What the nodes have said of it since the start."""

    def __init__(self) -> None:
        self.ahead, self.in_step = set[str](), set[str]()  # nodes, by whether they know later rounds

    def is_older(
        self, outcomes: Mapping[str, Outcome], online: set[str], in_model: Collection[str], everyone: int
    ) -> bool:
        """Whether the nodes prove, with what came of a round, that they have answered later rounds.

        In an older copy, every node that took part later refuses; a node that did not, or is new, replies.
        One node may be wrong, or lie, also under a new name each round. So it takes two nodes that are still
        there, and more than have replied since the start, among those of which something is in the model.
        All nodes are counted in the same way, but only while none of the model has replied: a new name
        proves nothing against it.
        """
        said = {who: outcome.what for who, outcome in outcomes.items()}
        self.in_step |= {who for who, what in said.items() if what == "replied"}
        refused = {who for who, what in said.items() if what == CAUSES[REFUSED]}
        self.ahead = (refused | self.ahead & online) - self.in_step
        known = {who for who in self.ahead | self.in_step if who in in_model}
        groups = [known] if known & self.in_step else [known, self.ahead | self.in_step]
        least = min(2, everyone)
        return any(len(group & self.ahead) >= max(least, len(group & self.in_step) + 1) for group in groups)
