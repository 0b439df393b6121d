"""Errors that a user can act on: one clear sentence, exit code 2, no traceback."""


class InputError(ValueError):
    """Bad input. The message names the field, the rule and the value got, and then what to do."""


class Busy(InputError):
    """Another process is at work in the folder."""


class CannotResume(InputError):
    """The files of a run are damaged or missing; they stay as they are."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot resume: {why}")


class ShapesDiffer(InputError):
    """The batches of clients cannot be put into one block."""


class NotFinite(ArithmeticError):
    """NaN or Inf in an update; `rows` are the rows of the block that hold one."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"the update of {name_rows(rows)} holds NaN or Inf")
        self.rows = rows


class Diverged(InputError):
    """Training gave NaN or infinity, in a round counted from 1 and for some clients."""

    def __init__(self, t: int, clients: list[int], what: str) -> None:
        whose = f" for {name_rows(clients, 'client')}" if clients else ""
        super().__init__(
            f"round {t + 1}: {what} is NaN or infinite{whose}; "
            "lower `eta_local` (or `eta`), or check the data"
        )
        self.t, self.clients = t, clients


def summarise_error(error: Exception) -> str:
    """Return the type and the first line of an error.

    >>> summarise_error(ValueError("no such thing\\nand more"))
    'ValueError: no such thing'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def name_rows(rows: list[int], noun: str = "row") -> str:
    """Return rows in words: `client 3`, `clients 3, 5 and 9 more`.

    >>> name_rows([3], "client")
    'client 3'
    >>> name_rows(list(range(12)), "client")
    'clients 0, 1, 2, 3, 4, 5, 6, 7 and 4 more'
    """
    shown, more = rows[:8], len(rows) - 8
    names = ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")
    return f"{noun}{'s' if len(rows) > 1 else ''} {names}"
