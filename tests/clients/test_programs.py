"""The programs of clients/c, and the library in wheels: built and run as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.clients.library import FOLDER, make, needs_compiler

ROOT = FOLDER.parents[1]


@needs_compiler
def test_the_example_of_the_readme() -> None:
    page = (FOLDER / "README.md").read_text()
    (code,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    assert code == (FOLDER / "programs" / "example.c").read_text()
    printed = make("example").strip()
    assert printed == "98 bytes; coordinate 37 is -496"
    assert f"It prints `{printed}`" in page


@needs_compiler
def test_mutants_under_the_sanitizers() -> None:
    found = make("test")
    assert found.startswith("53 golden messages have the same bytes")
    assert "accepted" in found
    assert "a level exceeds the largest magnitude" in found


@needs_compiler
@pytest.mark.slow
def test_many_mutants_under_the_sanitizers() -> None:
    counts = [
        int(n) for n in re.findall(r"^ +(\d+)  ", make("fuzz", "MUTANTS=100000", "SEED=9"), re.MULTILINE)
    ]
    assert sum(counts) == 100_000
    assert len(counts) >= 25


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_compiler_warns(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for more in ("-O0", "-O3 -Wshadow -Wcast-align -Wstrict-prototypes -Wmissing-prototypes", "-O2 -std=c11"):
        make("library", f"CC={compiler}", f"BUILD={tmp_path / more[:3]}", f"CFLAGS={more}")


def build(source: Path, out: Path, what: str, **environment: str) -> Path:
    """Build a wheel or an sdist of the tree `source`."""
    command = [
        sys.executable,
        "-m",
        "build",
        f"--{what}",
        "--no-isolation",
        "--outdir",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.mark.slow
def test_wheels_with_and_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("build")
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "results", "build", "*.so", "paper")
    )
    sdist = build(source, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        names = archive.getnames()
    assert any(name.endswith("clients/c/cfedavg.h") for name in names)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    without = build(unpacked, tmp_path / "without", "wheel", CC="/bin/false")
    assert without.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(without).namelist())
    if shutil.which("cc"):
        wheel = build(unpacked, tmp_path / "with", "wheel")
        assert "-py3-none-" in wheel.name
        assert not wheel.name.endswith("any.whl")
        assert "cfedavg/core/_native.so" in zipfile.ZipFile(wheel).namelist()
