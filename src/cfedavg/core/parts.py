"""Parts: the pieces of the algorithm that a user exchanges by a text such as `topk(0.99) >> bf16`.

A part is a frozen dataclass whose fields are its arguments. A part has no state: its functions take what it
remembers (the memory) as an argument and return the next memory. A Registry lists the parts of one kind, such
as all server optimisers, by name.

A text becomes a part in two steps. `parse_call` reads the name and the arguments and runs no code. `build`
calls the class that is registered under the name. Only a trusted text may name another class, as
`package.module:Class`, which is imported.

Another kind of text, such as `5..50`, is a Range: a number that may differ by client.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from cfedavg.core.errors import InputError, show
from cfedavg.core.names import NamedArguments

P = TypeVar("P", bound="Part")


class Written:
    """The base class of objects that a text can make, so that a field of Config may hold the text."""

    chosen_by: ClassVar[tuple[str, ...]] = ()  # the fields of Config that take such an object

    def to_text(self, field: str) -> str:
        """Return the text that makes an equal object; raise InputError, which names `field`, if none does."""
        raise NotImplementedError


class Part(Written, NamedArguments):
    """The base class of exchangeable pieces of the algorithm. `str(part)` is the text that makes the part."""

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()  # texts for a list of parts, if the name alone is no valid text

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if "argument" in each.metadata and value is not each.default:
                check_argument(each.name, value, **each.metadata["argument"])

    @classmethod
    def written_name(cls) -> str:
        """Return how a text names this class: by its `name`, if not inherited, or else as `module:Class`."""
        return str(vars(cls).get("name", "")) or f"{cls.__module__}:{cls.__name__}"

    def __str__(self) -> str:
        return self.written_name() + self._written_arguments()

    def _written_arguments(self) -> str:
        """Return the arguments of the text, in brackets; a default is left out."""
        arguments = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                value = value.item() if hasattr(value, "item") else value  # NumPy's repr is not a literal
                text = str(value).lower() if isinstance(value, bool) else repr(value)
                arguments.append(text if each.default is MISSING else f"{each.name}={text}")
        return f"({', '.join(arguments)})" if arguments else ""

    def to_text(self, field: str) -> str:
        """Return the text that makes an equal part; a class of a user's becomes `module:Class(arguments)`.

        Raise InputError, which names `field`, if no text can say which class or which arguments.
        """
        kind = type(self)
        if kind.__module__.startswith("cfedavg."):
            return str(self)
        path, module = f"{kind.__module__}:{kind.__qualname__}", sys.modules.get(kind.__module__)
        if not _PATH.fullmatch(path) or getattr(module, kind.__name__, None) is not kind:
            raise InputError(
                f"`{field}`: the class {kind.__qualname__} cannot be found by its name; "
                f"define it at the top level of a module"
            )
        if not is_dataclass(self):
            raise InputError(f"`{field}`: {path} must be a frozen dataclass; write @dataclass(frozen=True)")
        with suppress(InputError, TypeError, ValueError):  # an argument that no literal can express
            text = path + self._written_arguments()
            _, args, kwargs = parse_call(text, field)
            if ">>" not in text and bool(kind(*args, **kwargs) == self):
                return text
        raise InputError(
            f"`{field}`: the arguments of {path} must be numbers, texts or lists of them, so that a text "
            "can make the object again"
        )


def describe(value: object) -> str:
    """Return the text of a part, and the repr of any other object, for an error."""
    return str(value) if isinstance(value, Written) else show(value, 40)


@dataclass(frozen=True)
class Registry(Generic[P]):
    """The parts of one kind, by name; `field` is the field of Config that names a part of this kind."""

    field: str
    kind: type[P]
    entries: Mapping[str, Callable[..., P]]

    def examples(self) -> list[str]:
        """Return example texts for every part, which `cfedavg parts` shows."""
        found = [(name, getattr(entry, "examples", ())) for name, entry in self.entries.items()]
        return [text for name, texts in found for text in texts or (name,)]

    def parse(self, text: str, *, trust: bool = True, own: Collection[type[P]] = ()) -> P:
        """Return the part that a text without `>>` names.

        A text may name any module, which is then imported. Give `trust=False` for a text from somebody else:
        it may then name only registered parts and the classes in `own`, and nothing is imported.
        """
        (part,) = self.parse_chain(text, longest=1, trust=trust, own=own)
        return part

    def parse_chain(
        self, text: str, *, longest: int, trust: bool = True, own: Collection[type[P]] = ()
    ) -> list[P]:
        """Return the parts of a text `name(...) >> name(...)`, which may have at most `longest` names.

        `trust` and `own` are as in `parse`.
        """
        table = {part.written_name(): part for part in own} | dict(self.entries)
        _check_length(text, self.field)
        pieces = [piece.strip() for piece in text.split(">>")]
        if len(pieces) > longest:
            most = "one name, without >>" if longest == 1 else f"at most {longest} names, joined by >>"
            raise InputError(f"`{self.field}` must have {most}, got {text!r}")
        parts = [build(piece, table, self.kind, self.field, trust=trust) for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            if not is_dataclass(part):
                raise InputError(
                    f"`{self.field}`: {piece!r} must be a frozen dataclass; write @dataclass(frozen=True) "
                    "above the class"
                )
        return parts


def argument(
    rule: str, holds: Callable[[Any], bool], default: Any = MISSING, *, integer: bool = False
) -> Any:
    """Return a dataclass field for an argument of a part; `check_argument` checks the given values.

    The default is not checked, so it may be None.
    """
    known = {"rule": rule, "holds": holds, "integer": integer}
    return field(default=default, metadata={"argument": known})


def check_argument(
    name: str, value: object, rule: str, holds: Callable[[Any], bool], *, integer: bool = False
) -> None:
    """Raise InputError unless `value` is a number for which `holds` returns True.

    With `integer`, the number must be an integer. `rule` says in words what `holds` checks.

    >>> check_argument("decay", 2, "above 0 and at most 1", lambda decay: 0 < decay <= 1)
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: decay must be above 0 and at most 1, got 2
    """
    is_number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not (is_number and holds(value)):
        raise InputError(f"{name} must be {'a whole number ' * integer}{rule}, got {show(value, 40)}")


def check_truth(name: str, value: object) -> None:
    """Raise InputError if `value`, the argument `name` of a part, is not a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {show(value, 40)}")


_CALL = re.compile(r"^\s*([A-Za-z_][\w.]*(?::\w+)?)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_WORDS = {"true": True, "false": False}
_LONGEST = 1000  # the most characters of a text; a far longer text would exhaust the parser


def _check_length(text: str, field: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"`{field}` must be text, got {show(text)}")
    if len(text) > _LONGEST:
        raise InputError(f"`{field}`: the text must have at most {_LONGEST:,} characters, got {len(text):,}")


def parse_call(text: str, field: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name and the arguments in a text; `field` names the text in an error.

    >>> parse_call("topk(0.99, per_tensor=true)", "compressor")
    ('topk', [0.99], {'per_tensor': True})
    """
    _check_length(text, field)
    match = _CALL.match(text)
    if not match:
        raise InputError(f"`{field}` must be of the form name or name(arguments), got {text.strip()!r}")
    name, inside = match[1], match[2] or ""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError  # f(1)(2) is a call too, but not of a name
        names = [keyword.arg for keyword in call.keywords]
        if None in names or len(set(names)) < len(names):
            raise ValueError  # f(**x), or a name given twice
        args = [_literal(node) for node in call.args]
        kwargs = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise InputError(
            f"`{field}`: arguments must be like 0.99 or block=256, got {inside!r} in {text.strip()!r}"
        ) from None
    return name, args, kwargs


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    return ast.literal_eval(node)


def build(text: str, table: Mapping[str, Any], kind: type, field: str, *, trust: bool) -> Any:
    """Call the entry of `table` that `text` names, with the arguments in `text`; return the result.

    With `trust`, the text may also be `module:Class(...)`, a user's subclass of `kind`, which is imported.
    Without `trust`, nothing is imported: the text may come from somebody else.

    >>> build("complex(1, imag=2)", {"complex": complex}, complex, "number", trust=False)
    (1+2j)
    """
    name, args, kwargs = parse_call(text, field)
    if name in table:
        factory = table[name]
    elif ":" in name and trust:
        factory = load(name, field)
        if not (isinstance(factory, type) and issubclass(factory, kind)):
            raise InputError(f"`{field}`: {name!r} must be a subclass of {kind.__module__}.{kind.__name__}")
    else:
        what = "this text may not import a module:" if ":" in name else "unknown name"
        raise InputError(f"`{field}`: {what} {name!r}; there are {', '.join(sorted(table))}")
    try:
        return factory(*args, **kwargs)
    except InputError as error:
        raise InputError(f"`{field}`: {text.strip()}: {error}") from None
    except TypeError as error:
        what = re.sub(r"^[\w.<>]+\(\) ", "", str(error))  # without the name of the class or function
        raise InputError(f"`{field}`: {text.strip()} has the wrong arguments ({what})") from None


def load(path: str, field: str) -> Any:
    """Return the object that `package.module:name` names, after importing the module.

    Call this only if the text is trusted.
    """
    if not _PATH.fullmatch(path):  # a remark in brackets, for example: no file of such a name may run
        raise InputError(f"`{field}` must be of the form package.module:name, got {path[:80]!r}")
    module, _, name = path.partition(":")
    try:
        with _current_folder_last(module.partition(".")[0]):
            found = importlib.import_module(module)
            is_there = hasattr(found, name)  # runs the module's __getattr__, which may raise
    except Exception as error:  # the user's module may raise anything when it is imported
        raise InputError(f"`{field}`: cannot import {module!r} of {path!r} ({error})") from None
    if not is_there:
        where = getattr(found, "__file__", None) or "built in"
        raise InputError(f"`{field}`: the module {module!r} ({where}) has no {name!r}")
    return getattr(found, name)


@contextmanager
def _current_folder_last(package: str) -> Iterator[None]:
    """Let imports in the `with` block also search the current folder, if the package is found nowhere else.

    The folder is searched last and only in the block: a file in it must never replace an installed package.
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
        is_range = ".." in text
        try:
            values = tuple(map(float, text.split(".." if is_range else ",")))
        except ValueError:
            values = ()
        if not values or (is_range and len(values) != 2):
            raise InputError(f"`{field}` must be a number, a range a..b or a list a,b,c, got {text!r}")
        if not all(math.isfinite(v) and (not integer or v == int(v)) for v in values):
            raise InputError(f"`{field}` must hold {'whole' if integer else 'finite'} numbers, got {text!r}")
        low, high = min(values), max(values)
        if is_range and values != (low, high):
            raise InputError(f"`{field}` must be a range low..high, got {text!r}; write {low:g}..{high:g}")
        return cls(low, high, () if is_range or len(values) == 1 else values, integer)

    def mean(self) -> float:
        """Return the mean over the clients; for a range, the middle of the range."""
        return sum(self.each) / len(self.each) if self.each else (self.low + self.high) / 2

    def at(self, client: int, u: float) -> float:
        """Return a client's value; in a range, `u` from 0 (the low end) to 1 (the high end) chooses it."""
        if self.each:
            return self.each[client]
        if self.integer:
            return self.low + math.floor(u * (self.high - self.low + 1))
        return self.low + u * (self.high - self.low)
