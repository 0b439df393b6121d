"""How large an update may be if nobody says so: so many times the median of those that went into the model.

It is no defence against clients who conspire, but one that sends 1e20 must not ruin a model. Honest clients
differ: by their local steps, by their data, by what their residuals have gathered; a hundredfold is beyond
that. Whoever is above it is told the bound, and sends the rest later, so that nobody is locked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

MULTIPLE = 100.0
ENOUGH = 3  # of fewer, the median may be the one that is wrong
WINDOW = 100  # so many updates are remembered: a client that is alone for a while cannot raise the bound
LARGEST = 1e15  # in any case: its square, which Adam and the like take, is far from float32's end


def bound(norms: Sequence[float]) -> float:
    """The largest norm that is taken after updates of these norms.

    >>> bound([1.0, 2.0, 1e20])
    200.0
    """
    return min(LARGEST, MULTIPLE * median(norms)) if len(norms) >= ENOUGH else LARGEST


def capped(claims: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return what clients claim (local steps, examples), each at most MULTIPLE times the median.

    The median is that of these claims and of those before, the lower one of two: a single client's claim,
    however large, is no measure of itself.

    >>> capped([10.0, 2.0**53], [])
    [10.0, 1000.0]
    """
    known = [claim for claim in [*claims, *before] if claim > 0]
    most = MULTIPLE * median_low(known) if known else 0.0
    return [min(claim, most) for claim in claims]


def remembered(new: Iterable[float], before: Sequence[float]) -> list[float]:
    """Return the last norms, or claims, all of a round at least; a zero says nothing."""
    kept = [norm for norm in new if norm > 0]
    return [*kept, *before][: max(WINDOW, len(kept))]


@dataclass(frozen=True)
class Claims:
    """What clients say of their work: local steps, and examples they have; 0 for what one does not say."""

    steps: Sequence[float] = ()
    samples: Sequence[float] = ()

    def cap(self, before: Claims) -> Claims:
        """Return these claims, capped by the medians of them and of those before."""
        return Claims(capped(self.steps, before.steps), capped(self.samples, before.samples))

    def join(self, before: Claims) -> Claims:
        """Return the last claims: these, and then those before."""
        return Claims(remembered(self.steps, before.steps), remembered(self.samples, before.samples))
