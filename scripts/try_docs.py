"""Type the start pages as written: the wheel is built, and each page gets an empty environment and folder.

    python -m scripts.try_docs [--out FILE] [README.md docs/start/flower.md examples/notebook.ipynb ...]

A page's blocks run from top to bottom: a block with a title is saved under it, `sh` is typed into one shell,
and Python without a title is run. nbconvert executes a notebook. `pip install cfedavg` installs the wheel
that was just built, with the versions of constraints.txt. It needs a package index. It prints for each page
how many words and blocks of code it has, and the seconds of the installation, from there to the first result
of a compressed run, and to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from scripts.build_package import ROOT, build, copy_source

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md")), NOTEBOOK)
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r'^pip install "?cfedavg(\[[a-z,]+\])?"?$', re.MULTILINE)
INSTALL_NOTEBOOK = re.compile(r'`pip install "cfedavg(\[[a-z,]+\])" ([a-z ]+)`')
EXECUTE = "python -m nbconvert --to html --execute {0}.ipynb\ngrep --quiet image/png {0}.html\n"
RESULT = re.compile(r"first downloads|\d bytes up")  # only in lines about compressed runs
LIMIT = 1200.0  # seconds for a page


class Script(NamedTuple):
    """A page as files to save, extras and other packages to install, and the commands to type after that."""

    files: dict[str, str]
    extras: str
    commands: str
    packages: tuple[str, ...] = ()
    words: int = 0  # outside of code
    blocks: int = 0  # of code


class Typed(NamedTuple):
    """What a page printed, and the seconds to its first compressed result and to its end."""

    printed: str
    first_seconds: float
    seconds: float


def read_page(page: Path) -> Script:
    """Return what a reader of the page types."""
    return read_notebook(page) if page.suffix == ".ipynb" else read_markdown(page)


def read_notebook(page: Path) -> Script:
    """Return what executes a notebook; its first cell says what to install beside Jupyter."""
    cells = json.loads(page.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    ((extras, packages),) = INSTALL_NOTEBOOK.findall(text)
    packages = *packages.split(), "nbconvert", "ipykernel"
    blocks = sum(cell["cell_type"] == "code" for cell in cells)
    commands = EXECUTE.format(page.stem)
    return Script({page.name: page.read_text()}, extras, commands, packages, len(text.split()), blocks)


def read_markdown(page: Path) -> Script:
    """Return what a reader of a page in Markdown types."""
    files, extras, commands = dict[str, str](), "", list[str]()
    blocks = BLOCK.findall(page.read_text())
    for number, (language, title, text) in enumerate(blocks):
        if title:
            files[title] = text
        elif language == "python":
            files[f"block{number}.py"] = text
            commands.append(f"python block{number}.py\n")
        elif language == "sh":
            for found in INSTALL.finditer(text):
                extras = found[1] or ""
            commands.append(INSTALL.sub("", text))
    words = len(BLOCK.sub("", page.read_text()).split())
    return Script(files, extras, "".join(commands), words=words, blocks=len(blocks))


def type_commands(script: Script, folder: Path, environment: Mapping[str, str]) -> Typed:
    """Save the files of a page in a folder, and type its commands there."""
    for name, text in script.files.items():
        (folder / name).write_text(text)
    began = time.monotonic()
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script.commands],
        cwd=folder,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT, end_group, [shell.pid])
    limit.start()
    try:
        lines = [(line, time.monotonic() - began) for line in shell.stdout or ()]
    finally:
        limit.cancel()
        end_group(shell.pid)  # what the page left in the background
    printed, seconds = "".join(line for line, _ in lines), time.monotonic() - began
    if shell.wait():
        raise SystemExit(f"{printed}\nexit code {shell.returncode}")
    return Typed(printed, next((at for line, at in lines if RESULT.search(line)), seconds), seconds)


def end_group(leader: int) -> None:
    """End all processes of a group that still run."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)


def empty_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment, and return the variables of a shell in which it is active."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    home = folder / "home"  # without the caches of this machine
    home.mkdir()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    return {**left, "PATH": path, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def install(wheel: Path, script: Script, environment: Mapping[str, str]) -> None:
    """Install what a page needs; torch goes first and alone, so that pip takes a CPU build on the disk."""
    pip = ["python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    first = [[*pip, "--no-deps", "torch"]] if "sim" in script.extras else []
    for what in (*first, [*pip, f"{wheel}{script.extras}", *script.packages]):
        subprocess.run(what, check=True, env=dict(environment))


def try_page(page: Path, wheel: Path) -> dict[str, object]:
    """Type a page into an empty environment; return its length and the seconds that it took."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        environment, script = empty_environment(folder), read_page(page)
        began = time.monotonic()
        install(wheel, script, environment)
        installing = time.monotonic() - began
        (folder / "work").mkdir()
        typed = type_commands(script, folder / "work", environment)
    print(typed.printed, flush=True)
    return {
        "page": str(page.relative_to(ROOT)),
        "words": script.words,
        "blocks": script.blocks,
        "install_seconds": round(installing),
        "first_seconds": round(typed.first_seconds),
        "seconds": round(typed.seconds),
    }


def format_row(line: Mapping[str, object]) -> str:
    """Return a line of the table in docs/install.md."""
    row = "| `{page}` | {words} | {blocks} | {install_seconds} s | {first_seconds} s | {seconds} s |"
    return row.format(**line)


def main() -> None:
    """Try the pages that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write what was measured to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        (wheel,) = build(copy_source(Path(path) / "source"), Path(path) / "dist", "--wheel")
        lines = [try_page(page.resolve(), wheel) for page in options.pages]
    print("| page | words | blocks | install | first result | end |", *map(format_row, lines), sep="\n")
    if options.out:
        options.out.write_text(json.dumps(lines, indent=2) + "\n")


if __name__ == "__main__":
    main()
