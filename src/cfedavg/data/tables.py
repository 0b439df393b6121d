"""Tables as samples: numeric and categorical columns as one vector of numbers, and a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.data.columns import Columns, Owners, source

_MOST_VALUES = 1000  # different values of a categorical column, and classes


@dataclass(frozen=True)
class Rows:
    """The rows of one split: `inputs` has shape (n, numbers), and a label is a class or a number."""

    inputs: np.ndarray  # float32
    labels: np.ndarray  # int64 for classes, float32 for numbers

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TableData:
    """A data set of rows. `class_names` is empty if the label is a number, which regression predicts."""

    name: str
    train: Rows
    test: Rows
    class_names: tuple[str, ...]
    owners: Owners | None
    note: str

    @property
    def classes(self) -> int:
        """The number of classes; 0 for regression."""
        return len(self.class_names)

    @property
    def outputs(self) -> int:
        """The number of outputs of a model."""
        return self.classes or 1


def read_table(
    name: str, tables: dict[str, Any], label: str, owners: Owners | None, columns: Columns, where: str
) -> TableData:
    """Encode the columns of a table; everything is measured on the train split.

    A number becomes (number - mean) / standard deviation, 0 if it is missing. A text or truth value becomes
    one number for each value, 1 for its own and 0 for the others; all are 0 if it is missing or new. The
    columns that name the client are no inputs.
    """
    names = [each for each in tables["train"].column_names if each not in (label, *columns.clients)]
    if not names:
        raise InputError(
            f"`label_column`: {source(where)} must have other columns than {label!r} to predict it from"
        )
    inputs: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for each in names:
        for split, found in _encode(tables["train"][each], tables["test"][each], each, where).items():
            inputs[split].append(found)
    labels, classes, words = _encode_label(tables["train"][label], tables["test"][label], label, where)
    train, test = (
        Rows(np.concatenate(inputs[split], 1, dtype=np.float32), labels[split]) for split in labels
    )
    inside = f"{len(train):,} train and {len(test):,} test rows"
    note = f"{name}: {inside}, {len(names)} columns as {train.inputs.shape[1]} numbers, {label} {words}"
    return TableData(name, train, test, classes, owners, note)


def _encode(train: Any, test: Any, name: str, where: str) -> dict[str, np.ndarray]:
    """Return a column of each split as an array of shape (rows, numbers)."""
    if _is_number(train.type):
        values = {"train": _as_floats(train, name, where), "test": _as_floats(test, name, where)}
        mean, std = _mean_std(values["train"])
        return {split: np.nan_to_num((each - mean) / std)[:, None] for split, each in values.items()}
    if not _is_category(train.type):
        raise InputError(
            f"{where}: the column {name!r} must hold numbers, texts or truth values, got {train.type}; "
            "convert or remove it"
        )
    texts = {"train": _as_texts(train), "test": _as_texts(test)}
    known = sorted({text for text in texts["train"] if text is not None})
    if len(known) > _MOST_VALUES:
        raise InputError(
            f"{where}: the column {name!r} has {len(known):,} different texts, and at most {_MOST_VALUES:,} "
            "can be encoded; remove it, or set `text_column` to train on its text"
        )
    place: dict[str | None, int] = {text: i for i, text in enumerate(known)}
    rows = {split: np.array([place.get(text, -1) for text in each]) for split, each in texts.items()}
    return {split: (each[:, None] == np.arange(len(known))) * 1.0 for split, each in rows.items()}


def _encode_label(
    train: Any, test: Any, name: str, where: str
) -> tuple[dict[str, np.ndarray], tuple[str, ...], str]:
    """Return the labels of both splits, the names of the classes (none for regression), and a remark."""
    import pyarrow as pa

    missing = InputError(
        f"`label_column`: {source(where)} has rows without a value of {name!r}; remove these rows"
    )
    if train.null_count or test.null_count:
        raise missing
    if pa.types.is_floating(train.type) or pa.types.is_decimal(train.type):
        values = {"train": _as_floats(train, name, where), "test": _as_floats(test, name, where)}
        if any(np.isnan(each).any() for each in values.values()):
            raise missing
        mean, std = _mean_std(values["train"])
        words = f"as a number, in units of its standard deviation {std:.6g} around its mean {mean:.6g}"
        return {split: ((v - mean) / std).astype(np.float32) for split, v in values.items()}, (), words
    if not (pa.types.is_integer(train.type) or _is_category(train.type)):
        raise InputError(f"`label_column`: {name!r} must hold numbers or texts, got {train.type}")
    found = {"train": train.to_pylist(), "test": test.to_pylist()}
    known = sorted(set(found["train"]))
    if not 2 <= len(known) <= _MOST_VALUES:
        hint = "; write them as decimal numbers to predict a number" * pa.types.is_integer(train.type)
        raise InputError(
            f"`label_column`: {name!r} must have from 2 to {_MOST_VALUES:,} classes, got {len(known):,}{hint}"
        )
    if new := {*found["test"]} - {*known}:
        raise InputError(
            f"`label_column`: the train split has no {name} {min(new)!r}, but the test split has"
        )
    place = {value: i for i, value in enumerate(known)}
    labels = {split: np.array([place[v] for v in each], np.int64) for split, each in found.items()}
    return labels, tuple(map(str, known)), f"of {len(known)} classes"


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_category(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _is_category(kind.value_type)
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind) or types.is_null(kind)
    )


def _as_floats(column: Any, name: str, where: str) -> np.ndarray:
    import pyarrow as pa

    try:
        found: np.ndarray = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        raise InputError(
            f"{where}: {name!r} holds numbers in the train split, {column.type} in test"
        ) from None
    if np.isinf(found).any():
        raise InputError(f"{where}: the column {name!r} must hold finite numbers, got inf")
    return found


def _as_texts(column: Any) -> list[str | None]:
    return [None if value is None else str(value) for value in column.to_pylist()]


def _mean_std(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation without missing values; 0 and 1 if there are none, or no spread."""
    known = values[~np.isnan(values)]
    return (float(known.mean()), float(known.std()) or 1.0) if len(known) else (0.0, 1.0)
