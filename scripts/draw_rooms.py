"""Draw who imports whom: `python -m scripts.draw_rooms` writes docs/images/rooms.svg.

The picture is made of the table that tests/test_house.py enforces. An arrow that follows from others is left
out: `cli` may import `core`, which is plain since everything may.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch

from tests.test_house import MAY_IMPORT, SOURCE

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "rooms.svg"
WIDTH, HEIGHT = 2.6, 1.25  # of a place in the picture


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


def size(room: str) -> str:
    """Return how many modules and lines a room has."""
    path = SOURCE / room
    files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    lines = sum(file.read_text().count("\n") for file in files)
    return f"{len(files)} modules, {lines:,} lines" if len(files) > 1 else f"{lines:,} lines"


def about(room: str) -> str:
    """Return what a room says of itself: the first line of its docstring, up to the first full stop or colon."""
    path = SOURCE / room
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]


def main() -> None:
    """Write the picture."""
    plt.rcParams |= {"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.family": "sans-serif"}
    rows = layers()
    widest = max(map(len, rows))
    figure, axes = plt.subplots(figsize=(WIDTH * widest, HEIGHT * len(rows)))
    place = {
        room: ((widest - len(row)) / 2 + column, level)
        for level, row in enumerate(rows)
        for column, room in enumerate(row)
    }
    for room, used in arrows():
        (x, y), (to_x, to_y) = place[room], place[used]
        arrow = FancyArrowPatch((x, y - 0.27), (to_x, to_y + 0.27), arrowstyle="-|>", mutation_scale=10)
        arrow.set(color="0.6", linewidth=0.9, shrinkA=0, shrinkB=0)
        axes.add_patch(arrow)
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
        axes.text(x, y, f"$\\bf{{{room}}}$\n{size(room)}", ha="center", va="center", fontsize=9, bbox=box)
    axes.set(xlim=(-0.6, widest - 0.4), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Description": fingerprint()})


if __name__ == "__main__":
    main()
