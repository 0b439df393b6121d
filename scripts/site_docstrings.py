"""An extension of griffe, which reads the docstrings for the site: examples with `>>>` become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

# Lines that begin with `>>>`, and the lines after them up to an empty one.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Put the examples of each docstring into a fence, as Markdown needs it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(text: str) -> str:
    """Return a docstring with its examples in fences.

    >>> fence_examples("Add.\\n\\n>>> 1 + 1\\n2\\n\\nThat is all.")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nThat is all.'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
