"""One line of metrics a round: what the clients report, added up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What one client did in a round. Norms are squared; `noise2` is |p - C(p)|^2."""

    client: int
    K: int
    loss: float
    g2: float
    p2: float
    noise2: float
    coordinates: int
    up_bytes: int
    lost: bool

    @property
    def snr(self) -> float:
        """The measured signal-to-noise ratio |p|^2 / |p - C(p)|^2."""
        return self.p2 / self.noise2 if self.noise2 else math.inf


def summarise(replies: Sequence[Reply], abstained: int, d: int, mean_g2: float) -> Record:
    """The client columns of a line: totals over the round's clients. `mean_g2` is |mean g_i|^2.

    A client with K_i = 0 abstains: it counts among the clients and in the local steps, and sends nothing.
    """
    n = len(replies)
    steps = [r.K for r in replies] + [0] * abstained
    snr = [r.snr for r in replies]
    sent = sum(r.coordinates for r in replies)
    delta_norm2 = math.fsum(r.g2 for r in replies) / n if n else None
    return {
        "train_loss": math.fsum(r.loss * r.K for r in replies) / sum(steps) if n else None,
        "uplink_bytes": sum(r.up_bytes for r in replies),
        "coordinates_sent": sent,
        "model_sizes_sent": sent / (d * len(steps)),
        "delta_norm2": delta_norm2,
        "delta_norm": math.fsum(math.sqrt(r.g2) for r in replies) / n if n else None,
        "alpha": finite(delta_norm2 / mean_g2) if delta_norm2 and mean_g2 else None,
        "snr_min": finite(min(snr, default=math.inf)),
        "snr_mean": finite(math.fsum(each / n for each in snr) if n else math.inf),
        "local_steps_min": min(steps),
        "local_steps_mean": sum(steps) / len(steps),
        "local_steps_max": max(steps),
        "clients": len(steps),
        "lost": sum(r.lost for r in replies),
    }


def residual_norms(norms2: Iterable[float], m: int) -> Record:
    """The residual columns: means over all m clients, of whom those without a residual have none.

    >>> residual_norms([4.0, 16.0], m=4)
    {'error_norm2': 5.0, 'error_norm': 1.5}
    """
    known = list(norms2)
    return {
        "error_norm2": math.fsum(known) / m,
        "error_norm": math.fsum(map(math.sqrt, known)) / m,
    }


def is_number(value: Any) -> bool:
    """Whether a value of a row, as JSON gives it, can be added and drawn; null stands for not known.

    >>> [is_number(value) for value in (1, 0.5, None, True, "1", 10**400)]
    [True, True, True, False, False, False]
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000  # a larger one has no float
    return value is None or isinstance(value, float)


def finite(value: float) -> float | None:
    """JSON has no infinity: it is written as null."""
    return value if math.isfinite(value) else None
