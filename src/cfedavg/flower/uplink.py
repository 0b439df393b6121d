"""How clients send their updates: the server decides, and each request says so."""

from __future__ import annotations

from dataclasses import dataclass

from cfedavg.compress import Compressor
from cfedavg.feedback import Feedback


@dataclass(frozen=True)
class UplinkOptions:
    """Compressor and feedback of the clients, and the options that decide what goes into them."""

    compressor: Compressor
    feedback: Feedback
    update: str  # "sum" or "mean": line 10 or line 11 of Algorithm 1
    seed: int  # of the clients' random draws
