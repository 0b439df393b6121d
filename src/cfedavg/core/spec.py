"""The one little grammar of the command line and the TOML file: `name(1, key=2) >> name` and `5..50`.

A text becomes a part in two steps. `parse_call` reads names and literals and runs nothing. `build` calls what
the name stands for: an entry of a table, or, in a text that is trusted, the class `package.module:Class`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfedavg.core.errors import InputError

_CALL = re.compile(r"^\s*([A-Za-z_][\w.]*(?::\w+)?)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_WORDS = {"true": True, "false": False}
_LONGEST = 1000  # characters of a text; far more would exhaust the parser


def check_length(text: str, field: str) -> None:
    """Refuse a text that is too long to name a part."""
    if len(text) > _LONGEST:
        raise InputError(f"`{field}`: the text must have at most {_LONGEST:,} characters, got {len(text):,}")


def split_chain(text: str, field: str, longest: int) -> list[str]:
    """Split `name(...) >> name(...)` into its names, at most `longest` of them.

    >>> split_chain("topk(0.99) >> bf16", "compressor", 2)
    ['topk(0.99)', 'bf16']
    """
    check_length(text, field)
    pieces = [piece.strip() for piece in text.split(">>")]
    if len(pieces) > longest:
        most = "one name" if longest == 1 else f"at most {longest} names"
        raise InputError(f"`{field}`: {text!r} must have {most}")
    return pieces


def parse_call(text: str, field: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`topk(0.99, per_tensor=true)` -> ("topk", [0.99], {"per_tensor": True})."""
    check_length(text, field)
    match = _CALL.match(text)
    if not match:
        raise InputError(f"`{field}`: {text.strip()!r} is not of the form name or name(arguments)")
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
            f"`{field}`: {inside!r} in {text.strip()!r} are not plain arguments like 0.99 or block=256"
        ) from None
    return name, args, kwargs


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    return ast.literal_eval(node)


def build(text: str, table: Mapping[str, Any], kind: type, field: str, *, trust: bool) -> Any:
    """Call the entry of `table` that `text` names, with its arguments.

    With `trust`, `module:Class(...)` calls a class of the user's own, which must be a subclass of `kind`.
    Without it, nothing is imported: the text may be a stranger's.

    >>> build("complex(1, imag=2)", {"complex": complex}, complex, "number", trust=False)
    (1+2j)
    """
    name, args, kwargs = parse_call(text, field)
    if name in table:
        factory = table[name]
    elif ":" in name and trust:
        factory = _load_class(name, kind, field)
    else:
        what = "a module, which this text may not import:" if ":" in name else "unknown name"
        raise InputError(f"`{field}`: {what} {name!r}; there are {', '.join(sorted(table))}")
    try:
        return factory(*args, **kwargs)
    except InputError as error:
        raise InputError(f"`{field}`: {text.strip()}: {error}") from None
    except TypeError as error:
        what = re.sub(r"^[\w.<>]+\(\) ", "", str(error))  # without the name of our class or function
        raise InputError(f"`{field}`: {text.strip()} has the wrong arguments ({what})") from None


def _load_class(path: str, kind: type, field: str) -> type:
    """The class that `package.module:Class` names, checked before anybody calls it."""
    found = load(path, field)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise InputError(f"`{field}`: {path!r} must be a subclass of {kind.__module__}.{kind.__name__}")
    return found


def load(path: str, field: str) -> Any:
    """Import the object that `package.module:name` names. Only for a text that is trusted."""
    if not _PATH.fullmatch(path):  # a remark, say; a file may have any name, and must not run by it
        raise InputError(f"`{field}`: {path[:80]!r} is not of the form package.module:name")
    module, _, name = path.partition(":")
    try:
        with _current_folder_last(module.partition(".")[0]):
            found = importlib.import_module(module)
            is_there = hasattr(found, name)  # a module may compute its attributes
    except Exception as error:  # whatever the user's module does when it is imported
        raise InputError(f"`{field}`: cannot import {module!r} of {path!r} ({error})") from None
    if not is_there:
        where = getattr(found, "__file__", None) or "built in"
        raise InputError(f"`{field}`: {module!r} ({where}) has no {name!r}")
    return getattr(found, name)


@contextmanager
def _current_folder_last(package: str) -> Iterator[None]:
    """Let one import look into the current folder, if the package is nowhere else.

    The folder comes last and goes again: a file planted there must never stand for an installed package.
    """
    here = str(Path.cwd())
    if here in sys.path or package in sys.modules or importlib.util.find_spec(package):
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


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
        return sum(self.each) / len(self.each) if self.each else (self.low + self.high) / 2

    def at(self, client: int, u: float) -> float:
        """The value of a client; u in [0, 1) decides within a range."""
        if self.each:
            return self.each[client]
        if self.whole:
            return self.low + math.floor(u * (self.high - self.low + 1))
        return self.low + u * (self.high - self.low)
