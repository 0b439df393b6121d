"""Install the wheel into empty environments of each Python there is: `python -m scripts.check_package`.

The wheel is built twice, from the repository and from the sdist, with a C compiler; both must be equal. Each
version of Python gets the wheel as a light client, then with numba, and never torch. All modules import that
can, and every message has the same bytes, made by the C library, by plain Python and by numba. Packages come
from the configured index, in the versions of constraints.txt. A Python that neither the PATH nor pyenv has is
left out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from scripts.build_package import ROOT, build, copy_source, read_wheel, unpack

PYTHONS = ("3.11", "3.12", "3.13")
WAYS = {"client": ("c", "python"), "data,flower": ("numba",)}  # extras, and the kernels that run with them

# Imports every module, and prints a hash of the messages of all compressors, and which packages were missing.
CHECK = """
import hashlib, importlib, pkgutil, sys
import numpy as np
import cfedavg
from cfedavg.compress import EXAMPLES, parse
from cfedavg.core import kernels
from cfedavg.core.layout import Layout
from cfedavg.wire import decode, encode

assert cfedavg.__file__.startswith(sys.prefix), cfedavg.__file__
assert kernels.WAY == sys.argv[1], kernels.WAY
missing = set()
for module in pkgutil.walk_packages(cfedavg.__path__, "cfedavg."):
    if module.name.rpartition(".")[2] != "_native":  # a library that C programs load
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.add((error.name or str(error)).split(".")[0])
layout, messages = Layout.flat(4000), hashlib.sha256()
for number, text in enumerate(EXAMPLES):
    p = np.random.default_rng(number).standard_normal(4000).astype(np.float32)
    message = encode(parse(text).compress(p, number), layout)
    assert encode(decode(message, layout=layout), layout) == message, text
    messages.update(message)
print(messages.hexdigest(), *sorted(missing))
"""


class Environment:
    """A virtual environment in a folder, empty at first, and the commands that run in it."""

    def __init__(self, folder: Path, python: str) -> None:
        subprocess.run([python, "-m", "venv", folder], check=True)
        self.folder, self.python = folder, folder / "bin" / "python"
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(self, *words: str | Path, **variables: str) -> str:
        """Run Python with arguments and return what it prints; if it fails, show its output and end."""
        done = subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=self.variables | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{shlex.join(map(str, words))}: exit code {done.returncode}")
        return done.stdout

    def install(self, wheel: Path, extras: str) -> None:
        """Install the wheel with extras, in the versions of constraints.txt, from wheels only."""
        options = "--quiet", "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt"
        self.run("-m", "pip", "install", *options, f"cfedavg[{extras}] @ {wheel.as_uri()}")


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


def find_python(version: str) -> str | None:
    """Return the path of a version of Python; None if there is none that starts."""
    name = shutil.which(f"python{version}")
    if name is None:
        return None
    command = [name, "-c", "import sys; print(sys.executable)"]
    chosen = os.environ | {"PYENV_VERSION": version}  # pyenv starts the versions that this names
    return subprocess.run(command, env=chosen, capture_output=True, text=True).stdout.strip() or None


def check(wheel: Path, folder: Path, version: str) -> set[str]:
    """Try the wheel with a version of Python; return the hashes of the messages, which should be one."""
    python = find_python(version)
    if python is None:
        print(f"Python {version}: skipped, since no python{version} starts", flush=True)
        return set()
    environment, hashes = Environment(folder / version, python), set()
    for extras, ways in WAYS.items():
        environment.install(wheel, extras)
        for way in ways:
            found, *missing = environment.run("-c", CHECK, way, CFEDAVG_KERNELS=way).split()
            hashes.add(found)
            print(
                f"Python {version}, [{extras}], {way}: {found[:8]}, without {', '.join(missing)}", flush=True
            )
    (package,) = environment.folder.glob("lib/*/site-packages/cfedavg")
    environment.run("-W", "error", "-m", "compileall", "-q", "-f", package)
    return hashes


def main() -> None:
    """Build the wheel and try it with every Python."""
    with tempfile.TemporaryDirectory(prefix="cfedavg-package-") as path:
        wheel = build_with_compiler(Path(path))
        hashes = set[str]().union(*(check(wheel, Path(path), version) for version in PYTHONS))
    if len(hashes) != 1:
        raise SystemExit(f"messages must have the same bytes everywhere, got {len(hashes)} kinds")


if __name__ == "__main__":
    main()
