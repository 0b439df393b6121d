"""What a data set is, once it is decoded: pixels and labels of a train and a test split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Images:
    """One split. Both arrays are read-only; those of a large data set are memory-mapped."""

    pixels: np.ndarray  # uint8 (n, channels, height, width)
    labels: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """A data set with both splits; `mean` and `std` are per channel, of pixels / 255 of the train split."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def histogram(pixels: np.ndarray) -> np.ndarray:
    """How often each of the 256 values occurs, per channel: histograms of parts add up exactly."""
    channels = pixels.swapaxes(0, 1).reshape(pixels.shape[1], -1)
    return np.stack([np.bincount(channel, minlength=256) for channel in channels])


def mean_std(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels / 255, per channel, from their histogram.

    >>> mean_std(histogram(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)))
    ((0.5,), (0.5,))
    """
    means, stds = [], []
    for row in counts.tolist():
        n = sum(row)
        total = sum(value * count for value, count in enumerate(row))
        squares = sum(value * value * count for value, count in enumerate(row))
        means.append(total / n / 255)
        # Whole numbers, so nothing cancels. A blank channel gets 1: normalising divides by it.
        stds.append((n * squares - total * total) ** 0.5 / n / 255 or 1.0)
    return tuple(means), tuple(stds)
