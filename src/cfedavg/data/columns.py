"""The columns of a data set: which one is predicted, which are inputs, and which one names the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, list_names
from cfedavg.core.keys import Purpose, key, permutation
from cfedavg.data.images import is_image

Kind = Literal["images", "text", "table"]
TEXTS = ("text",)
LABELS = ("label", "labels", "target", "class", "y")
_TEST_SHARE = 5  # without a test split, a fifth of the rows is the test split
_HOLD_OUT = key(0, 0, 0, Purpose.PARTITION)  # without the seed: runs of all seeds have the same test split


@dataclass(frozen=True)
class Columns:
    """The fields of Config that choose columns and cut texts; None: guess it from the columns' names."""

    text: str | None = None
    label: str | None = None
    client: str | None = None
    length: int = 80
    tokens: str = "characters"

    @classmethod
    def of(cls, config: Config) -> Columns:
        """Return the columns that a configuration names."""
        return cls(
            config.text_column,
            config.label_column,
            config.client_column,
            config.sequence_length or cls.length,
            config.tokens or cls.tokens,
        )

    @property
    def clients(self) -> list[str]:
        """The names of the columns whose values name a client."""
        return [name.strip() for name in (self.client or "").split(",") if name.strip()]


@dataclass(frozen=True)
class Owners:
    """The client of each sample, of both splits, as a place in `names`; -1: a test sample of no client."""

    names: list[str]
    train: np.ndarray
    test: np.ndarray


def choose_kind(schema: Any, columns: Columns, where: str) -> tuple[Kind, str]:
    """Return the kind of a data set with this Arrow schema, and its column of texts or labels."""
    names = schema.names
    if columns.text is not None and columns.label is not None:
        raise InputError("`text_column` and `label_column` exclude each other; give only one of them")
    if columns.text is not None:
        return "text", check_column(names, columns.text, "text_column", where)
    if any(map(is_image, schema)):
        return "images", ""
    if columns.label is not None:
        return "table", check_column(names, columns.label, "label_column", where)
    texts, labels = ([name for name in known if name in names] for known in (TEXTS, LABELS))
    if texts and not labels:
        return "text", texts[0]
    if len(labels) == 1 and not texts:
        return "table", labels[0]
    what = "several columns that may be meant" if texts or labels else "no column named text, label or target"
    raise InputError(
        f"{where} has {what}: set `text_column` to train on a text, or `label_column` to predict a column; "
        f"it has {list_names(names)}"
    )


def check_column(names: Sequence[str], name: str, field: str, where: str) -> str:
    """Return `name`; raise InputError if the data set has no such column."""
    if name not in names:
        raise InputError(f"`{field}`: {source(where)} has no column {name!r}; it has {list_names(names)}")
    return name


def source(where: str) -> str:
    """Return a folder or the name of a data set without its field, for an error about another field.

    >>> source("`data_dir`: runs/plays")
    'runs/plays'
    """
    return where.partition(": ")[2]


def find_owners(tables: dict[str, Any], columns: Columns, where: str) -> Owners | None:
    """Return the client of each row: one client for each value of the client columns in the train split.

    Values are sorted as texts. None if no client column is given.
    """
    if columns.client is None:
        return None
    texts = [_name_rows(tables[split], columns, where) for split in ("train", "test")]
    names = sorted(set(texts[0]))
    place = {name: i for i, name in enumerate(names)}
    train, test = (np.array([place.get(text, -1) for text in each], np.int64) for each in texts)
    return Owners(names, train, test)


def _name_rows(table: Any, columns: Columns, where: str) -> list[str]:
    """Return the client's name for each row: the values of the client columns, joined by a slash."""
    import pyarrow as pa

    found = []
    if not columns.clients:
        raise InputError(f"`client_column` must name a column or columns a,b, got {columns.client!r}")
    for name in columns.clients:
        column = table[check_column(table.column_names, name, "client_column", where)]
        if column.null_count:
            raise InputError(
                f"`client_column`: {source(where)} has {column.null_count} rows without a value of {name}"
            )
        if pa.types.is_nested(column.type):
            raise InputError(f"`client_column`: {name} must hold texts or numbers, got {column.type}")
        found.append([str(value) for value in column.to_pylist()])
    return ["/".join(row) for row in zip(*found, strict=True)]


def hold_out(
    tables: dict[str, Any], owners: Owners | None, kind: Kind
) -> tuple[dict[str, Any], Owners | None]:
    """Return the tables with a test split: if there is none, a fifth of the train rows.

    Of a text it is the last fifth of each client's rows, so that texts stay whole; of a table, random rows.
    """
    if tables["test"].num_rows:
        return tables, owners
    rows = tables["train"].num_rows
    if kind == "text":
        owner = np.zeros(rows, np.int64) if owners is None else owners.train
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner)
        rank = np.empty(rows, np.int64)
        rank[order] = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen = rank >= sizes[owner] - sizes[owner] // _TEST_SHARE
    else:
        chosen = permutation(_HOLD_OUT, rows) % _TEST_SHARE == _TEST_SHARE - 1
    if not chosen.any():
        raise InputError("`data_dir`: without a test split, a data set needs at least 5 rows")
    train, test = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    if owners is not None:
        owners = Owners(owners.names, owners.train[train], owners.train[test])
    return {"train": tables["train"].take(train), "test": tables["train"].take(test)}, owners
