"""What an engine is, and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import Record
from cfedavg.simulate.state import State


class Engine(Protocol):
    """Runs rounds. A state goes in and a new one comes out, with the round's line of metrics."""

    layout: Layout
    identity: int  # of the model: what a checkpoint must agree with
    behind: int  # rounds by which a line of metrics may be late, so that nobody waits for it

    def start(self) -> State:
        """The state before the first round."""

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """One round of Algorithm 1, and what to call for its line of metrics: bytes may still be counted."""

    def evaluate(self, state: State) -> Record:
        """The model that clients hold, on the test set."""

    def begin(self, state: State) -> State:
        """The state that a run starts or goes on with, as the engine keeps it."""

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Has a state saved, whole, wherever its parts are kept."""

    def close(self) -> None:
        """The run is over, well or not."""

    def model_at(self, x: torch.Tensor, b: torch.Tensor) -> torch.nn.Module:
        """The user's model, on the CPU, with these parameters and buffers."""


Start = Callable[[list[int]], Tensor]  # where clients begin: one x (d,) for all of them, or a row for each


@dataclass(frozen=True)
class Trained:
    """What local work comes to, for a block of n clients."""

    clients: list[int]
    K: list[int]
    x_0: Tensor  # where they began: (d,), or (n, d) where clients differ
    x_K: Tensor  # (n, d)
    b_K: Tensor  # (n, buffers)
    loss: Tensor  # (n,): the mean over the client's steps

    def part(self, start: int, stop: int) -> Trained:
        """Some of the clients."""
        rows = slice(start, stop)
        x_0 = self.x_0 if self.x_0.dim() == 1 else self.x_0[rows]
        return Trained(self.clients[rows], self.K[rows], x_0, self.x_K[rows], self.b_K[rows], self.loss[rows])


class Trainer(Protocol):
    """Does the local work of clients, block after block."""

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        """K_i steps of each client from its start and b, in round t; the clients stay in their order."""

    def shrink(self) -> None:
        """Trains fewer clients at once, since memory is short; an InputError where it is one already."""


def too_large(device: torch.device) -> InputError:
    """What is said of a model of which not even one client can be trained."""
    return InputError(
        f"`device` {device}: not even one client fits into its memory; "
        "lower `batch_size`, keep `residuals` on disk, or take a smaller model"
    )


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"`device` {name} cannot be used here; try auto or cpu") from None
    return device
