"""The one little grammar of the command line and the TOML file: `name(1, key=2) >> name` and `5..50`."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cfedavg.errors import InputError

_CALL = re.compile(r"^\s*([A-Za-z_][\w.]*(?::\w+)?)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_WORDS = {"true": True, "false": False}


def parse_call(text: str, field: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`topk(0.99, per_tensor=true)` -> ("topk", [0.99], {"per_tensor": True})."""
    match = _CALL.match(text)
    if not match:
        raise InputError(f"{field}: {text.strip()!r} is not of the form name or name(arguments)")
    name, inside = match[1], match[2] or ""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError  # f(1)(2) is a call too, of what f(1) gives
        names = [keyword.arg for keyword in call.keywords]
        if None in names or len(set(names)) < len(names):
            raise ValueError  # f(**x), or a name given twice
        args = [_literal(node) for node in call.args]
        kwargs = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise InputError(
            f"{field}: {inside!r} in {text.strip()!r} are not plain arguments like 0.99 or block=256"
        ) from None
    return name, args, kwargs


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    return ast.literal_eval(node)


def build(text: str, table: Mapping[str, Any], field: str) -> Any:
    """Calls the entry that `text` names, with its arguments; `module:Name(...)` calls a user's own.

    >>> build("complex(1, imag=2)", {"complex": complex}, "--number")
    (1+2j)
    """
    name, args, kwargs = parse_call(text, field)
    if ":" in name:
        factory = load(name, field)
    elif name in table:
        factory = table[name]
    else:
        raise InputError(f"{field}: unknown name {name!r}; there are {', '.join(sorted(table))}")
    try:
        return factory(*args, **kwargs)
    except InputError as error:
        raise InputError(f"{field}: {text.strip()}: {error}") from None
    except TypeError as error:
        what = re.sub(r"^[\w.<>]+\(\) ", "", str(error))  # without the name of our class or function
        raise InputError(f"{field}: {text.strip()} has the wrong arguments ({what})") from None


def load(path: str, field: str) -> Any:
    """The object that `package.module:name` names."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's module does when it is imported
        raise InputError(f"{field}: cannot import {module!r} of {path!r} ({error})") from None
    if not hasattr(found, name):
        raise InputError(f"{field}: {module!r} has no {name!r}")
    return getattr(found, name)


@dataclass(frozen=True)
class Range:
    """A number that may differ between clients: `10`, `5..50` (both ends included) or `3,5,8`, one each.

    >>> Range.parse("5..50", "--local-steps", whole=True)
    Range(low=5.0, high=50.0, each=(), whole=True)
    """

    low: float
    high: float
    each: tuple[float, ...] = ()
    whole: bool = False

    @classmethod
    def parse(cls, text: str, field: str, *, whole: bool = False) -> Range:
        try:
            if ".." in text:
                low, high = (float(part) for part in text.split(".."))
                values: tuple[float, ...] = (low, high)
            else:
                values = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise InputError(f"{field}: {text!r} is not a number, a range a..b or a list a,b,c") from None
        if not all(math.isfinite(v) and (not whole or v == int(v)) for v in values):
            raise InputError(f"{field}: {text!r} must hold {'whole' if whole else 'finite'} numbers")
        if ".." in text and values[0] > values[1]:
            raise InputError(f"{field}: {text!r} runs backwards; write {values[1]:g}..{values[0]:g}")
        return cls(min(values), max(values), values if ".." not in text and len(values) > 1 else (), whole)

    def mean(self) -> float:
        return sum(self.each) / len(self.each) if self.each else (self.low + self.high) / 2

    def at(self, client: int, u: float) -> float:
        """The value of a client; u in [0, 1) decides within a range."""
        if self.each:
            return self.each[client]
        if self.whole:
            return self.low + math.floor(u * (self.high - self.low + 1))
        return self.low + u * (self.high - self.low)
