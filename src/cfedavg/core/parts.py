"""Parts: the pieces of the algorithm that a user exchanges by a text such as `topk(0.99) >> bf16`.

A part is a frozen dataclass whose fields are its arguments. It has no state of its own: what it remembers
goes into its functions and comes out of them. A Registry knows the parts of one kind by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar

from cfedavg.core.errors import InputError
from cfedavg.core.spec import build, split_chain

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


def first_sentence(thing: Any) -> str:
    """Return the first line of a docstring, for tables of parts."""
    return (thing.__doc__ or "").strip().split("\n")[0]
