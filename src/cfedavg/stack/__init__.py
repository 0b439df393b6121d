"""A stack of clients that train at once: their step, its operators, who steps when, and on which samples."""

from cfedavg.stack.pool import Pool, whole
from cfedavg.stack.recorder import Recorder
from cfedavg.stack.rules import Rules, Steady
from cfedavg.stack.step import Stack, Step
from cfedavg.stack.timetable import Timetable, Turn, rounded_up

__all__ = [
    "Pool", "Recorder", "Rules", "Stack", "Steady", "Step", "Timetable", "Turn", "rounded_up", "whole",
]  # fmt: skip
