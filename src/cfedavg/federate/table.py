"""A mapping that is never changed, and is cheap to extend: a server knows many clients and hears few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")


class Table(Mapping[str, V], Generic[V]):
    """Names and values. `table | more` is another table, at the cost of `more`, whatever the table holds.

    It is a stack of dicts, each more than twice as large as the one above it, which it shares with the
    tables that it came from; an entry is copied once for every doubling.

    >>> first = Table({"a": 1, "b": 2})
    >>> second = first | {"b": 3}
    >>> first["b"], second["b"], len(second), second.since(first)
    (2, 3, 2, {'b': 3})
    """

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        self._layers: tuple[dict[str, V], ...] = (dict(entries),) if entries else ()
        self._length = len(entries or {})

    def __or__(self, more: Mapping[str, V]) -> Table[V]:
        layers = [*self._layers, dict(more)]
        while len(layers) > 1 and len(layers[-2]) <= 2 * len(layers[-1]):
            upper = layers.pop()
            layers[-1] = layers[-1] | upper
        made: Table[V] = Table()
        made._layers = tuple(layers)
        made._length = self._length + sum(name not in self for name in more)
        return made

    def __getitem__(self, name: str) -> V:
        for layer in reversed(self._layers):
            if name in layer:
                return layer[name]
        raise KeyError(name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self._layers for name in layer))

    def since(self, before: Table[V]) -> dict[str, V]:
        """What was added or changed since `before`, from which this table was made."""
        shared = {id(layer) for layer in before._layers}
        new = [name for layer in self._layers if id(layer) not in shared for name in layer]
        return {name: self[name] for name in new if name not in before or before[name] != self[name]}
