"""What an engine is, and where it runs."""

from __future__ import annotations

from typing import Protocol

import torch

from cfedavg.errors import InputError
from cfedavg.layout import Layout
from cfedavg.metrics import Record
from cfedavg.state import State


class Engine(Protocol):
    """Runs rounds. A state goes in and a new one comes out, with the round's line of metrics."""

    layout: Layout
    identity: int  # of the model: what a checkpoint must agree with

    def start(self) -> State:
        """The state before the first round."""

    def round(self, state: State) -> tuple[State, Record]:
        """One round of Algorithm 1."""

    def evaluate(self, state: State) -> Record:
        """The state's model on the test set."""

    def model_at(self, x: torch.Tensor, b: torch.Tensor) -> torch.nn.Module:
        """The user's model, on the CPU, with these parameters and buffers."""


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"--device {name} cannot be used here; try auto or cpu") from None
    return device
