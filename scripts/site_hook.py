"""The hook of mkdocs.yml: adds the generated pages, and makes links work that leave the folder docs/.

A page of docs/ may link to any file of the repository, by a relative path, as a code host expects it. On the
site such a file becomes a page: a Markdown file as it is, any other file as code, a folder as its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from scripts import site_reference

ROOT = Path(__file__).parents[1]
# Pages of the site that are not in docs/. Their places on the site are those in the repository.
FRONT = "README.md"
OUTSIDE = (FRONT, "CONTRIBUTING.md", "CHANGELOG.md", "paper/cfedavg/README.md", "paper/cfedavg/claims.md")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
PICTURES = {".png", ".svg"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the files that pages link to."""
    for name in OUTSIDE:
        top = "---\nhide: [navigation]\n---\n\n" if name == FRONT else ""
        add(files, config, place(name), top + (ROOT / name).read_text())
    for name, text in site_reference.pages().items():
        add(files, config, name, text)
    for page in [*files.documentation_pages()]:
        for target in linked(page.content_string, page.src_uri):
            where = place(target)
            if where in files.src_uris or target.startswith("docs/"):
                continue  # mkdocs says if a file of docs/ is missing
            if Path(target).suffix in PICTURES:
                files.append(File.generated(config, where, abs_src_path=str(ROOT / target)))
            else:
                add(files, config, where, source_page(target))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page to what they mean on the site."""
    source = page.file.src_uri

    def rewrite(link: re.Match[str]) -> str:
        target = resolve(link[2], source)
        if target is None:
            return link[0]
        return link[1] + posixpath.relpath(place(target), posixpath.dirname(source) or ".") + link[3]

    return outside_code(markdown, lambda text: LINK.sub(rewrite, text))


def add(files: Files, config: Any, name: str, text: str) -> None:
    """Add a generated page."""
    files.append(File.generated(config, name, content=text))


def place(path: str) -> str:
    """Return where a file of the repository is on the site.

    >>> [place(path) for path in ("docs/wire.md", "README.md", "CHANGELOG.md", "src/cfedavg/task.py")]
    ['wire.md', 'index.md', 'CHANGELOG.md', 'source/src/cfedavg/task.py.md']
    """
    if path == FRONT:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in OUTSIDE or Path(path).suffix in PICTURES:
        return path
    return f"source/{path}.md"


def origin(page: str) -> str:
    """Return the repository's path of a page of the site: the inverse of `place`."""
    if page == "index.md":
        return FRONT
    return page if page in OUTSIDE else f"docs/{page}"


def resolve(target: str, page: str) -> str | None:
    """Return the repository's path of a link's target, or None if it is not a file of the repository."""
    if ":" in target or target.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin(page)), target))


def linked(markdown: str, page: str) -> list[str]:
    """Return the repository's paths of all files that a page links to."""
    targets = LINK.findall(FENCE.sub("", markdown))
    return [path for _, target, _ in targets if (path := resolve(target, page))]


def outside_code(markdown: str, change: Any) -> str:
    """Return a page with `change` applied to all that is not in a fenced code block."""
    parts, start = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*parts, change(markdown[start:])])


def source_page(path: str) -> str:
    """Return a page that shows a file as code, or all files of a folder; the search leaves it out."""
    whole = ROOT / path
    found = sorted(p for p in whole.rglob("*") if p.is_file()) if whole.is_dir() else [whole]
    shown = [f for f in found if "__pycache__" not in f.parts]
    parts = ["---\nsearch:\n  exclude: true\n---", f"# `{path}`"]
    for file in shown:
        parts += [f"## `{file.relative_to(whole)}`"] if whole.is_dir() else []
        parts += [code_block(file)]
    return "\n\n".join(parts) + "\n"


def code_block(file: Path) -> str:
    """Return a text file as a code block, and a sentence for any other file."""
    language = {".py": "python", ".toml": "toml", ".md": "markdown", ".diff": "diff"}.get(file.suffix, "text")
    try:
        return f"~~~~~{language}\n{file.read_text()}\n~~~~~"
    except UnicodeDecodeError:
        return f"{file.stat().st_size} bytes."
