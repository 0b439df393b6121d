"""Sums over the rounds of a run, and the numbers of a row of metrics."""

from __future__ import annotations

from cfedavg.core.run_files import Record
from cfedavg.core.units import format_bytes


class Totals:
    """Adds up the bytes of rows of metrics, up and down, and the part of them that is first downloads.

    >>> totals = Totals()
    >>> totals.add({"uplink_bytes": 4, "downlink_bytes": 1})
    >>> totals.columns()
    {'cumulative_uplink_bytes': 4, 'cumulative_downlink_bytes': 1, 'cumulative_total_bytes': 5}
    """

    def __init__(self) -> None:
        self.up, self.down, self.first = 0, 0, 0

    def add(self, row: Record) -> None:
        """Add the bytes of a row."""
        self.up += row["uplink_bytes"]
        self.down += row["downlink_bytes"]
        self.first += row.get("first_download_bytes") or 0

    @property
    def total(self) -> int:
        """The bytes of both directions."""
        return self.up + self.down

    def columns(self) -> Record:
        """Return the sums so far as columns of metrics."""
        sums = {"uplink": self.up, "downlink": self.down, "total": self.total}
        return {f"cumulative_{name}_bytes": value for name, value in sums.items()}

    def __str__(self) -> str:
        up, down, total, first = map(format_bytes, (self.up, self.down, self.total, self.first))
        downloads = f", of which {first} are the clients' first downloads" if self.first else ""
        return f"sent {up} up and {down} down, {total} in total{downloads}"


def find_metric(row: Record) -> str | None:
    """Return the name of the metric of a row that tells most: of the test if there is one, not the loss.

    >>> find_metric({"train_loss": 2.0, "test_loss": 1.5, "test_mse": 0.5})
    'test_mse'
    """
    own = [name for name in row if name.startswith("test_") and name != "test_loss"]
    order = ("test_accuracy", *own, "test_loss", "train_loss")
    return next((name for name in order if row.get(name) is not None), None)


def numbers_of(row: Record) -> dict[str, float]:
    """Return the numbers of a row of metrics by name, without the round; a dict becomes names with dots.

    >>> numbers_of({"round": 3, "clients": 4, "snr_min": None, "rate_conditions": {"eta": {"ratio": 0.5}}})
    {'clients': 4, 'rate_conditions.eta.ratio': 0.5}
    """
    found, left = dict[str, float](), [("", row)]
    while left:
        prefix, table = left.pop()
        for name, value in table.items():
            if isinstance(value, dict):
                left.append((f"{prefix}{name}.", value))
            elif type(value) in (int, float) and f"{prefix}{name}" != "round":
                found[f"{prefix}{name}"] = value
    return found
