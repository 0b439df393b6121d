"""The hook of mkdocs.yml: adds the generated pages, and makes links work that leave the folder docs/.

A page of docs/ may link to any file of the repository, by a relative path, as a code host expects it. On the
site such a file becomes a page: a Markdown file or a notebook as it is, a file from which a page of the
reference is generated as that page, any other file as code, and a folder as its files.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from scripts import site_reference

ROOT = Path(__file__).parents[1]
# The pages of the site that are not in docs/, by their file in the repository.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "paper/README.md": "paper/index.md",
    "paper/cfedavg/README.md": "paper/cfedavg/index.md",
    "paper/cfedavg/claims.md": "paper/cfedavg/claims.md",
    "paper/cfedavg/decisions.md": "paper/cfedavg/decisions.md",
    "paper/niid_bench/README.md": "paper/niid_bench/index.md",
    "paper/niid_bench/table.md": "paper/niid_bench/table.md",
    "paper/shakespeare/README.md": "paper/shakespeare/index.md",
    "paper/shakespeare/table.md": "paper/shakespeare/table.md",
    "paper/feedback/README.md": "paper/feedback/index.md",
    "paper/feedback/results/cpu/page.md": "paper/feedback/results/cpu/page.md",
    "examples/notebook.ipynb": "start/notebook.md",
}
# The files from which the pages of the reference are generated.
GENERATED = {
    "src/cfedavg/cli/commands.py": ("reference/commands.md", site_reference.commands_page),
    "src/cfedavg/core/config.py": ("reference/options.md", site_reference.options_page),
    "src/cfedavg/__init__.py": ("reference/python.md", site_reference.python_page),
    "src/cfedavg": ("reference/packages.md", site_reference.packages_page),
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
PICTURES = {".png", ".svg"}
HISTORY = {"decisions.md", "changelog.md", "paper/cfedavg/decisions.md"}  # the search shows them last
BLOCK = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"--\w[\w-]*")
QUANTITY = re.compile(r"(?<=\d) (?=(?:[kMG]?B|[kMG]?bit(?:/s)?|[mu]?s|min|h)\b)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the files that pages link to."""
    for name, where in OUTSIDE.items():
        add(files, config, where, outside_page(ROOT / name))
    for where, make in GENERATED.values():
        add(files, config, where, make())
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
    if source in HISTORY:
        page.meta["search"] = {"boost": 0.1}

    def rewrite(link: re.Match[str]) -> str:
        target = resolve(link[2], source)
        if target is None:
            return link[0]
        return link[1] + posixpath.relpath(place(target), posixpath.dirname(source) or ".") + link[3]

    return outside_code(markdown, lambda text: LINK.sub(rewrite, text))


def on_page_content(html: str, **_: Any) -> str:
    """Keep lines from breaking inside an option, and between a number and its unit."""
    return "".join(part if part.startswith("<pre") else unbroken(part) for part in BLOCK.split(html))


def unbroken(html: str) -> str:
    """Return HTML whose lines break neither inside an option nor before a unit.

    >>> unbroken("<code>run --link 4g</code> sends 3 MB")
    '<code>run <span class="whole">--link</span> 4g</code> sends 3&nbsp;MB'
    """
    whole = r'<span class="whole">\g<0></span>'
    return QUANTITY.sub("&nbsp;", CODE.sub(lambda code: OPTION.sub(whole, code[0]), html))


def add(files: Files, config: Any, name: str, text: str) -> None:
    """Add a generated page."""
    files.append(File.generated(config, name, content=text))


def place(path: str) -> str:
    """Return where a file of the repository is on the site.

    >>> [place(path) for path in ("docs/wire.md", "README.md", "src/cfedavg/task.py", "src/cfedavg")]
    ['wire.md', 'index.md', 'source/src/cfedavg/task.py.md', 'reference/packages.md']
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path in GENERATED:
        return GENERATED[path][0]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if Path(path).suffix in PICTURES else f"source/{path}.md"


def origin(page: str) -> str:
    """Return the repository's path of a page of the site: the inverse of `place`."""
    return next((name for name, where in OUTSIDE.items() if where == page), f"docs/{page}")


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


def outside_page(file: Path) -> str:
    """Return a Markdown file or a notebook as a page; the front page has no navigation beside it."""
    text = file.read_text()
    if file.suffix != ".ipynb":
        return f"---\nhide: [navigation]\n---\n\n{text}" if file == ROOT / "README.md" else text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(code if kind == "markdown" else f"```python\n{code}\n```" for kind, code in cells)


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
