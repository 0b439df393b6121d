"""Try the wheel as a user does: `python -m scripts.check_package` installs it into empty environments.

With this Python, the commands and the Python code of the README and of the pages in docs/start run in order,
or those of the pages that are given as arguments. Other versions of Python that are on the PATH get the wheel without torch: every module imports, and
every message has the bytes that it has here. Packages come from the configured index, in the versions of
constraints.txt.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.build_package import ROOT, build, copy_source, read_wheel, unpack

OTHERS = ("3.12", "3.13")  # versions of Python besides the oldest one, which runs everything
CONSTRAINTS = ROOT / "constraints.txt"
_BLOCK = re.compile(r'^```(\w*)(?: title="([\w./-]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_DONE = re.compile(r"^pip install .*\n", re.MULTILINE)  # the wheel is installed already
_INSTALL = re.compile(r"pip install .*?cfedavg(\[[\w,]+\])?")

# Imports every module, and prints a hash of a message of every compressor.
WITHOUT_TORCH = """
import hashlib, importlib, pkgutil, sys
import numpy as np
import cfedavg
from cfedavg.compress import EXAMPLES, parse
from cfedavg.core.layout import Layout
from cfedavg.wire import decode, encode

assert cfedavg.__file__.startswith(sys.prefix), cfedavg.__file__
missing = set()
for module in pkgutil.walk_packages(cfedavg.__path__, "cfedavg."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        missing.add((error.name or str(error)).split(".")[0])
layout, messages = Layout.flat(4000), hashlib.sha256()
for number, text in enumerate(EXAMPLES):
    p = np.random.default_rng(number).standard_normal(4000).astype(np.float32)
    payload = parse(text).compress(p, np.uint64(number))
    message = encode(payload, layout)
    assert encode(decode(message, layout=layout), layout) == message, text
    messages.update(message)
print(messages.hexdigest(), *sorted(missing))
"""


class Environment:
    """An empty virtual environment in a folder, and the commands that run in it."""

    def __init__(self, folder: Path, python: str) -> None:
        subprocess.run([python, "-m", "venv", folder], check=True)
        self.bin = folder / "bin"
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = {**own, "PATH": f"{self.bin}{os.pathsep}{own['PATH']}"}

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a command and return what it prints; if it fails, show its output and end."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{shlex.join(map(str, command))}: exit code {done.returncode}")
        return done.stdout

    def install(self, *what: str | Path) -> None:
        """Install packages in the versions of constraints.txt, from wheels only."""
        options = "--quiet", "--only-binary", ":all:", "--constraint", CONSTRAINTS
        self.run(self.bin / "python", "-m", "pip", "install", *options, *what)


def install_torch(environment: Environment, folder: Path) -> None:
    """Install the build of torch that the locks name, as the Makefile does."""
    pip = environment.bin / "python", "-m", "pip"
    get = "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder
    environment.run(*pip, *get, "--constraint", CONSTRAINTS, "torch")
    hashed = "--no-deps", "--require-hashes", "--no-index", "--find-links", folder
    environment.run(*pip, "install", "--quiet", *hashed, "-r", ROOT / "constraints.torch.lock")


def commands(page: str) -> list[list[str]]:
    """Return what a page lets its reader do, in order: write a file, run a command, run Python.

    >>> commands("```sh\\npip install cfedavg\\ncfedavg run\\n```\\n")
    [['bash', '-ec', 'cfedavg run\\n']]
    >>> commands('```python title="mine.py"\\nprint(1)\\n```')
    [['write', 'mine.py', 'print(1)\\n']]
    """
    found = []
    for kind, title, text in _BLOCK.findall(page):
        if title:
            found.append(["write", title, text])
        elif kind == "python":
            found.append(["python", "-c", text])
        elif kind in ("", "sh") and (rest := _DONE.sub("", text)):
            found.append(["bash", "-ec", rest])
    return found


def try_page(environment: Environment, page: Path, folder: Path) -> None:
    """Run the commands of a page in a folder of their own, and print the seconds of each."""
    folder.mkdir(parents=True)
    found = commands(page.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{page} has no command to try")
    for command in found:
        if command[0] == "write":
            file = folder / command[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(command[2], encoding="utf-8")
            continue
        begun = time.monotonic()
        environment.run(*command, cwd=folder)
        shown = command[-1].strip().splitlines()
        print(
            f"{time.monotonic() - begun:7.1f} s  {page.name}: {shown[0]}{' ...' * (len(shown) > 1)}",
            flush=True,
        )


def find_python(version: str) -> str | None:
    """Return the command of a version of Python; None if there is none that starts."""
    name = shutil.which(f"python{version}")
    if name is None or subprocess.run([name, "-c", ""], capture_output=True).returncode:
        return None
    return name


def extras(page: str) -> str:
    """Return the extras that a page lets its reader install, such as `[sim]`, or an empty text.

    >>> extras('pip install "cfedavg[flower,sim]"'), extras("pip install cfedavg")
    ('[flower,sim]', '')
    """
    found = _INSTALL.search(page)
    return (found and found[1]) or ""


def build_with_compiler(folder: Path) -> Path:
    """Build the wheel from the repository and from its sdist; return it if both have the same content."""
    sdist, wheel = build(copy_source(folder / "source"), folder / "dist", "--sdist", "--wheel")
    (again,) = build(unpack(sdist, folder / "sdist"), folder / "again", "--wheel")
    content = read_wheel(wheel)
    if not any(name.endswith(".so") for name in content):
        raise SystemExit(f"{wheel.name} lacks the C library; is there a C compiler?")
    if (again.name, read_wheel(again)) != (wheel.name, content):
        raise SystemExit(f"the sdist gives another {wheel.name} than the repository")
    return wheel


def check_here(wheel: Path, folder: Path, pages: list[Path]) -> str:
    """Install the wheel for each page as the page says, and run the page; return the hash of the messages."""
    environment = Environment(folder / "here", sys.executable)
    install_torch(environment, folder / "torch")
    for page in pages:
        environment.install(f"cfedavg{extras(page.read_text(encoding='utf-8'))} @ {wheel.as_uri()}")
        try_page(environment, page, folder / "pages" / page.stem)
    return environment.run("python", "-c", WITHOUT_TORCH, cwd=folder).split()[0]


def check_other(wheel: Path, folder: Path, version: str, messages: str) -> None:
    """Install the wheel without torch for another version of Python, and compare the messages."""
    python = find_python(version)
    if python is None:
        print(f"Python {version}: skipped, there is no python{version} on the PATH")
        return
    environment = Environment(folder / version, python)
    for extra in ("client", "data,flower"):
        environment.install(f"cfedavg[{extra}] @ {wheel.as_uri()}")
        found, *missing = environment.run("python", "-c", WITHOUT_TORCH, cwd=folder).split()
        if found != messages:
            raise SystemExit(f"Python {version}, [{extra}]: the messages have other bytes than those here")
        print(f"Python {version}, [{extra}]: all modules import but those that need {', '.join(missing)}")
    (package,) = environment.bin.parent.glob("lib/*/site-packages/cfedavg")
    environment.run("python", "-W", "error", "-m", "compileall", "-q", "-f", package)


def main() -> None:
    pages = [Path(name).resolve() for name in sys.argv[1:]] or [
        ROOT / "README.md",
        *sorted((ROOT / "docs" / "start").glob("*.md")),
    ]
    with tempfile.TemporaryDirectory(prefix="cfedavg-package-") as path:
        folder = Path(path)
        wheel = build_with_compiler(folder)
        messages = check_here(wheel, folder, pages)
        for version in OTHERS:
            check_other(wheel, folder, version, messages)


if __name__ == "__main__":
    main()
