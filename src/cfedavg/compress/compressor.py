"""Compressors: a selector chooses the coordinates to send, and a quantiser encodes their values.

    TopK(0.99) >> BF16()          parse("topk(0.99) >> bf16")

Definition 1 of the paper: a compressor C has the SNR gamma >= 1 if E|C(p) - p|^2 <= |p|^2 / gamma for
all p. A selector of coordinates is a projection: it keeps a value as it is, or drops the value. So the
dropped values are orthogonal to the error of the quantiser, and the SNRs of selector and quantiser compose:

    1/gamma = 1/gamma_s + 1/gamma_q - 1/(gamma_s * gamma_q).

`lowrank` and `eden` send coordinates in another basis. They allow only quantisers for which this holds too.

Selector and quantiser work on a block of n clients at once: p has shape (n, d), a vector of length d for each
client, as a NumPy array or a torch tensor. Sums are in float64 and in a fixed order. So the result is the
same, bit for bit, for a block or single vectors, for NumPy or torch, and on a CPU or a GPU.
docs/compressors.md shows how to write your own selector or quantiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, NoReturn

import numpy as np

from cfedavg.compress.blocks import offsets_of
from cfedavg.core import arrays
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, dtype_of, module_of, place
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.core.parts import Part, Written, describe
from cfedavg.core.payload import Floats, Levels, Mask, Payload

FLOATS = {"float32": "fp32", "float64": "fp64"}  # the dtype of an array, as a payload names it


class Stage(Part):
    """The base class of selectors and quantisers, the two stages of a compressor."""

    chosen_by: ClassVar[tuple[str, ...]] = ("compressor", "compressor_down")
    rounds_values: ClassVar[bool] = False  # whether the stage changes float32 values that it keeps

    @property
    def summary(self) -> str:
        """What the stage does, in a sentence."""
        return (self.__doc__ or "").strip().split("\n")[0]

    def __rrshift__(self, before: object) -> NoReturn:  # of a text or a class
        raise _order_error(before, self)


def _order_error(first: object, second: object) -> InputError:
    """Return the error that `first >> second` is no compressor."""
    return InputError(
        "a compressor must be selector >> quantiser, as in TopK(0.99) >> BF16(), got "
        f"{describe(first)} >> {describe(second)}"
    )


class Selection(NamedTuple):
    """The coordinates and values that a selector keeps, for a block of clients; fields are as in Payload."""

    offsets: Array
    indices: Array | None
    values: Array | Levels  # Levels if the selector quantises too; no quantiser may then follow
    mask: Mask | None = None
    basis: Rotation | Factors | None = None


class Selector(Stage):
    """The base class of selectors, which choose coordinates. A subclass must define `keep` and `gamma`."""

    quantisers: ClassVar[tuple[str, ...] | None] = None  # names of those that may follow; None: all

    @property
    def needs_update(self) -> bool:
        """Whether the choice depends on the size of the update, as in topk(hold=5)."""
        return False

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        """Return booleans of the shape of p, true at the coordinates that are kept in round t.

        p has shape (n, d): a vector of length d for each of n clients. Random choices of a client must be
        drawn from its key.
        """
        raise NotImplementedError

    def gamma(self, layout: Layout) -> float:
        """Return the SNR gamma (Definition 1) that the selector guarantees in every round."""
        raise NotImplementedError

    def most(self, layout: Layout) -> int:
        """Return the largest number of values that one client can send."""
        return layout.d

    def denser(self, times: float) -> Selector:
        """Return the selector that sends `times` as many values, at most all; self if it cannot."""
        return self

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        """Return the coordinates and values of p that `keep` chooses; raise NotFinite if p has NaN or Inf.

        `g2` holds the squared norms of the updates; it is given only if `needs_update`.
        """
        check_finite(p)
        return select_where(p, self.keep(p, keys, layout, t))

    def __rshift__(self, quantiser: Quantiser) -> Compressor:
        return Compressor(self, quantiser)


class Quantiser(Stage):
    """The base class of quantisers, which encode values. A subclass must define `quantise` and `gamma`."""

    rounds_values: ClassVar[bool] = True

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        """Return the values of a block of clients, encoded.

        The values of client c are values[offsets[c]:offsets[c+1]]; its random choices are drawn from keys[c].
        """
        raise NotImplementedError

    def gamma(self, n: int) -> float:
        """Return the SNR gamma (Definition 1) that the quantiser guarantees if a client sends n values."""
        raise NotImplementedError

    def __rshift__(self, following: object) -> NoReturn:
        raise _order_error(self, following)


@dataclass(frozen=True)
class Compressor(Written):
    """A selector followed by a quantiser; if `quantiser` is None, values are sent as float32 or float64."""

    chosen_by: ClassVar[tuple[str, ...]] = Stage.chosen_by
    selector: Selector
    quantiser: Quantiser | None = None

    def __post_init__(self) -> None:
        is_quantiser = self.quantiser is None or isinstance(self.quantiser, Quantiser)
        if not (isinstance(self.selector, Selector) and is_quantiser):
            raise _order_error(self.selector, self.quantiser)
        allowed = self.selector.quantisers
        if self.quantiser is not None and allowed is not None and self.quantiser.name not in allowed:
            raise InputError(
                f"{self.selector} must be followed by {' or '.join(allowed) or 'no quantiser'}, "
                f"got {self.selector} >> {self.quantiser}"
            )

    def __str__(self) -> str:
        return " >> ".join(map(str, self.stages))

    def to_text(self, field: str) -> str:
        return " >> ".join(stage.to_text(field) for stage in self.stages)

    def compress(
        self, p: Array, key: int | Array, layout: Layout | None = None, t: int = 0, g2: Array | None = None
    ) -> Payload:
        """Return C(p), the payload of p in round t.

        p has shape (d,) for one client with one key, or (n, d) for a block of n clients with n keys. Random
        draws depend on the key. Without a layout, a vector counts as one tensor. `g2` holds the squared norms
        of the clients' updates, which `topk(hold=5)` needs; without it, p counts as the update.
        """
        block = p[None] if p.ndim == 1 else p
        keys = np.array([keyed.signed(key)]) if isinstance(key, int) else key.reshape(-1)
        if len(keys) != len(block):
            raise InputError(
                f"`key` must hold one key for each of the {len(block)} vectors, got {len(keys)} keys"
            )
        keys = place(keys, p) if isinstance(keys, np.ndarray) else keys.to(p.device)
        layout = layout or Layout.flat(block.shape[1])
        given = {"g2": g2} if self.selector.needs_update else {}
        found = self.selector.select(block, keyed.derive(keys, Purpose.SELECT), layout, t, **given)
        values = self._encode(found, keyed.derive(keys, Purpose.ROUND))
        return Payload(block.shape[1], found.offsets, found.indices, values, found.mask, found.basis)

    def _encode(self, found: Selection, keys: Array) -> Floats | Levels:
        """Return the values that the selector found, as a payload holds them."""
        if isinstance(found.values, Levels):
            return found.values
        if self.quantiser is not None:
            return self.quantiser.quantise(found.values, found.offsets, keys)
        if (dtype := dtype_of(found.values)) not in FLOATS:
            raise InputError(f"`p` of dtype {found.values.dtype} needs a quantiser, as in {self} >> bf16")
        return Floats(found.values, FLOATS[dtype])

    def gamma(self, layout: Layout) -> float:
        """Return the SNR that selector and quantiser together guarantee, if no value underflows."""
        lost = 1 / self.selector.gamma(layout)
        if self.quantiser is not None:
            rounding = 1 / self.quantiser.gamma(self.selector.most(layout))
            lost = lost + rounding - lost * rounding
        return 1 / lost if lost else math.inf

    def denser(self, times: float) -> Compressor:
        """Return the compressor that sends `times` as many coordinates, at most all of them.

        It is equal to this one if its selector cannot send more.

        >>> from cfedavg.compress import parse
        >>> str(parse("topk(0.99) >> bf16").denser(4)), str(parse("sign").denser(4))
        ('topk(0.96) >> bf16', 'none >> sign')
        """
        return self if times == 1 else replace(self, selector=self.selector.denser(times))

    @property
    def rounds_values(self) -> bool:
        """Whether a stage changes float32 values by rounding them."""
        return any(stage.rounds_values for stage in self.stages)

    @property
    def stages(self) -> list[Stage]:
        """The selector, and the quantiser if there is one."""
        return [self.selector] if self.quantiser is None else [self.selector, self.quantiser]


def select_where(p: Array, keep: Array) -> Selection:
    """Return the selection of the coordinates at which the booleans `keep` are true."""
    return Selection(offsets_of(keep.sum(-1)), arrays.columns(keep), p[keep])


def check_finite(p: Array) -> None:
    """Raise NotFinite if p, of shape (n, d), holds NaN or Inf; the error lists the rows that do."""
    # Looking only at the minimum and maximum is thirty times as fast on a CPU as looking at each number.
    if math.prod(p.shape) and not all(map(math.isfinite, arrays.extremes(p))):
        rows = module_of(p).isfinite(p).all(-1).tolist()
        raise NotFinite([row for row, finite in enumerate(rows) if not finite])
