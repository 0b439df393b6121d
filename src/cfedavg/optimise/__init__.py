"""Optimisers: a client's step from a gradient, and the server's step from the mean update.

The server's are `ServerSGD`, `Momentum`, `Nesterov`, `Adam`, `Yogi` and `Adagrad`. The clients' are `SGD` and
`AdamW`, with `Clip`, `Prox` and `Scaffold` before them; these need torch, so they are imported when they are
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cfedavg.optimise.server import (
    SERVER_OPTIMISERS,
    Adagrad,
    Adam,
    Momentum,
    Nesterov,
    ServerOptimiser,
    ServerSGD,
    Yogi,
)

if TYPE_CHECKING:
    from cfedavg.optimise.local import SGD, AdamW, Clip, GradientChange, LocalOptimiser, Prox, Scaffold

__all__ = [
    "SERVER_OPTIMISERS", "SGD", "Adagrad", "Adam", "AdamW", "Clip", "GradientChange", "LocalOptimiser",
    "Momentum", "Nesterov", "Prox", "Scaffold", "ServerOptimiser", "ServerSGD", "Yogi",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("cfedavg.optimise.local"), name)
    raise AttributeError(f"module 'cfedavg.optimise' has no attribute {name!r}")
