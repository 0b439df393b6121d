"""Partitions of samples over clients: p classes per client, Dirichlet shares, or random shares.

All draws are keyed (`cfedavg.core.keys`): a partition is a function of the labels and the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, bits, bits53, key, permutation, signed

# Streams of Purpose.PARTITION, in the place of the round. In the place of the client: a client or a class.
_ASSIGN, _TRAIN, _TEST, _BOOST, _GAMMA = range(5)
_LEAST_ALPHA = 1e-9  # below, a client's share is one class in any case, and log(u) / alpha could overflow


@dataclass(frozen=True)
class Partition:
    """The sample indices of each client, ascending.

    >>> parts = iid(np.zeros(10), np.zeros(4), m=3, seed=0)
    >>> [len(part) for part in parts.train], [len(part) for part in parts.test], parts.unused
    ([4, 3, 3], [2, 1, 1], 0)
    """

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    unused: int  # train samples that no client holds

    def counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the train samples of each class that each client holds, (m, classes)."""
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.train])


def by_classes(
    train_labels: np.ndarray, test_labels: np.ndarray, classes: int, m: int, p: int, seed: int
) -> Partition:
    """Deal p distinct classes to each client, the same number of samples of each to all clients.

    >>> labels = np.arange(100) % 10
    >>> by_classes(labels, labels, classes=10, m=5, p=2, seed=0).counts(labels, 10).sum(axis=1).tolist()
    [20, 20, 20, 20, 20]
    """
    _check_clients(m, len(train_labels))
    sizes = np.bincount(train_labels, minlength=classes)
    # A class without train samples cannot be dealt: nobody is asked to hold it.
    present = np.flatnonzero(sizes)
    if not 1 <= p <= len(present):
        raise InputError(
            f"`classes_per_client` must be from 1 to {len(present)}, the number of classes, got {p}"
        )
    holds = np.zeros((m, classes), np.int64)
    holds[:, present] = _assignment(len(present), m, p, seed)
    share = _share(sizes, holds)
    if share == 0:
        most = int(sizes[present].min()) * len(present) // p
        raise InputError(
            f"`clients` must be at most {most} with `classes_per_client` {p}, got {m}: "
            "a class would have more clients than samples"
        )
    test_share = _share(np.bincount(test_labels, minlength=classes), holds)
    return _partition(train_labels, test_labels, holds * share, holds * test_share, seed)


def _assignment(classes: int, m: int, p: int, seed: int) -> np.ndarray:
    """Return which p classes each client holds, as 0 and 1 of shape (m, classes).

    Each client takes the classes with the fewest holders so far, in random order among equals. If the
    numbers of holders differ by at most one before, they do so after: so the result is balanced.
    """
    draws = bits(_words(seed, _ASSIGN, m), np.arange(classes, dtype=np.int64))
    holds, holders = np.zeros((m, classes), np.int64), np.zeros(classes, np.int64)
    for i in range(m):
        chosen = np.lexsort((draws[i], holders))[:p]
        holds[i, chosen] = 1
        holders[chosen] += 1
    return holds


def _share(sizes: np.ndarray, holds: np.ndarray) -> int:
    """Return the number of samples that every holder of every class can have."""
    holders = holds.sum(axis=0)
    held = holders > 0
    return int((sizes[held] // holders[held]).min())


def by_dirichlet(
    train_labels: np.ndarray, test_labels: np.ndarray, classes: int, m: int, alpha: float, seed: int
) -> Partition:
    """Deal every sample to one client, by class shares drawn from Dirichlet(alpha) for each client.

    The samples of a class go to the clients in proportion to their shares of it.

    >>> labels = np.arange(100) % 10
    >>> parts = by_dirichlet(labels, labels, classes=10, m=4, alpha=0.5, seed=0)
    >>> sum(len(part) for part in parts.train), min(len(part) for part in parts.train) > 0
    (100, True)
    """
    _check_clients(m, len(train_labels))
    if not 0 < alpha < np.inf:
        raise InputError(f"`dirichlet` must be a finite number above 0, got {alpha}")
    logs = _log_dirichlet(classes, m, alpha, seed)
    # Per class, relative to the largest: with a tiny alpha all shares of a class may be 0 as numbers.
    weights = np.exp(logs - logs.max(axis=0))
    train = _apportion(np.bincount(train_labels, minlength=classes), weights)
    test = _apportion(np.bincount(test_labels, minlength=classes), weights)
    _fill_empty(train)
    return _partition(train_labels, test_labels, train, test, seed)


def _apportion(sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return whole numbers in proportion to each column of weights that add up to sizes (largest remainder).

    >>> _apportion(np.array([10]), np.array([[1.0], [1.0], [2.0]])).tolist()
    [[3], [2], [5]]
    """
    exact = sizes * (weights / weights.sum(axis=0))
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    left = sizes - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    counts += rank < left
    return counts


def _fill_empty(counts: np.ndarray) -> None:
    """Give a client without samples one of the largest client, of its most frequent class, in place."""
    totals = counts.sum(axis=1)
    for i in np.flatnonzero(totals == 0):
        donor = totals.argmax()
        c = counts[donor].argmax()
        for who, change in ((donor, -1), (i, 1)):
            counts[who, c] += change
            totals[who] += change


def _log_dirichlet(classes: int, m: int, alpha: float, seed: int) -> np.ndarray:
    """Return the logarithms of m draws from Dirichlet(alpha), (m, classes): finite for every alpha."""
    alpha = max(alpha, _LEAST_ALPHA)
    logs = _log_gamma_draws(classes, m, alpha + 1 if alpha < 1 else alpha, seed)
    if alpha < 1:  # a Gamma(alpha) is a Gamma(alpha + 1) times u^(1 / alpha)
        u = _uniforms(_words(seed, _BOOST, m), np.arange(classes, dtype=np.int64))
        logs += np.log(u) / alpha
    logs -= logs.max(axis=1, keepdims=True)
    return np.asarray(logs - np.log(np.exp(logs).sum(axis=1, keepdims=True)))


def _log_gamma_draws(classes: int, m: int, alpha: float, seed: int) -> np.ndarray:
    """Return the logarithms of (m, classes) draws from Gamma(alpha), alpha >= 1 (Marsaglia and Tsang 2000).

    Attempt a at class c uses coordinates 3 (a * classes + c) and the next two of the client's key, so a
    rejected draw costs its neighbours nothing.
    """
    d = alpha - 1 / 3
    words = np.repeat(_words(seed, _GAMMA, m), classes, axis=1).ravel()
    coordinates = np.tile(3 * np.arange(classes, dtype=np.int64), m)
    logs, todo = np.empty(m * classes), np.arange(m * classes)
    while len(todo):
        u, v, w = (_uniforms(words[todo], coordinates[todo] + j) for j in range(3))
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        root = np.maximum(1 + normal / np.sqrt(9 * d), 0)
        with np.errstate(divide="ignore"):  # root 0 has logarithm -inf, and is rejected
            log_cube = 3 * np.log(root)
        good = np.log(w) < normal**2 / 2 + d * (1 - root**3 + log_cube)
        logs[todo[good]] = np.log(d) + log_cube[good]
        todo = todo[~good]
        coordinates[todo] += 3 * classes
    return logs.reshape(m, classes)


def iid(train_labels: np.ndarray, test_labels: np.ndarray, m: int, seed: int) -> Partition:
    """Deal every sample, in random shares whose sizes differ by at most one."""
    _check_clients(m, len(train_labels))
    train, test = (
        tuple(np.sort(part) for part in np.array_split(permutation(_key(seed, stream, 0), len(labels)), m))
        for stream, labels in ((_TRAIN, train_labels), (_TEST, test_labels))
    )
    return Partition(train, test, unused=0)


def _check_clients(m: int, samples: int) -> None:
    if not 1 <= m <= samples:
        raise InputError(f"`clients` must be from 1 to {samples}, the number of train samples, got {m}")


def _key(seed: int, stream: int, who: int) -> int:
    return key(seed, stream, who, Purpose.PARTITION)


def _words(seed: int, stream: int, m: int) -> np.ndarray:
    """Return the keys of clients 0 .. m-1, as a column."""
    return np.array([[signed(_key(seed, stream, i))] for i in range(m)], np.int64)


def _uniforms(words: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
    """Return numbers in (0, 1], so that they have a logarithm."""
    return np.asarray(1 - bits53(words, coordinates) / 2.0**53)


def _partition(
    train_labels: np.ndarray, test_labels: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> Partition:
    """Deal samples so that client i gets train[i, c] and test[i, c] of class c."""
    return Partition(
        _deal_classes(train_labels, train, seed, _TRAIN),
        _deal_classes(test_labels, test, seed, _TEST),
        unused=len(train_labels) - int(train.sum()),
    )


def _deal_classes(labels: np.ndarray, counts: np.ndarray, seed: int, stream: int) -> tuple[np.ndarray, ...]:
    m, classes = counts.shape
    owner = np.full(len(labels), m, np.int64)  # m: nobody
    for c in range(classes):
        members = np.flatnonzero(labels == c)
        shuffled = members[permutation(_key(seed, stream, c), len(members))]
        owner[shuffled[: counts[:, c].sum()]] = np.repeat(np.arange(m), counts[:, c])
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(m), side="right")
    return tuple(np.split(order[: ends[-1]], ends[:-1]))
