"""Lines of JSON that a bench writes one by one, so that another call goes on where one was cut off."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from cfedavg.core.files import make_folder, write_atomic

Line = dict[str, Any]


class Lines:
    """The lines of a file; without a file, the lines of this call."""

    def __init__(self, path: Path | None, minutes: float = math.inf) -> None:
        """Read the file; after so many minutes, no line is due any more."""
        self.path, self._until = path, time.monotonic() + 60 * minutes
        known = path is not None and path.exists()
        self.found: list[Line] = [json.loads(text) for text in path.read_text().splitlines()] if known else []

    def find(self, **entries: Any) -> Line | None:
        """Return the first line with these entries."""
        return next((line for line in self.found if entries.items() <= _plain(line).items()), None)

    def is_due(self, **entries: Any) -> bool:
        """Return whether the line with these entries is missing, and there is time to begin it."""
        return time.monotonic() < self._until and self.find(**entries) is None

    def add(self, line: Line, *hidden: str) -> None:
        """Write a line to the file, and print it without the entries `hidden`."""
        self.found.append(line)
        if self.path:
            make_folder(self.path.parent, "`out`")
            write_atomic(self.path, "".join(json.dumps(each) + "\n" for each in self.found).encode())
        print(json.dumps({name: value for name, value in line.items() if name not in hidden}), flush=True)


def _plain(line: Line) -> Line:
    """Return the entries that can be compared: numbers, texts and None."""
    return {name: value for name, value in line.items() if not isinstance(value, dict | list)}
