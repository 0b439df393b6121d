"""Callbacks: what follows a run from its start to its end, such as the progress on the screen or a tracker.

    from cfedavg.callbacks import Callback, TensorBoard
    run(config, task, out="runs/mine", callbacks=[TensorBoard()])

A callback of your own is a subclass of `Callback`; docs/callbacks.md has examples.
"""

from cfedavg.callbacks.callback import Callback, CallbackList, Start
from cfedavg.callbacks.trackers import TRACKERS, TensorBoard, Wandb, make_trackers

__all__ = ["TRACKERS", "Callback", "CallbackList", "Start", "TensorBoard", "Wandb", "make_trackers"]
