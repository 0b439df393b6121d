"""The guard's table in docs/parts.md, from the sealed cells in results/guard.

cfedavg sweep bench/guard.toml --precision bf16 --data-dir DIR --out runs/guard
python -m bench.guard_table
"""

from __future__ import annotations

import statistics
from pathlib import Path

from cfedavg.core.units import format_bytes
from cfedavg.sweep import read_cells

RESULTS = Path(__file__).parents[1] / "results" / "guard"
LINES = {
    "none": "`--compressor none`",
    "warn": '`--compressor "rd(0.99)" --guard warn`',
    "adapt": '`--compressor "rd(0.99)" --guard adapt`',
}
LAST = 5  # evaluations


def table() -> str:
    """Return a Markdown table: the accuracy of the last evaluations, and what the clients have sent."""
    cells = read_cells(RESULTS)
    rows = ["| | mean of the last 5 evaluations | round 100 | up |", "|---|---|---|---|"]
    for name, label in LINES.items():
        values = cells[f"mnist-{name}-seed0"].values
        found = [100 * accuracy for accuracy in values["test_accuracy"] if accuracy is not None]
        sent = format_bytes(sum(values["uplink_bytes"]))
        rows.append(f"| {label} | {statistics.fmean(found[-LAST:]):.1f} | {found[-1]:.1f} | {sent} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table())
