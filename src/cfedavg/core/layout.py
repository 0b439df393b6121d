"""Layout: the map between a model's trainable parameters and one flat vector of length d."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The names, shapes and dtypes of the tensors that make up a flat vector, in order.

    >>> layout = Layout(("weight", "bias"), ((3, 2), (3,)), ("float32", "float32"))
    >>> layout.d, list(layout.slices())
    (9, [slice(0, 6, None), slice(6, 9, None)])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> Layout:
        """Return the layout of a torch module's trainable parameters; a shared parameter counts once."""
        pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(
            tuple(name for name, _ in pairs),
            tuple(tuple(p.shape) for _, p in pairs),
            tuple(str(p.dtype).removeprefix("torch.") for _, p in pairs),
        )

    @classmethod
    def flat(cls, d: int) -> Layout:
        """Return the layout of one unnamed tensor of d numbers, for a vector that belongs to no model."""
        return cls(("",), ((d,),), ("float32",))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def d(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    def slices(self) -> Iterator[slice]:
        """Yield, for each tensor, its slice of the flat vector."""
        start = 0
        for size in self.sizes:
            yield slice(start, start + size)
            start += size

    @cached_property
    def text(self) -> str:
        """The names, shapes and dtypes as a JSON text, which `from_text` reads.

        >>> Layout.from_text('[["w"], [[3, 2]], ["float32"]]').text
        '[["w"], [[3, 2]], ["float32"]]'
        """
        return json.dumps([self.names, self.shapes, self.dtypes])

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Return the layout in a JSON text from `Layout.text`; raise ValueError if the text is invalid."""
        names, shapes, dtypes = json.loads(text)
        layout = cls(tuple(names), tuple(map(tuple, shapes)), tuple(dtypes))
        numbers = [size for shape in layout.shapes for size in shape]
        texts = all(isinstance(text, str) for text in layout.names + layout.dtypes)
        integers = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        short = all(len(shape) <= 64 for shape in layout.shapes)  # torch and NumPy allow at most 64 axes
        if not len(names) == len(shapes) == len(dtypes) or not (texts and integers and short):
            raise ValueError(
                "a layout must list a name, a dtype and a shape for each tensor; a shape must be at most 64 "
                "whole numbers"
            )
        return layout

    def difference(self, other: Layout, alike: Callable[[str, str], bool] = operator.eq) -> str:
        """Return in words how `other` first differs from this layout, or "" if it does not differ.

        The order of the tensors does not matter. `alike` says whether two dtypes count as equal.

        >>> Layout(("w",), ((3, 2),), ("float32",)).difference(Layout.flat(6))
        "'w' is missing"
        """
        mine, others = (
            dict(zip(each.names, zip(each.shapes, each.dtypes, strict=True), strict=True))
            for each in (self, other)
        )
        if missing := [name for name in mine if name not in others]:
            return f"{missing[0]!r} is missing"
        if unknown := [name for name in others if name not in mine]:
            return f"{unknown[0]!r} is unexpected"
        for name, (shape, dtype) in mine.items():
            found, kind = others[name]
            if found != shape:
                return f"{name!r} is of shape {list(found)}, not {list(shape)}"
            if not alike(kind, dtype):
                return f"{name!r} is of {kind}, not {dtype}"
        return ""

    @cached_property
    def schema_hash(self) -> int:
        """The first 64 bits of the SHA-256 of `text`. Layouts with equal hashes are taken to be equal."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little")
