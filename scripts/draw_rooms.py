"""Draw who imports whom: `python -m scripts.draw_rooms` writes docs/images/rooms.svg.

The picture is made of the table that tests/test_house.py enforces. An arrow that follows from others is left
out: `cli` may import `core`, which is plain since everything may.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from tests.test_house import MAY_IMPORT

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "rooms.svg"


def table() -> dict[str, set[str]]:
    """Return the rooms and what each may import, without the package's own version."""
    return {room: uses - {"__init__"} for room, uses in MAY_IMPORT.items()}


def fingerprint() -> str:
    """Return a hash of the table, which the picture carries."""
    text = json.dumps({room: sorted(uses) for room, uses in sorted(table().items())})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reach(room: str) -> set[str]:
    """Return all rooms that a room may import, through others too."""
    uses = table()[room]
    return uses.union(*map(reach, uses))


def arrows() -> list[tuple[str, str]]:
    """Return the pairs of importing and imported room that do not follow from others."""
    rooms = table()
    return [
        (room, used)
        for room, uses in rooms.items()
        for used in uses
        if not any(used in reach(other) for other in uses - {used})
    ]


def layers() -> list[list[str]]:
    """Return the rooms from the bottom to the top, each above all that it imports."""
    rooms, found, done = table(), list[list[str]](), set[str]()
    while len(done) < len(rooms):
        ready = sorted(room for room, uses in rooms.items() if room not in done and uses <= done)
        found.append(ready)
        done |= {*ready}
    return found


def places() -> dict[str, tuple[float, int]]:
    """Return where each room stands: in a layer, below the middle of the rooms that import it."""
    rows, found = layers(), dict[str, tuple[float, int]]()
    for level in reversed(range(len(rows))):
        above = {room: [found[by][0] for by, used in arrows() if used == room] for room in rows[level]}
        row = sorted(rows[level], key=lambda room: sum(above[room]) / max(1, len(above[room])))
        found |= {room: ((i + 0.5) / len(row), level) for i, room in enumerate(row)}
    return found


def main() -> None:
    """Write the picture."""
    figure, place = Figure(figsize=(9, 6.5)), places()
    axes = figure.subplots()
    for room, used in arrows():
        (x, y), (to_x, to_y) = place[room], place[used]
        curve = f"arc3,rad={0.12 * (y - to_y > 1) * (1 if to_x >= x else -1)}"
        look = {"arrowstyle": "-|>", "mutation_scale": 11, "color": "0.55", "linewidth": 0.9}
        axes.add_patch(
            FancyArrowPatch(
                (x, y - 0.2), (to_x, to_y + 0.2), connectionstyle=curve, shrinkA=0, shrinkB=0, **look
            )
        )
    box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
    for room, (x, y) in place.items():
        axes.text(x, y, room, ha="center", va="center", fontsize=11, bbox=box)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.4, len(layers()) - 0.6))
    axes.axis("off")
    with matplotlib.rc_context({"svg.hashsalt": "rooms", "svg.fonttype": "none"}):
        figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Description": fingerprint()})


if __name__ == "__main__":
    main()
