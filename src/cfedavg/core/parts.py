"""Parts: the pieces of the algorithm that a user exchanges by a text such as `topk(0.99) >> bf16`.

A part is a frozen dataclass whose fields are its arguments. It has no state of its own: what it remembers
goes into its functions and comes out of them. A Registry knows the parts of one kind by their names.

A text becomes a part in two steps. `parse_call` reads names and literals and runs nothing. `build` calls what
the name stands for: an entry of a table, or, in a text that is trusted, the class `package.module:Class`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from cfedavg.core.errors import InputError

P = TypeVar("P", bound="Part")


class Part:
    """An exchangeable piece of the algorithm. `str` gives the text that names it, with its arguments."""

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()  # texts for a list of parts, where the name alone will not do

    @classmethod
    def written_name(cls) -> str:
        """Return the name that stands for the class in a text; a subclass does not inherit it."""
        return str(vars(cls).get("name", "")) or f"{cls.__module__}:{cls.__name__}"

    def __str__(self) -> str:
        shown, arguments = self.written_name(), []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                value = value.item() if hasattr(value, "item") else value  # repr of NumPy's is no literal
                text = str(value).lower() if isinstance(value, bool) else repr(value)
                arguments.append(text if field.default is MISSING else f"{field.name}={text}")
        return shown + (f"({', '.join(arguments)})" if arguments else "")


@dataclass(frozen=True)
class Registry(Generic[P]):
    """The parts of one kind, by name; `field` is the field of Config that holds such a text."""

    field: str
    kind: type[P]
    entries: Mapping[str, Callable[..., P]]

    def examples(self) -> list[str]:
        """Return texts that name every entry, for a list of them."""
        found = [(name, getattr(entry, "examples", ())) for name, entry in self.entries.items()]
        return [text for name, texts in found for text in texts or (name,)]

    def parse(self, text: str, *, trust: bool = True, own: Collection[type[P]] = ()) -> P:
        """Return the part that a text of one name names.

        A text that you did not write yourself may name any module: with `trust=False` none is imported, and
        the text may only name registered parts and the classes in `own`.
        """
        (part,) = self.parse_chain(text, longest=1, trust=trust, own=own)
        return part

    def parse_chain(
        self, text: str, *, longest: int, trust: bool = True, own: Collection[type[P]] = ()
    ) -> list[P]:
        """Return the parts of a text `name(...) >> name(...)`, at most `longest` of them."""
        table = {part.written_name(): part for part in own} | dict(self.entries)
        pieces = split_chain(text, self.field, longest)
        parts = [build(piece, table, self.kind, self.field, trust=trust) for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            if not is_dataclass(part):
                raise InputError(
                    f"`{self.field}`: {piece!r} must be a frozen dataclass; write @dataclass(frozen=True) "
                    "above the class"
                )
        return parts


def check_argument(
    name: str, value: object, rule: str, holds: Callable[[Any], bool], *, whole: bool = False
) -> None:
    """Refuse an argument of a part that is not a number, or a whole one, or for which the rule does not hold.

    >>> check_argument("decay", 2, "above 0 and at most 1", lambda decay: 0 < decay <= 1)
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: decay must be above 0 and at most 1, got 2
    """
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (is_number and holds(value)):
        raise InputError(f"{name} must be {'a whole number ' * whole}{rule}, got {value!r:.40}")


def check_truth(name: str, value: object) -> None:
    """Refuse an argument of a part that is neither true nor false."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {value!r:.40}")


def first_sentence(thing: Any) -> str:
    """Return the first line of a docstring, for tables of parts."""
    return (thing.__doc__ or "").strip().split("\n")[0]


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
    """Return name and arguments: `topk(0.99, per_tensor=true)` is ("topk", [0.99], {"per_tensor": True})."""
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
    """Return the class that `package.module:Class` names; refuse one that is no subclass of `kind`."""
    found = load(path, field)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise InputError(f"`{field}`: {path!r} must be a subclass of {kind.__module__}.{kind.__name__}")
    return found


def load(path: str, field: str) -> Any:
    """Import the object that `package.module:name` names. Only for a text that is trusted."""
    if not _PATH.fullmatch(path):  # a remark, say: a file of that name must not run
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
