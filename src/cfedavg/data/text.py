"""Texts as samples: sequences of tokens, with the next token to predict at every place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.data.columns import Columns, Owners, source


@dataclass(frozen=True)
class Sequences:
    """The sequences of one split: sequence i has the tokens from `starts[i]` to `starts[i] + length`."""

    tokens: np.ndarray  # uint8, or int32 if there are more than 256 tokens
    starts: np.ndarray  # int64
    length: int

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of the sequences `rows`, of shape (rows, length + 1)."""
        found: np.ndarray = self.tokens[self.starts[rows][:, None] + np.arange(self.length + 1)]
        return found


@dataclass(frozen=True)
class TextData:
    """A data set of texts.

    `vocabulary` holds the known characters; the number after the last one stands for all others. It is empty
    if the tokens are bytes.
    """

    name: str
    train: Sequences
    test: Sequences
    vocabulary: str
    owners: Owners | None
    note: str

    @property
    def outputs(self) -> int:
        """The number of different tokens."""
        return len(self.vocabulary) + 1 if self.vocabulary else 256


def read_text(
    name: str, tables: dict[str, Any], column: str, owners: Owners | None, columns: Columns, where: str
) -> TextData:
    """Cut the texts of each client into sequences; a client's rows are joined by line ends.

    The vocabulary is made of the training texts: their characters, sorted, or all 256 bytes. A sequence has
    `columns.length` places. What is left over at the end of a client's text is not used; clients without a
    whole sequence are left out.
    """
    texts = {split: _read_column(table, column, where) for split, table in tables.items()}
    train = _join(texts["train"], None if owners is None else owners.train)
    test = _join(texts["test"], None if owners is None else owners.test)
    characters = columns.tokens == "characters"
    vocabulary = "".join(sorted(set().union(*train.values()))) if characters else ""
    cuts = {}
    for split, joined in (("train", train), ("test", test)):
        encoded = [(owner, _encode(text, vocabulary)) for owner, text in sorted(joined.items())]
        cuts[split] = sequences, _ = _cut(encoded, columns.length)
        if not len(sequences):
            longest = max((len(tokens) for _, tokens in encoded), default=0)
            raise InputError(
                f"`sequence_length`: {source(where)} has no {split} text of {columns.length + 1} "
                f"{columns.tokens} in {column!r}, the longest has {longest}; lower `sequence_length`"
            )
    (train_set, train_owner), (test_set, test_owner) = cuts["train"], cuts["test"]
    inside = f"{len(train_set):,} train and {len(test_set):,} test sequences"
    note = f"{name}: {inside} of {columns.length} {columns.tokens}"
    if owners is not None:
        if left := len(owners.names) - len(np.unique(train_owner)):
            note += f"; {left} values of {columns.client} left out, which have no whole sequence"
        owners = _keep_owners(owners.names, train_owner, test_owner)
    if vocabulary:
        note += f"; {len(vocabulary)} different characters and one for unknown ones"
    return TextData(name, train_set, test_set, vocabulary, owners, note)


def _keep_owners(names: Sequence[str], train: np.ndarray, test: np.ndarray) -> Owners:
    """Return the owners that have a train sample, numbered anew; test samples of the others have none."""
    kept = np.unique(train)
    place = np.full(len(names) + 1, -1)  # the last entry is for -1, which names no client
    place[kept] = np.arange(len(kept))
    return Owners([names[i] for i in kept], place[train], place[test])


def _read_column(table: Any, column: str, where: str) -> list[str]:
    import pyarrow as pa

    if not (pa.types.is_string(table[column].type) or pa.types.is_large_string(table[column].type)):
        raise InputError(
            f"`text_column`: {source(where)}: {column!r} must hold texts, got {table[column].type}"
        )
    return [text or "" for text in table[column].to_pylist()]


def _join(texts: Sequence[str], owner: np.ndarray | None) -> dict[int, str]:
    """Return each client's text: its rows in their order, joined by line ends."""
    if owner is None:
        return {0: "\n".join(texts)}
    rows: dict[int, list[str]] = {}
    for i, text in zip(owner.tolist(), texts, strict=True):
        rows.setdefault(i, []).append(text)
    return {i: "\n".join(each) for i, each in rows.items()}


def _encode(text: str, vocabulary: str) -> np.ndarray:
    """Return the numbers of the tokens of a text; without a vocabulary, its bytes.

    >>> _encode("abcx", "abc").tolist()
    [0, 1, 2, 3]
    """
    if not vocabulary:
        return np.frombuffer(text.encode(), np.uint8)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32)
    at = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    found = np.where(known[at] == codes, at, len(known))
    return found.astype(np.uint8 if len(known) < 256 else np.int32)


def _cut(texts: Sequence[tuple[int, np.ndarray]], length: int) -> tuple[Sequences, np.ndarray]:
    """Return the sequences of all texts, and the owner of each sequence."""
    starts, owner, at = [], [], 0
    for i, tokens in texts:
        # The last place of a sequence predicts the first token of the next one, so each is predicted once.
        count = max(0, (len(tokens) - 1) // length)
        starts.append(at + length * np.arange(count))
        owner.append(np.full(count, i))
        at += len(tokens)
    empty = np.zeros(0, np.int64)
    joined = np.concatenate([tokens for _, tokens in texts]) if texts else empty
    return Sequences(joined, np.concatenate([empty, *starts]), length), np.concatenate([empty, *owner])
