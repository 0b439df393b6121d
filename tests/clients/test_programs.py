"""The programs of clients/c, and the library in wheels: built and run as its README says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from scripts.build_package import build, copy_source, read_wheel

from cfedavg.core import native
from tests.clients.library import FOLDER, make, needs_compiler


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
    assert found.startswith("134 golden messages have the same bytes, 18 are of an earlier encoder")
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


@needs_compiler
@pytest.mark.slow
def test_a_wheel_holds_the_library_if_there_is_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/package builds one without a compiler."""
    pytest.importorskip("build")
    monkeypatch.delenv("CC", raising=False)
    (wheel,) = build(copy_source(tmp_path / "source"), tmp_path / "dist", "--wheel")
    platform = wheel.name.removesuffix(".whl").partition("-py3-none-")[2]
    assert platform not in ("", "any")
    library = tmp_path / "_native.so"
    library.write_bytes(read_wheel(wheel)["cfedavg/core/_native.so"])
    monkeypatch.setattr(native, "LIBRARY", library)
    assert all(native.find(name) for name in native._CALLS)
