"""CFedAvg: communication-efficient federated learning.

    import cfedavg
    result = cfedavg.run(cfedavg.Config(rounds=20, compressor="topk(0.99) >> bf16"))

Each public name is imported when it is first used, so that `cfedavg.wire` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfedavg.algorithm import Aggregator, average, local_update
    from cfedavg.channel import Channel
    from cfedavg.compress import Compressor, Quantiser, Selector, decompress, parse
    from cfedavg.core.config import Config
    from cfedavg.core.errors import InputError
    from cfedavg.core.layout import Layout
    from cfedavg.core.payload import Payload
    from cfedavg.feedback import Feedback
    from cfedavg.optimise.local import GradientChange, LocalOptimiser
    from cfedavg.optimise.server import ServerOptimiser
    from cfedavg.schedule import Steps, resolve_rates
    from cfedavg.simulate.run import Result, run
    from cfedavg.task import Task
    from cfedavg.wire import WireError, decode, encode

_HOME = {
    "algorithm": ("Aggregator", "average", "local_update"),
    "channel": ("Channel",),
    "compress": ("Compressor", "Quantiser", "Selector", "decompress", "parse"),
    "core.config": ("Config",),
    "core.errors": ("InputError",),
    "feedback": ("Feedback",),
    "core.layout": ("Layout",),
    "core.payload": ("Payload",),
    "schedule": ("Steps", "resolve_rates"),
    "simulate.run": ("Result", "run"),
    "optimise.local": ("GradientChange", "LocalOptimiser"),
    "optimise.server": ("ServerOptimiser",),
    "task": ("Task",),
    "wire": ("WireError", "decode", "encode"),
}

__version__ = "0.5.0"
__all__ = [
    "Aggregator", "Channel", "Compressor", "Config", "Feedback", "GradientChange", "InputError", "Layout",
    "LocalOptimiser", "Payload", "Quantiser", "Result", "Selector", "ServerOptimiser", "Steps", "Task",
    "WireError", "average", "decode", "decompress", "encode", "local_update", "parse", "resolve_rates", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    from cfedavg.core.extras import explain_missing

    for module, names in _HOME.items():
        if name in names:
            with explain_missing():
                return getattr(import_module(f"cfedavg.{module}"), name)
    raise AttributeError(f"module 'cfedavg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
