"""How large an update may be if nobody says so: so many times the median of those that went into the model.

It is no defence against clients who conspire, but one that sends 1e20 must not ruin a model. Honest clients
differ: by their local steps, by their data, by what their residuals have gathered; a hundredfold is beyond
that. Whoever is above it is told the bound, and sends the rest later, so that nobody is locked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

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


def remembered(new: Iterable[float], before: Sequence[float]) -> list[float]:
    """The norms of the last updates, all of a round at least; updates of zero say nothing."""
    kept = [norm for norm in new if norm > 0]
    return [*kept, *before][: max(WINDOW, len(kept))]
