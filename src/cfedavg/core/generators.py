"""The generators that everybody shares: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def unseen_draws(device: torch.device) -> Iterator[None]:
    """Put all generators back afterwards: trying something must not change what a run draws."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def where_they_stand() -> tuple[Any, ...]:
    """Something that is equal before and after if nothing was drawn, on a GPU aside."""
    _, words, *rest = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
