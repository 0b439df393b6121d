"""Errors that a user can act on. The command prints the message without a traceback and exits with code 2."""

from __future__ import annotations

from collections.abc import Sequence


class InputError(ValueError):
    """Wrong input. The message names the field, the rule, the value, and what to do."""


class Busy(InputError):
    """Another process has locked the folder."""


class CannotResume(InputError):
    """A run cannot be resumed, since its files are damaged or missing. Nothing is changed on disk."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot resume: {why}")


class ShapesDiffer(InputError):
    """The clients' batches differ in shape, so they cannot be stacked into one tensor."""


class NotFinite(ArithmeticError):
    """Some clients' updates contain NaN or Inf; `rows` lists these clients' rows in the block of updates."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"the update of {name_rows(rows)} holds NaN or Inf")
        self.rows = rows


class Diverged(InputError):
    """Training gave NaN or infinity for `clients` in round `t` (counted from 0)."""

    def __init__(self, t: int, clients: list[int], what: str) -> None:
        whose = f" for {name_rows(clients, 'client')}" if clients else ""
        super().__init__(
            f"round {t + 1}: {what} is NaN or infinite{whose}; "
            "lower `eta_local` (or `eta`), or check the data"
        )
        self.t, self.clients = t, clients


def show(value: object, most: int = 80) -> str:
    """Return a value as one line of at most `most` characters, for an error.

    >>> show([1, "a\\nb"]), show("x" * 100, 9)
    ("[1, 'a\\\\nb']", "'xxxxxxx…")
    """
    line = " ".join(repr(value).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def list_names(names: Sequence[str], most: int = 12) -> str:
    """Return names as a text that lists at most `most` of them.

    >>> list_names(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def summarise_error(error: Exception) -> str:
    """Return the type and the first line of an error, in at most 160 characters.

    >>> summarise_error(ValueError("no such thing\\nand more"))
    'ValueError: no such thing'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def name_rows(rows: list[int], noun: str = "row") -> str:
    """Return numbers as a text such as `clients 3, 5`, which names at most eight of them.

    >>> name_rows([3], "client")
    'client 3'
    >>> name_rows(list(range(12)), "client")
    'clients 0, 1, 2, 3, 4, 5, 6, 7 and 4 more'
    """
    shown, more = rows[:8], len(rows) - 8
    names = ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")
    return f"{noun}{'s' if len(rows) > 1 else ''} {names}"
