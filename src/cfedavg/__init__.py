"""CFedAvg: communication-efficient federated learning.

    import cfedavg
    result = cfedavg.run(cfedavg.Config(rounds=20, compressor="topk(0.99) >> bf16"))

Each public name is imported when it is first used, so that `cfedavg.wire` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfedavg.algorithm import Aggregator, average, local_update
    from cfedavg.callbacks import Callback, Start, TensorBoard, Wandb
    from cfedavg.channel import Channel
    from cfedavg.compress import (
        BF16,
        FP32,
        QSGD,
        Compressor,
        Eden,
        Everything,
        IntBlocks,
        LowRank,
        Proportional,
        Quantiser,
        RandomDropping,
        Selector,
        Sign,
        Threshold,
        TopK,
        TwoLevels,
        decompress,
        parse,
    )
    from cfedavg.core.config import Config
    from cfedavg.core.errors import InputError
    from cfedavg.core.layout import Layout
    from cfedavg.core.payload import Payload
    from cfedavg.feedback import EF21, CAFe, ErrorFeedback, Feedback, NoFeedback, StepAhead
    from cfedavg.optimise.local import SGD, AdamW, Clip, GradientChange, LocalOptimiser, Prox, Scaffold
    from cfedavg.optimise.server import Adagrad, Adam, Momentum, Nesterov, ServerOptimiser, ServerSGD, Yogi
    from cfedavg.schedule import Constant, Corollary1, Corollary2, Corollary3, Decaying, Steps, resolve_rates
    from cfedavg.simulate.result import Result
    from cfedavg.simulate.run import run
    from cfedavg.task import Task
    from cfedavg.tuner.result import Tuned
    from cfedavg.tuner.tuner import tune
    from cfedavg.wire import WireError, decode, encode

_HOME = {
    "algorithm": ("Aggregator", "average", "local_update"),
    "callbacks": ("Callback", "Start", "TensorBoard", "Wandb"),
    "channel": ("Channel",),
    "compress": (
        "BF16", "FP32", "QSGD", "Compressor", "Eden", "Everything", "IntBlocks", "LowRank", "Proportional",
        "Quantiser", "RandomDropping", "Selector", "Sign", "Threshold", "TopK", "TwoLevels", "decompress",
        "parse",
    ),
    "core.config": ("Config",),
    "core.errors": ("InputError",),
    "feedback": ("EF21", "CAFe", "ErrorFeedback", "Feedback", "NoFeedback", "StepAhead"),
    "core.layout": ("Layout",),
    "core.payload": ("Payload",),
    "schedule": (
        "Constant", "Corollary1", "Corollary2", "Corollary3", "Decaying", "Steps", "resolve_rates",
    ),
    "simulate.result": ("Result",),
    "simulate.run": ("run",),
    "optimise.local": ("SGD", "AdamW", "Clip", "GradientChange", "LocalOptimiser", "Prox", "Scaffold"),
    "optimise.server": ("Adagrad", "Adam", "Momentum", "Nesterov", "ServerOptimiser", "ServerSGD", "Yogi"),
    "task": ("Task",),
    "tuner.result": ("Tuned",),
    "tuner.tuner": ("tune",),
    "wire": ("WireError", "decode", "encode"),
}  # fmt: skip

__version__ = "0.5.0"
__all__ = [
    "BF16", "EF21", "FP32", "QSGD", "SGD", "Adagrad", "Adam", "AdamW", "Aggregator", "CAFe", "Callback",
    "Channel", "Clip", "Compressor", "Config", "Constant", "Corollary1", "Corollary2", "Corollary3",
    "Decaying", "Eden", "ErrorFeedback", "Everything", "Feedback", "GradientChange", "InputError",
    "IntBlocks", "Layout", "LocalOptimiser", "LowRank", "Momentum", "Nesterov", "NoFeedback", "Payload",
    "Proportional", "Prox", "Quantiser", "RandomDropping", "Result", "Scaffold", "Selector",
    "ServerOptimiser", "ServerSGD", "Sign", "Start", "StepAhead", "Steps", "Task", "TensorBoard",
    "Threshold", "TopK", "Tuned", "TwoLevels", "Wandb", "WireError", "Yogi", "average", "decode",
    "decompress", "encode", "local_update", "parse", "resolve_rates", "run", "tune",
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
