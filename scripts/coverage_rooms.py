"""The share of each room's statements that tests run: `python -m scripts.coverage_rooms coverage.json`.

`make coverage` writes that file. Code that numba or Triton compiles does not count as run: coverage sees
Python only.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def by_room(files: dict[str, dict[str, dict[str, int]]]) -> dict[str, tuple[int, int]]:
    """Return for each room, and for `all`, the statements and those that ran.

    >>> counted = {"summary": {"num_statements": 4, "covered_lines": 3}}
    >>> by_room({"src/cfedavg/wire/sets.py": counted, "src/cfedavg/task.py": counted})
    {'task': (4, 3), 'wire': (4, 3), 'all': (8, 6)}
    """
    statements, covered = Counter[str](), Counter[str]()
    for name, about in files.items():
        room = Path(name).parts[2].removesuffix(".py")
        statements[room] += about["summary"]["num_statements"]
        covered[room] += about["summary"]["covered_lines"]
    rooms = {room: (statements[room], covered[room]) for room in sorted(statements)}
    return {**rooms, "all": (statements.total(), covered.total())}


def table(rooms: dict[str, tuple[int, int]]) -> str:
    """Return a table in Markdown: room, statements, percent that ran."""
    lines = ["| room | statements | run by tests |", "|---|---|---|"]
    for room, (statements, covered) in rooms.items():
        if statements:
            lines.append(f"| `{room}` | {statements:,} | {100 * covered / statements:.1f}% |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(by_room(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"])))
