"""The control variates of a simulation: what clients send of them, and what the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cfedavg.algorithm import Weighted
from cfedavg.channel import Downlink, Outgoing
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.simulate.downloads import Downloads
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import Control, State


class SimulatedControl:
    """The control variates in the rounds of a run. Without control variates, all methods return None.

    The control variates of one client have shape (d,), those of a block of clients a row for each.
    """

    def __init__(self, plan: Plan, layout: Layout, downlink: Downlink | None) -> None:
        self.plan, self.downlink = plan, downlink
        self.variates = plan.control(layout)

    def start(self, x: Tensor) -> Control | None:
        """Return what the server keeps before the first round: c and all c_i are 0."""
        if self.variates is None:
            return None
        zero = torch.zeros_like(x)
        return Control(zero, zero, Downloads.none(x) if self.downlink else None)

    def correct(self, state: State, c_i: Tensor | None) -> Tensor | None:
        """Return c - c_i, which clients add to their gradients."""
        return None if state.control is None or c_i is None else state.control.c - c_i

    def send(
        self,
        state: State,
        c_i: Tensor | None,
        x_0: Tensor,
        x_K: Tensor,
        K: Any,
        key: Callable[[Purpose], Any],
    ) -> Outgoing | None:
        """Compress the change of c_i after K local steps from x_0 to x_K."""
        if self.variates is None or state.control is None or c_i is None:
            return None
        t, c, eta_L = state.t, state.control.c, self.plan.rates.eta_local(state.t)
        return self.variates.send(c_i, c, x_0, x_K, K, eta_L, key(Purpose.CONTROL), t)

    def receive(self, state: State, payloads: Iterable[Weighted], arrived: list[int]) -> Control | None:
        """Return what the server keeps after the round, in which the replies of `arrived` arrived."""
        if self.variates is None or state.control is None:
            return None
        t, before = state.t, state.control
        c, total = self.variates.receive(before.total, payloads, self.plan.everyone)
        if not bool(torch.isfinite(c).all()):
            raise Diverged(t, arrived, "the mean of the control variates")
        if self.downlink is None or before.downloads is None:
            return Control(c, total)
        key = self.plan.broadcast_key(t, Purpose.CONTROL_BROADCAST)
        try:
            c, downloads = before.downloads.send(self.downlink, c, before.c, key, t, arrived)
        except NotFinite:
            raise Diverged(t, arrived, "the broadcast of the control variates") from None
        return Control(c, total, downloads)
