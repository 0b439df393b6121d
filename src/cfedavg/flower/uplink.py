"""How clients send their updates: the server decides, and each request says so."""

from __future__ import annotations

from dataclasses import dataclass

from cfedavg.compress import Compressor


@dataclass(frozen=True)
class Uplink:
    """The compressor of the clients, and the options that decide what it compresses."""

    compressor: Compressor
    error_feedback: bool
    update: str  # "sum" or "mean": line 10 or line 11 of Algorithm 1
    seed: int  # of the clients' random draws
