"""Layout: the map between a model's trainable parameters and one flat vector of length d."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes, in order, of the tensors that make up a flat vector.

    >>> layout = Layout(("weight", "bias"), ((3, 2), (3,)), ("float32", "float32"))
    >>> layout.d, list(layout.slices())
    (9, [slice(0, 6, None), slice(6, 9, None)])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> Layout:
        """The trainable parameters of a torch module; a tied one counts once, a frozen one not at all."""
        pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(
            tuple(name for name, _ in pairs),
            tuple(tuple(p.shape) for _, p in pairs),
            tuple(str(p.dtype).removeprefix("torch.") for _, p in pairs),
        )

    @classmethod
    def flat(cls, d: int) -> Layout:
        """One unnamed tensor of d numbers, for vectors that come from no model."""
        return cls(("",), ((d,),), ("float32",))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def d(self) -> int:
        return sum(self.sizes)

    def slices(self) -> Iterator[slice]:
        """Where each tensor lies in the flat vector."""
        start = 0
        for size in self.sizes:
            yield slice(start, start + size)
            start += size

    @cached_property
    def schema_hash(self) -> int:
        """64 bits of SHA-256 over names, shapes and dtypes: two models with the same hash can talk."""
        text = json.dumps([self.names, self.shapes, self.dtypes])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
