"""Draw who imports whom: `python -m scripts.draw_rooms` writes docs/images/rooms.svg.

The picture is made of the table that tests/test_house.py enforces. An arrow that follows from others is left
out: `cli` may import `core`, which is plain since everything may.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import statistics

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path
from tests.test_house import MAY_IMPORT

Stop = tuple[str, int]  # a room, or an arrow that passes, and the layer
PASSAGE = 0.4  # the width that a passing arrow gets; a room's is 1
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "rooms.svg"


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
        for used in sorted(uses)
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


def paths() -> list[list[Stop]]:
    """Return the stops of each arrow, one in each layer, so that it passes between the rooms of a layer."""
    level = {room: i for i, row in enumerate(layers()) for room in row}
    return [
        [(room, level[room]), *((f"{room} {used}", i) for i in range(level[room] - 1, level[used], -1)),
         (used, level[used])]
        for room, used in arrows()
    ]  # fmt: skip


def places() -> dict[Stop, float]:
    """Return how far right each stop is: as near to its neighbours as the order in its layer allows."""
    near: dict[Stop, list[Stop]] = {(room, i): [] for i, row in enumerate(layers()) for room in row}
    for path in paths():
        for stop, below in itertools.pairwise(path):
            near.setdefault(stop, []).append(below)
            near.setdefault(below, []).append(stop)
    x = dict.fromkeys(near, 0.5)
    rows = [[stop for stop in near if stop[1] == i] for i in range(len(layers()))]
    for row in [*reversed(rows), *rows] * 2:
        row.sort(key=lambda stop: statistics.fmean(x[other] for other in near[stop]))
        widths = [1.0 if name in MAY_IMPORT else PASSAGE for name, _ in row]
        ends = itertools.accumulate(widths)
        x |= {
            stop: (end - width / 2) / sum(widths) for stop, width, end in zip(row, widths, ends, strict=True)
        }
    return x


def draw_arrow(axes: Axes, points: list[tuple[float, float]]) -> None:
    """Draw one arrow through its points, upright at each of them."""
    (x, y), *others = points
    places, codes = [(x, y - 0.2)], [Path.MOVETO]
    for number, (to_x, to_y) in enumerate(others, 1):
        end = to_y + 0.2 * (number == len(others))
        places += [(x, places[-1][1] - 0.5), (to_x, end + 0.5), (to_x, end)]
        codes += [Path.CURVE4] * 3
        x = to_x
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "color": "0.55", "linewidth": 0.9}
    axes.add_patch(FancyArrowPatch(path=Path(places, codes), shrinkA=0, shrinkB=0, **look))


def main() -> None:
    """Write the picture."""
    figure, x = Figure(figsize=(9, 6.5)), places()
    axes = figure.subplots()
    for path in paths():
        draw_arrow(axes, [(x[stop], stop[1]) for stop in path])
    box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
    for level, row in enumerate(layers()):
        for room in row:
            axes.text(x[room, level], level, room, ha="center", va="center", fontsize=11, bbox=box)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.4, len(layers()) - 0.6))
    axes.axis("off")
    with matplotlib.rc_context({"svg.hashsalt": "rooms", "svg.fonttype": "none"}):
        figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Description": fingerprint()})


if __name__ == "__main__":
    main()
