"""Partitions of samples over clients: by p classes per client, by Dirichlet shares, at random, or by owner.

Random draws come from keys (`cfedavg.core.keys`), so the same labels, arguments and seed always give the same
partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, bits, bits53, key, keys, permutation

# Streams of random numbers. A key of Purpose.PARTITION holds the number of a stream where other keys hold the
# round, and the number of a client or of a class where other keys hold the client.
_ASSIGN, _TRAIN, _TEST, _BOOST, _GAMMA = range(5)
_LEAST_ALPHA = 1e-9  # below it, each client has one class anyway, and log(u) / alpha could overflow
Pair = tuple[np.ndarray, np.ndarray]  # an array for the train split and one for the test split


@dataclass(frozen=True)
class Partition:
    """The indices of each client's train samples and test samples, in ascending order.

    >>> parts = iid(np.zeros(10), np.zeros(4), m=3, seed=0)
    >>> [len(part) for part in parts.train], [len(part) for part in parts.test], parts.unused
    ([4, 3, 3], [2, 1, 1], 0)
    """

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    unused: int  # train samples that no client holds

    def counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return an array of shape (clients, classes): how many train samples of each class a client has."""
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.train])


def by_classes(
    train_labels: np.ndarray, test_labels: np.ndarray, classes: int, m: int, p: int, seed: int
) -> Partition:
    """Deal `p` classes to each of `m` clients.

    Every client gets the same number of samples of each of its classes. Left-over samples stay unused.

    >>> labels = np.arange(100) % 10
    >>> by_classes(labels, labels, classes=10, m=5, p=2, seed=0).counts(labels, 10).sum(axis=1).tolist()
    [20, 20, 20, 20, 20]
    """
    check_clients(m, len(train_labels))
    sizes = np.bincount(train_labels, minlength=classes)
    # A class without train samples is dealt to no client.
    present = np.flatnonzero(sizes)
    if not 1 <= p <= len(present):
        raise InputError(
            f"`classes_per_client` must be from 1 to {len(present)}, the number of classes, got {p}"
        )
    holds = np.zeros((m, classes), np.int64)
    holds[:, present] = _assign_classes(len(present), m, p, seed)
    share = _share(sizes, holds)
    if share == 0:
        most = int(sizes[present].min()) * len(present) // p
        raise InputError(
            f"`clients` must be at most {most} with `classes_per_client` {p}, got {m}: "
            "a class would have more clients than samples"
        )
    test_share = _share(np.bincount(test_labels, minlength=classes), holds)
    return deal_counts((train_labels, test_labels), (holds * share, holds * test_share), seed)


def _assign_classes(classes: int, m: int, p: int, seed: int) -> np.ndarray:
    """Return an array of shape (m, classes): 1 where a client holds a class, else 0; `p` classes per client.

    One client after another takes the `p` classes that the fewest clients hold so far, with random choice
    among equals. So the numbers of clients per class differ by at most one.
    """
    draws = bits(_client_keys(seed, _ASSIGN, m), np.arange(classes, dtype=np.int64))
    holds, holders = np.zeros((m, classes), np.int64), np.zeros(classes, np.int64)
    for i in range(m):
        holds[i, np.lexsort((draws[i], holders))[:p]] = 1
        holders += holds[i]
    return holds


def _share(sizes: np.ndarray, holds: np.ndarray) -> int:
    """Return the largest number n such that every client can get n samples of each of its classes."""
    holders = holds.sum(axis=0)
    held = holders > 0
    return int((sizes[held] // holders[held]).min())


def by_dirichlet(
    train_labels: np.ndarray, test_labels: np.ndarray, classes: int, m: int, alpha: float, seed: int
) -> Partition:
    """Deal all samples to `m` clients, with class shares drawn from Dirichlet(alpha).

    For each client, one draw gives a share for each class. The samples of a class go to the clients in
    proportion to their shares for this class. Every client gets at least one train sample.

    >>> labels = np.arange(100) % 10
    >>> parts = by_dirichlet(labels, labels, classes=10, m=4, alpha=0.5, seed=0)
    >>> sum(len(part) for part in parts.train), min(len(part) for part in parts.train) > 0
    (100, True)
    """
    check_clients(m, len(train_labels))
    if not 0 < alpha < np.inf:
        raise InputError(f"`dirichlet` must be a finite number above 0, got {alpha}")
    logs = log_dirichlet(classes, m, alpha, seed)
    # Divide by the largest share of the class: with a tiny alpha, all shares of a class may underflow to 0.
    return _deal_all((train_labels, test_labels), np.exp(logs - logs.max(axis=0)), seed)


def iid(train_labels: np.ndarray, test_labels: np.ndarray, m: int, seed: int) -> Partition:
    """Deal all samples to `m` clients at random, in parts whose sizes differ by at most one sample."""
    check_clients(m, len(train_labels))
    one_class = np.zeros(len(train_labels), np.int64), np.zeros(len(test_labels), np.int64)
    return _deal_all(one_class, np.ones((m, 1)), seed)


def by_owner(train: np.ndarray, test: np.ndarray, m: int) -> Partition:
    """Give each sample to its owner, a number from 0 to m - 1; test samples of owner -1 belong to no client.

    >>> [part.tolist() for part in by_owner(np.array([1, 0, 1]), np.array([-1, 0]), 2).test]
    [[1], []]
    """
    return Partition(tuple(_group(train, m)), tuple(_group(test, m)), unused=int((train < 0).sum()))


def _group(owner: np.ndarray, m: int) -> list[np.ndarray]:
    """Return the places of each owner from 0 to m - 1, in ascending order."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(m + 1)))[1:-1]


def check_clients(m: int, samples: int) -> None:
    if not 1 <= m <= samples:
        raise InputError(f"`clients` must be from 1 to {samples}, the number of train samples, got {m}")


def _deal_all(labels: Pair, weights: np.ndarray, seed: int) -> Partition:
    """Deal all samples to clients: client i gets samples of class c in proportion to weights[i, c]."""
    sizes = (np.bincount(of_split, minlength=weights.shape[1]) for of_split in labels)
    train, test = (apportion(each, weights) for each in sizes)
    _fill_empty(train)
    return deal_counts(labels, (train, test), seed)


def apportion(sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Split each sizes[c] into integers in proportion to column c of `weights`.

    The integers add up to sizes[c]. The largest remainder method decides which of them are rounded up.

    >>> apportion(np.array([10]), np.array([[1.0], [1.0], [2.0]])).tolist()
    [[3], [2], [5]]
    """
    exact = sizes * (weights / weights.sum(axis=0))
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    left = sizes - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    counts += rank < left
    return counts


def _fill_empty(counts: np.ndarray) -> None:
    """Change `counts` in place so that each client has at least one sample.

    A client without samples gets one from the client with the most samples, out of that client's most
    frequent class.
    """
    totals = counts.sum(axis=1)
    for i in np.flatnonzero(totals == 0):
        donor = totals.argmax()
        c = counts[donor].argmax()
        for who, change in ((donor, -1), (i, 1)):
            counts[who, c] += change
            totals[who] += change


def log_dirichlet(classes: int, m: int, alpha: float, seed: int, first: int = 0) -> np.ndarray:
    """Return an array of shape (m, classes): the finite logarithms of `m` draws from Dirichlet(alpha).

    `first` is added to the numbers of the streams, for draws that are independent of the others.
    """
    alpha = max(alpha, _LEAST_ALPHA)
    logs = _log_gamma_draws(classes, m, alpha + 1 if alpha < 1 else alpha, seed, first)
    if alpha < 1:  # a Gamma(alpha) draw is a Gamma(alpha + 1) draw times u^(1 / alpha)
        u = _uniforms(_client_keys(seed, first + _BOOST, m), np.arange(classes, dtype=np.int64))
        logs += np.log(u) / alpha
    logs -= logs.max(axis=1, keepdims=True)
    return np.asarray(logs - np.log(np.exp(logs).sum(axis=1, keepdims=True)))


def _log_gamma_draws(classes: int, m: int, alpha: float, seed: int, first: int = 0) -> np.ndarray:
    """Return an array of shape (m, classes): logarithms of draws from Gamma(alpha), for alpha >= 1.

    The draws use the rejection method of Marsaglia and Tsang (2000). Attempt number a for class c uses three
    random numbers of the client's key: those at coordinate 3 * (a * classes + c) and the next two. So a
    rejected attempt for one class does not change the draws for other classes.
    """
    d = alpha - 1 / 3
    words = np.repeat(_client_keys(seed, first + _GAMMA, m), classes, axis=1).ravel()
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


def _client_keys(seed: int, stream: int, m: int) -> np.ndarray:
    """Return an array of shape (m, 1): each client's key for a stream of random numbers."""
    return np.asarray(keys(seed, stream, np.arange(m), Purpose.PARTITION)[:, None])


def _uniforms(words: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
    """Return uniform random numbers in (0, 1]. Callers take their logarithms, so 0 is excluded."""
    return np.asarray(1 - bits53(words, coordinates) / 2.0**53)


def deal_counts(labels: Pair, counts: Pair, seed: int) -> Partition:
    """Deal samples to clients at random: in each split, client i gets counts[i, c] samples of class c.

    `labels` and `counts` each hold one array for the train split and one for the test split.
    """
    parts = []
    for stream, of_split, wanted in zip((_TRAIN, _TEST), labels, counts, strict=True):
        m, classes = wanted.shape
        owner = np.full(len(of_split), m, np.int64)  # m stands for no client
        for c in range(classes):
            members = np.flatnonzero(of_split == c)
            shuffled = members[permutation(key(seed, stream, c, Purpose.PARTITION), len(members))]
            owner[shuffled[: wanted[:, c].sum()]] = np.repeat(np.arange(m), wanted[:, c])
        parts.append(tuple(_group(owner, m)))
    return Partition(parts[0], parts[1], unused=len(labels[0]) - int(counts[0].sum()))
