"""Option: what is known of a field of a configuration. Range: the value of a field that differs by client."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec

from cfedavg.core.errors import InputError

P = ParamSpec("P")


@dataclass(frozen=True)
class Option:
    """What is known of a field, for Config, the command, resumed runs and federations.

    A number must lie within the bounds; of a `per_client` field, each of its numbers.

    >>> Option("Local work", "local learning rate", above=0).check("eta_local", -3)
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: `eta_local` must be above 0, got -3
    """

    group: str  # the heading in a file and in the help
    help: str
    _: KW_ONLY
    shown: str = ""  # the default in words, where None stands for it
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    bounds: str = ""  # in words, where those made of the numbers would read badly
    choices: tuple[str, ...] = ()
    may_change: bool = False  # a resumed run may have another value
    federated: bool = True  # a federation of real clients uses it
    server: Literal["", "alone", "always"] = ""  # a Flower app's server decides it; alone: if it averages
    in_task: bool = False  # a task from Python decides it
    per_client: bool = False  # a text with one number for all, a range, or one number per client
    whole: bool = False  # those numbers are whole
    is_part: bool = False  # a text that may name a module:Class
    exclusive: str = ""  # a group of fields of which at most one may be given
    otherwise: Any = None  # the value if no field of the group is given

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of the field `name` that is out of bounds or no choice."""
        if self.choices and value not in self.choices:
            raise InputError(f"`{name}` must be {any_of(self.choices)}, got {value!r}")
        if not isinstance(value, int | float):
            return
        fits = abs(value) <= sys.float_info.max  # a whole number may have any number of digits
        got = repr(value).removesuffix(".0") if fits or isinstance(value, float) else "a larger one"
        if not fits:
            raise InputError(f"`{name}` must be a finite number below 1.8e308, got {got}")
        if not (self.low <= value <= self.high and self.above < value < self.below):
            raise InputError(f"`{name}` must be {self.rule}, got {got}")

    @property
    def rule(self) -> str:
        """The bounds in words.

        >>> Option("Rounds", "share of replies lost", low=0, below=1).rule
        '0 or more and below 1'
        """
        if self.bounds:
            return self.bounds
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"from {self.low} to {self.high}"
        bounds = self.low, self.above, self.high, self.below
        words = zip(("{} or more", "above {}", "at most {}", "below {}"), bounds, strict=True)
        return " and ".join(text.format(bound) for text, bound in words if math.isfinite(bound))


def any_of(choices: tuple[str, ...]) -> str:
    """Return the choices as a list in words.

    >>> any_of(("auto", "sum", "mean"))
    'auto, sum or mean'
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _with_default(make: Callable[P, Option]) -> Callable[Concatenate[Any, P], Any]:
    """Return `option`, whose arguments a type checker knows from those of Option."""

    def option(default: Any, /, *arguments: P.args, **known: P.kwargs) -> Any:
        return field(default=default, metadata={"option": make(*arguments, **known)})

    return option


option = _with_default(Option)  # a field of a dataclass: its default, then what is known of it


@dataclass(frozen=True)
class Range:
    """A number that may differ between clients: `10`, `5..50` (both ends included) or `3,5,8`, one each.

    >>> Range.parse("5..50", "local_steps", whole=True)
    Range(low=5.0, high=50.0, each=(), whole=True)
    """

    low: float
    high: float
    each: tuple[float, ...] = ()
    whole: bool = False

    @classmethod
    def parse(cls, text: str, field: str, *, whole: bool = False) -> Range:
        """Return the range that the text of a field names."""
        try:
            if ".." in text:
                low, high = (float(part) for part in text.split(".."))
                values: tuple[float, ...] = (low, high)
            else:
                values = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise InputError(
                f"`{field}` must be a number, a range a..b or a list a,b,c, got {text!r}"
            ) from None
        if not all(math.isfinite(v) and (not whole or v == int(v)) for v in values):
            raise InputError(f"`{field}` must hold {'whole' if whole else 'finite'} numbers, got {text!r}")
        if ".." in text and values[0] > values[1]:
            raise InputError(
                f"`{field}` must be a range low..high, got {text!r}; write {values[1]:g}..{values[0]:g}"
            )
        return cls(min(values), max(values), values if ".." not in text and len(values) > 1 else (), whole)

    def mean(self) -> float:
        """Return the mean over the clients."""
        return sum(self.each) / len(self.each) if self.each else (self.low + self.high) / 2

    def at(self, client: int, u: float) -> float:
        """Return the value of a client; u in [0, 1) decides within a range."""
        if self.each:
            return self.each[client]
        if self.whole:
            return self.low + math.floor(u * (self.high - self.low + 1))
        return self.low + u * (self.high - self.low)
