"""The README as a package index shows it: links and pictures that lead into the repository, or none.

An index shows a page without the files beside it. A link such as `docs/wire.md` becomes the address of that
file in the repository, at the tag of this version, if pyproject.toml names the repository:

    [project.urls]
    Repository = "https://..."

Without that line, pictures are left out and links become plain text, so that nothing on the page is broken.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# `[text](target)` and `![text](target)`, unless the target is an address of its own.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)\s]+)\)")


def describe(root: Path = ROOT) -> str:
    """Return the text of the README in the folder `root` for a package index."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    start = (root / "src/cfedavg/__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', start, re.MULTILINE)[0]
    readme = (root / "README.md").read_text(encoding="utf-8")
    return point_links(readme, project.get("urls", {}).get("Repository"), f"v{version}")


def point_links(text: str, repository: str | None, tag: str) -> str:
    """Return Markdown whose relative links and pictures lead to files of the repository at a tag.

    >>> point_links("See [the wire](docs/wire.md#sets).", "https://host/we/it", "v1")
    'See [the wire](https://host/we/it/blob/v1/docs/wire.md#sets).'
    >>> point_links("![A curve](a.png)", "https://host/we/it", "v1")
    '![A curve](https://host/we/it/raw/v1/a.png)'
    >>> point_links("![A curve](a.png)\\n\\nSee [the wire](docs/wire.md).\\n", None, "v1")
    'See the wire.\\n'
    """

    def point(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if repository is None:
            return "" if mark else words
        address = f"{repository.rstrip('/')}/{'raw' if mark else 'blob'}/{tag}/{target}"
        return f"{mark}[{words}]({address})"

    parts, at = [], 0
    for fence in _FENCE.finditer(text):  # code stays as it is
        parts += [_LINK.sub(point, text[at : fence.start()]), fence[0]]
        at = fence.end()
    parts.append(_LINK.sub(point, text[at:]))
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).lstrip("\n")
