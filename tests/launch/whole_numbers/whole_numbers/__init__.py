"""Clients add whole numbers to the model, so that all sums are exact."""

import numpy as np

MODEL = {"w": np.zeros((6, 5), np.float32), "b": np.zeros(10, np.float32)}
QUIET = 3  # no reply of these rounds is lost: 3, 6, ...


def numbers(seed: int, partition: int, server_round: int) -> dict[str, np.ndarray]:
    """Return what a client adds in a round."""
    draw = np.random.default_rng([seed, partition, server_round])
    return {name: draw.integers(-9, 10, array.shape).astype(np.float32) for name, array in MODEL.items()}


def is_lost(partition: int, server_round: int) -> bool:
    """Return whether the client's reply of this round gets lost after the client has stored its state."""
    return server_round % QUIET != 0 and (partition + server_round) % 4 == 0
