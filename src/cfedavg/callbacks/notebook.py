"""The live lines of runs in a Jupyter notebook, without widgets: one output of the cell, which is replaced.

rich would need ipywidgets, whose last state a notebook that is saved or converted to HTML does not show.
"""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from rich.progress import TaskID

EVERY = 0.2  # seconds between two versions of the output


def in_notebook() -> bool:
    """Return whether the process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # no import: a kernel has imported it
    shell = ipython and ipython.get_ipython()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # the latter in Colab


def is_watched() -> bool:
    """Return whether somebody sees what the process writes: in a notebook, or in the terminal of stderr."""
    return in_notebook() or bool(sys.stderr and sys.stderr.isatty())


class NotebookLines:
    """Lines with a bar, one for each run; the methods are those of rich's Progress that a Board calls."""

    def __init__(self) -> None:
        self._lines: dict[TaskID, dict[str, Any]] = {}
        self._handle: Any = None
        self._shown_at, self._count = 0.0, 0

    def start(self) -> None:
        """Begin the output."""
        from IPython.display import display

        show: Any = display
        self._handle = show(self._render(), raw=True, display_id=True)

    def stop(self) -> None:
        """Show the last state of all lines."""
        if self._handle:
            self._handle.update(self._render(), raw=True)

    def add_task(self, title: str, *, total: int, line: str) -> TaskID:
        """Add a line and return its number."""
        self._count += 1
        bar = TaskID(self._count)
        self._lines[bar] = {"title": title, "total": total, "completed": 0, "line": line}
        self._refresh()
        return bar

    def remove_task(self, bar: TaskID) -> None:
        """Remove a line."""
        del self._lines[bar]
        self._refresh()

    def update(self, bar: TaskID, **fields: Any) -> None:
        """Change the fields `completed` and `line` of a line."""
        self._lines[bar] |= fields
        self._refresh()

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._handle and now - self._shown_at >= EVERY:
            self._shown_at = now
            self._handle.update(self._render(), raw=True)

    def _render(self) -> dict[str, str]:
        """Return the lines as HTML, and as plain text for a front end that shows none."""
        texts, rows = [], []
        for each in self._lines.values():
            text = f"{each['completed']}/{each['total']}  {each['line']}"
            texts.append(f"{each['title']}  {text}")
            bar = f'<progress value="{each["completed"]}" max="{each["total"]}"></progress>'
            rows.append(f"{html.escape(each['title'])} {bar} {html.escape(text)}")
        return {"text/plain": "\n".join(texts), "text/html": f"<pre>{'<br>'.join(rows)}</pre>"}
