"""Type the start pages as written: the wheel is built, and each page gets an empty environment and folder.

    python -m scripts.try_docs [README.md docs/start/flower.md ...]

A page's blocks run from top to bottom: a block with a title is saved under it, `sh` is typed into one shell,
and Python without a title is run. `pip install cfedavg` installs the wheel that was just built, with the
versions of constraints.txt. It needs a package index. It prints a page's seconds: of the installation, and
from there to the end.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md")))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r'^pip install "?cfedavg(\[[a-z,]+\])?"?$', re.MULTILINE)
LIMIT = 1200.0  # seconds for a page


class Script(NamedTuple):
    """A page as files to save, the extras to install, and the commands to type after that."""

    files: dict[str, str]
    extras: str
    commands: str


def read_page(page: Path) -> Script:
    """Return what a reader of the page types."""
    files, extras, commands = dict[str, str](), "", list[str]()
    for number, (language, title, text) in enumerate(BLOCK.findall(page.read_text())):
        if title:
            files[title] = text
        elif language == "python":
            files[f"block{number}.py"] = text
            commands.append(f"python block{number}.py\n")
        elif language == "sh":
            for found in INSTALL.finditer(text):
                extras = found[1] or ""
            commands.append(INSTALL.sub("", text))
    return Script(files, extras, "".join(commands))


def type_commands(script: Script, folder: Path, environment: Mapping[str, str]) -> str:
    """Save the files of a page in a folder, type its commands there, and return what they print."""
    for name, text in script.files.items():
        (folder / name).write_text(text)
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script.commands],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)  # what the page left in the background
    if shell.returncode:
        raise SystemExit(f"{printed}\nexit code {shell.returncode}")
    return printed


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout with the build tools that are installed."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def empty_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment, and return the variables of a shell in which it is active."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    home = folder / "home"  # without the caches of this machine
    home.mkdir()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    return {**left, "PATH": path, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def install(wheel: Path, extras: str, environment: Mapping[str, str]) -> None:
    """Install the wheel; torch goes first and alone, so that pip takes the CPU build where there is one."""
    pip = ["python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    for what in ([*pip, "--no-deps", "torch"], [*pip, f"{wheel}{extras}"]):
        subprocess.run(what, check=True, env=dict(environment))


def try_page(page: Path, wheel: Path) -> tuple[float, float]:
    """Type a page into an empty environment; return the seconds of the installation and of the rest."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        environment, script = empty_environment(folder), read_page(page)
        began = time.monotonic()
        install(wheel, script.extras, environment)
        installed = time.monotonic()
        (folder / "work").mkdir()
        print(type_commands(script, folder / "work", environment), flush=True)
        return installed - began, time.monotonic() - installed


def main() -> None:
    """Try the pages that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    pages = [page.resolve() for page in parser.parse_args().pages]
    with tempfile.TemporaryDirectory() as path:
        wheel = build_wheel(Path(path))
        seconds = {page: try_page(page, wheel) for page in pages}
    print(f"{'page':<30}{'install, s':>12}{'the rest, s':>12}")
    for page, (installing, rest) in seconds.items():
        print(f"{page.relative_to(ROOT)!s:<30}{installing:>12.0f}{rest:>12.0f}")


if __name__ == "__main__":
    main()
