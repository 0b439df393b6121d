"""Partitions as others define them, so that results can be compared: the parts of the option `partition`.

NIID-Bench is Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022. Flower's partitioners
are those of the package flwr-datasets. The definitions are theirs, the random draws ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, bits, keys
from cfedavg.core.parts import Part, Registry, argument, check_truth
from cfedavg.data.partition import (
    Pair,
    Partition,
    apportion,
    check_clients,
    deal_counts,
    log_dirichlet,
)

_TRIES = 1000  # draws until every client has enough samples
# Streams of random numbers, as in `partition`. A try uses the streams from _FIRST + try * _STREAMS on.
_HOLD, _FIRST, _STREAMS = 8, 16, 8


class Split(Part):
    """A rule that says how many samples of each class each client gets.

    A split of one's own is a frozen dataclass with this base class and the function `counts`.
    """

    chosen_by: ClassVar[tuple[str, ...]] = ("partition",)
    by_class: ClassVar[bool] = True  # False: the split does not look at classes

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        """Return an array of shape (m, classes): how many samples of each class each client gets.

        `sizes` holds the number of samples of each class, or, if `by_class` is False, of all samples.
        """
        raise NotImplementedError

    def deal(self, labels: Pair, classes: int, m: int, seed: int) -> Partition:
        """Deal samples to `m` clients; test samples of a class in proportion to its train samples."""
        if not self.by_class:
            labels, classes = (np.zeros(len(labels[0]), np.int64), np.zeros(len(labels[1]), np.int64)), 1
        check_clients(m, len(labels[0]))
        sizes = np.bincount(labels[0], minlength=classes)
        train = self.counts(sizes, m, seed)
        if train.shape != (m, classes) or (train < 0).any() or (train.sum(0) > sizes).any():
            raise InputError(f"`partition`: {self} deals more samples of a class than there are")
        if not train.sum(1).all():
            raise InputError(f"`partition`: {self} leaves client {train.sum(1).argmin()} without samples")
        held = train.sum(0) > 0
        wanted = np.where(held, np.bincount(labels[1], minlength=classes), 0)
        test = apportion(wanted, np.where(held, train, 1))
        return deal_counts(labels, (train, test), seed)


def _positive() -> Any:
    return argument("above 0", lambda value: 0 < value < np.inf)


def _least() -> Any:
    return argument("1 or more", lambda value: value >= 1, 10, integer=True)


@dataclass(frozen=True)
class FlowerDirichlet(Split):
    """Draw each class's shares over clients from Dirichlet(alpha), until each client has 10 samples.

    This is Flower's DirichletPartitioner with the same arguments (`least`: min_partition_size, `balanced`:
    self_balancing): clients have unequal sizes.

    >>> FlowerDirichlet(0.5).counts(np.array([50, 50]), 3, seed=0).sum(0).tolist()
    [50, 50]
    """

    name: ClassVar[str] = "flower_dirichlet"
    examples: ClassVar[tuple[str, ...]] = ("flower_dirichlet(0.5)",)
    full_at_mean: ClassVar[bool] = False  # whether a client with just the mean number of samples is full
    alpha: float = _positive()
    least: int = _least()
    balanced: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truth("balanced", self.balanced)

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        check_least(self, self.least, m, int(sizes.sum()))
        for attempt in range(_TRIES):
            first = _FIRST + _STREAMS * attempt
            shares = np.exp(log_dirichlet(m, len(sizes), self.alpha, seed, first))
            counts = np.zeros((m, len(sizes)), np.int64)
            for c, size in enumerate(sizes):
                room = sizes.sum() / m - counts.sum(1)
                weights = np.where(room > 0 if self.full_at_mean else room >= 0, shares[c], 0.0)
                counts[:, c] = cut(int(size), weights if self.balanced and weights.sum() else shares[c])
            if counts.sum(1).min() >= self.least:
                return counts
        raise too_small(self, self.least, m)


@dataclass(frozen=True)
class NiidDirichlet(FlowerDirichlet):
    """Draw each class's shares over clients from Dirichlet(alpha), for clients that are not full yet.

    This is NIID-Bench's noniid-labeldir: a client with the mean number of samples or more gets none of the
    classes that follow, and everything is drawn again until each client has at least 10 samples.
    """

    name: ClassVar[str] = "niid_dirichlet"
    examples: ClassVar[tuple[str, ...]] = ("niid_dirichlet(0.5)",)
    full_at_mean: ClassVar[bool] = True
    balanced: bool = True


@dataclass(frozen=True)
class NiidQuantity(Split):
    """Draw the sizes of clients from Dirichlet(alpha), and their samples at random: quantity skew.

    This is NIID-Bench's iid-diff-quantity, drawn again until each client has at least 10 samples.

    >>> int(NiidQuantity(0.5).counts(np.array([100]), 4, seed=0).sum())
    100
    """

    name: ClassVar[str] = "niid_quantity"
    examples: ClassVar[tuple[str, ...]] = ("niid_quantity(0.5)",)
    by_class: ClassVar[bool] = False
    alpha: float = _positive()
    least: int = _least()

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        check_least(self, self.least, m, int(sizes.sum()))
        for attempt in range(_TRIES):
            shares = np.exp(log_dirichlet(m, 1, self.alpha, seed, _FIRST + _STREAMS * attempt))
            counts = cut(int(sizes.sum()), shares[0])
            if counts.min() >= self.least:
                return counts[:, None]
        raise too_small(self, self.least, m)


@dataclass(frozen=True)
class NiidClasses(Split):
    """Give each client k classes; the clients that hold a class share all of its samples equally.

    This is NIID-Bench's #C = k: client i holds class i modulo the number of classes, and k - 1 random others.
    So clients have unequal sizes. (`classes_per_client` deals balanced classes and equal sizes.)

    >>> (NiidClasses(2).counts(np.array([30, 30, 30]), 5, seed=0) > 0).sum(1).tolist()
    [2, 2, 2, 2, 2]
    """

    name: ClassVar[str] = "niid_classes"
    examples: ClassVar[tuple[str, ...]] = ("niid_classes(2)",)
    k: int = argument("1 or more", lambda value: value >= 1, integer=True)

    def counts(self, sizes: np.ndarray, m: int, seed: int) -> np.ndarray:
        classes = len(sizes)
        if self.k > classes:
            raise InputError(f"`partition`: {self} needs {self.k} classes, the data set has {classes}")
        clients = keys(seed, _HOLD, np.arange(m), Purpose.PARTITION)[:, None]
        draws = bits(clients, np.arange(classes, dtype=np.int64))
        draws[np.arange(m), np.arange(m) % classes] = np.iinfo(np.int64).min
        holds = np.zeros((m, classes), np.int64)
        np.put_along_axis(holds, np.argsort(draws, 1, kind="stable")[:, : self.k], 1, 1)
        share, rest = np.divmod(sizes, np.maximum(holds.sum(0), 1))
        # The first holders get one sample more, as numpy.array_split does.
        return np.asarray(holds * (share + (holds.cumsum(0) <= rest)))


def cut(size: int, weights: np.ndarray) -> np.ndarray:
    """Cut `size` samples in proportion to `weights`, each end rounded down, as both packages do.

    >>> cut(10, np.array([0.35, 0.35, 0.3])).tolist()
    [3, 4, 3]
    """
    # A sum just below a whole number is that number: else the last client could get a sample for weight 0.
    ends = (np.cumsum(weights / weights.sum())[:-1] * size + 1e-6).astype(np.int64)
    return np.diff(ends, prepend=0, append=size)


def check_least(split: Split, least: int, m: int, samples: int) -> None:
    """Raise InputError if `m` clients cannot have `least` samples each."""
    if m * least > samples:
        raise InputError(
            f"`clients` must be at most {samples // least} with the `partition` {split}, got {m}: "
            f"each needs {least} of {samples} samples"
        )


def too_small(split: Split, least: int, m: int) -> InputError:
    """Return the error that no draw gave every client enough samples."""
    return InputError(
        f"`partition`: {split} gave one of {m} clients fewer than {least} samples in each of {_TRIES:,} "
        "draws; raise alpha, lower `clients`, or set least=1"
    )


SPLITTERS: Registry[Split] = Registry(
    "partition",
    Split,
    {each.name: each for each in (NiidDirichlet, FlowerDirichlet, NiidQuantity, NiidClasses)},
)
