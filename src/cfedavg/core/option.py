"""Option: the description of a field of Config. Range: the value of a field that may differ by client."""

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
    """The description of a field of Config, for Config, the command, resumed runs and federations.

    A number must lie within the bounds. If `per_client`, each number in the text must.

    >>> Option("Local work", "local learning rate", above=0).check("eta_local", -3)
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: `eta_local` must be above 0, got -3
    """

    group: str  # the heading of the field in a configuration file and in the help
    help: str
    _: KW_ONLY
    shown: str = ""  # the default in words, if the default is None
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    bounds: str = ""  # the bounds in words, if the words made from the numbers would read badly
    choices: tuple[str, ...] = ()
    may_change: bool = False  # whether a resumed run may have another value
    federated: bool = True  # whether a federation of real clients uses the field
    # Whether a Flower app's server decides the field: no (""), only if it averages ("alone"), or "always".
    server: Literal["", "alone", "always"] = ""
    in_task: bool = False  # whether a Task object decides the field
    per_client: bool = False  # whether the value is a text for Range: a number, a range, or one per client
    integer: bool = False  # whether the numbers of such a text must be integers
    is_part: bool = False  # whether the value is a text that may name a module:Class
    exclusive: str = ""  # the name of a group of fields of which at most one may be given
    otherwise: Any = None  # the value if no field of the group is given

    def check(self, name: str, value: Any) -> None:
        """Raise InputError if `value`, of the field `name`, is out of bounds or not one of the choices."""
        if self.choices and value not in self.choices:
            raise InputError(f"`{name}` must be {any_of(self.choices)}, got {value!r}")
        if not isinstance(value, int | float):
            return
        fits = abs(value) <= sys.float_info.max  # an integer may have any number of digits
        got = repr(value).removesuffix(".0") if fits or isinstance(value, float) else "a larger number"
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
    """Return the choices as a text with commas and "or".

    >>> any_of(("auto", "sum", "mean"))
    'auto, sum or mean'
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _with_default(make: Callable[P, Option]) -> Callable[Concatenate[Any, P], Any]:
    """Return the function `option`; this form tells type checkers that it takes the arguments of Option."""

    def option(default: Any, /, *arguments: P.args, **known: P.kwargs) -> Any:
        return field(default=default, metadata={"option": make(*arguments, **known)})

    return option


option = _with_default(Option)  # makes a field of a dataclass, from its default and the arguments of Option


@dataclass(frozen=True)
class Range:
    """A number that may differ by client: `10`, `5..50` (both ends included), or `3,5,8` for clients 0, 1, 2.

    >>> Range.parse("5..50", "local_steps", integer=True)
    Range(low=5.0, high=50.0, each=(), integer=True)
    """

    low: float
    high: float
    each: tuple[float, ...] = ()
    integer: bool = False

    @classmethod
    def parse(cls, text: str, field: str, *, integer: bool = False) -> Range:
        """Return the range in a text; `field` names the text in an error."""
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
        if not all(math.isfinite(v) and (not integer or v == int(v)) for v in values):
            raise InputError(f"`{field}` must hold {'whole' if integer else 'finite'} numbers, got {text!r}")
        if ".." in text and values[0] > values[1]:
            raise InputError(
                f"`{field}` must be a range low..high, got {text!r}; write {values[1]:g}..{values[0]:g}"
            )
        return cls(min(values), max(values), values if ".." not in text and len(values) > 1 else (), integer)

    def mean(self) -> float:
        """Return the mean over the clients."""
        return sum(self.each) / len(self.each) if self.each else (self.low + self.high) / 2

    def at(self, client: int, u: float) -> float:
        """Return the value of a client; for a range, `u` in [0, 1) says where in the range it lies."""
        if self.each:
            return self.each[client]
        if self.integer:
            return self.low + math.floor(u * (self.high - self.low + 1))
        return self.low + u * (self.high - self.low)
