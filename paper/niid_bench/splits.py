"""The partitions of the published table.

All published runs, whatever their seed, have the same partition: the code behind the table draws it from
numpy.random.RandomState(42). NumPy has frozen the numbers of that class, so the same draws give the same
classes and shares here. Which samples of a class a client gets is our own draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cfedavg import InputError
from cfedavg.data import Split

SEED = 42
ALPHA = 0.5
LEAST = 10  # samples of the smallest client


@dataclass(frozen=True)
class PublishedDirichlet(Split):
    """The published draw of NIID-Bench's Dirichlet split with alpha 0.5.

    Class sizes decide how many numbers the shuffle before each draw takes. Ours are those of the official
    files, except in Fashion-MNIST, so `per_class` may name the official size of every class; the shares are
    then applied to our sizes.

    >>> PublishedDirichlet().counts(np.full(10, 5000), 10, seed=0).sum(1).tolist()
    [5579, 5044, 2923, 3442, 6320, 4119, 7417, 4127, 3943, 7086]
    """

    name: ClassVar[str] = "published_dirichlet"
    per_class: int = 0  # 0: the sizes of the data set

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        """Return how many samples of each class each client gets; `seed` has no effect."""
        official = np.full(len(sizes), self.per_class) if self.per_class else sizes
        if m * LEAST > official.sum():
            raise InputError(f"`clients` must be at most {official.sum() // LEAST} here, got {m}")
        draws = np.random.RandomState(SEED)
        drawn = np.zeros((m, len(sizes)), np.int64)
        while drawn.sum(1).min() < LEAST:
            drawn[:] = 0
            for c, size in enumerate(official):
                draws.shuffle(np.arange(size))  # for the numbers that it takes
                shares = draws.dirichlet(np.full(m, ALPHA))
                shares = np.where(drawn.sum(1) < official.sum() / m, shares, 0.0)
                drawn[:, c] = _cut(int(size), np.cumsum(shares / shares.sum()))
        # A product just below a whole number is that number.
        ends = np.cumsum(drawn, 0) / np.maximum(official, 1) + 1e-9
        return np.stack([_cut(int(size), ends[:, c]) for c, size in enumerate(sizes)], 1)


@dataclass(frozen=True)
class PublishedLabels(Split):
    """The published draw of k classes for each client; clients that hold a class share its samples equally.

    >>> (PublishedLabels(2).counts(np.full(10, 6000), 10, seed=0) > 0).argmax(1).tolist()
    [0, 1, 2, 3, 4, 5, 2, 6, 7, 4]
    """

    name: ClassVar[str] = "published_labels"
    k: int

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        """Return how many samples of each class each client gets; `seed` has no effect."""
        classes, draws = len(sizes), np.random.RandomState(SEED)
        if not 1 <= self.k <= classes:
            raise InputError(f"`partition`: k must be from 1 to {classes}, got {self.k}")
        holds = np.zeros((m, classes), np.int64)
        for i in range(m):
            holds[i, i % classes] = 1
            while holds[i].sum() < self.k:
                holds[i, draws.randint(0, classes)] = 1
        share, rest = np.divmod(sizes, np.maximum(holds.sum(0), 1))
        # The first holders get one sample more, as numpy.array_split does.
        return np.asarray(holds * (share + (holds.cumsum(0) <= rest)))


def _cut(size: int, ends: np.ndarray) -> np.ndarray:
    """Cut `size` samples at the shares `ends`, each rounded down; the last client gets what is left."""
    return np.diff((ends[:-1] * size).astype(np.int64), prepend=0, append=size)
