"""CFedAvg on Flower: a strategy for the ServerApp and a mod for the ClientApp.

A server needs `cfedavg[flower]`, a node `cfedavg[client]`.

    from cfedavg.flower import CFedAvg, compressed

    app = ClientApp(mods=[compressed])            # nothing else in the client app changes
    strategy = CFedAvg(FedAvg(fraction_train=0.5))   # nothing else in the server app changes

Each name is imported at its first use. So if Flower is not installed, the error says how to install it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cfedavg.core.extras import explain_missing

if TYPE_CHECKING:
    from cfedavg.flower.mod import compressed
    from cfedavg.flower.options import RoundPolicy
    from cfedavg.flower.strategy import CFedAvg

_HOME = {"CFedAvg": "strategy", "RoundPolicy": "options", "compressed": "mod"}

__all__ = ["CFedAvg", "RoundPolicy", "compressed"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cfedavg.flower' has no attribute {name!r}")
    with explain_missing(flwr="client" if name == "compressed" else "flower"):
        return getattr(import_module(f"cfedavg.flower.{_HOME[name]}"), name)
