"""A stack of clients that train at once: their step, its operators, who steps when, and on which samples."""

from cfedavg.simulate.vectorised.pool import Pool, whole
from cfedavg.simulate.vectorised.recorder import Recorder
from cfedavg.simulate.vectorised.rules import Rules, Steady
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.simulate.vectorised.timetable import Timetable, Turn, rounded_up

__all__ = [
    "Pool", "Recorder", "Rules", "Stack", "Steady", "Step", "Timetable", "Turn", "rounded_up", "whole",
]  # fmt: skip
