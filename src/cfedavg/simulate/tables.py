"""Immutable tables of clients: a round with few clients changes few entries, however many clients exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self, TypeVar

from cfedavg.core.run_files import ResidualNorms

T = TypeVar("T")
_CHUNK = 64  # clients in a part of a table; a part is copied if one of its entries changes


class Table(Mapping[int, T]):
    """An immutable table with an entry for some of the clients.

    A new table shares the unchanged parts with the old table, so an update of 100 entries copies about 6,400
    entries and a list of parts, not the whole table.

    >>> old = Table({3: "a", 700: "b"})
    >>> new = old.update({3: "c", 4: "d"})
    >>> old[3], dict(new), len(new)
    ('a', {3: 'c', 4: 'd', 700: 'b'}, 3)
    """

    def __init__(self, entries: Mapping[int, T] | None = None) -> None:
        self._parts: dict[int, dict[int, T]] = {}
        self._size = 0
        for client, entry in (entries or {}).items():
            self._parts.setdefault(client // _CHUNK, {})[client] = entry
            self._size += 1

    def update(self, new: Mapping[int, T]) -> Self:
        """Return a table in which the entries of `new` replace the old ones."""
        table, parts = self.__class__.__new__(self.__class__), dict(self._parts)
        own = set[int]()  # parts that are copied already
        for client, entry in new.items():
            number = client // _CHUNK
            if number not in own:
                parts[number] = dict(parts.get(number, ()))
                own.add(number)
            parts[number][client] = entry
        table._parts = parts
        table._size = self._size + sum(len(parts[n]) - len(self._parts.get(n, ())) for n in own)
        return table

    def __getitem__(self, client: int) -> T:
        return self._parts[client // _CHUNK][client]

    def __iter__(self) -> Iterator[int]:
        for part in self._parts.values():
            yield from part

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


class Norms(Table[float]):
    """A table of clients' squared residual norms, with their sums.

    >>> Norms({3: 4.0, 700: 9.0}).update({3: 16.0}).sums.columns(m=5)
    {'error_norm2': 5.0, 'error_norm': 1.4}
    """

    def __init__(self, entries: Mapping[int, float] | None = None) -> None:
        super().__init__(entries)
        self.sums = ResidualNorms().add(self.values())

    def update(self, new: Mapping[int, float]) -> Self:
        """Return a table in which the norms of `new` replace the old ones."""
        table = super().update(new)
        table.sums = self.sums.add(map(self.get, new), -1).add(new.values())
        return table
