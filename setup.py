"""What pyproject.toml cannot say: how the C library of clients/c is built, and the page of a package index.

The library goes into the package if there is a compiler. The page is the README with other links.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("clients/c")
PROGRAMS = {"example.c", "fuzz.c", "test.c"}
LIBRARY = Extension(
    "cfedavg.core._native",
    sources=sorted(str(path) for path in FOLDER.glob("*.c") if path.name not in PROGRAMS),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    # The bytes of a message depend on float costs: no fused multiply-add.
    extra_compile_args=["-std=c99", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
    libraries=["m"],
    optional=True,  # without a compiler, the package uses numba or plain Python
)


class BuildLibrary(build_ext):
    """Build a library without an interface to Python: one file for all versions of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class TagWheel(bdist_wheel):
    """Tag the wheel for this platform if it holds the library, and for all platforms if it does not."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir, "cfedavg/core/_native.so")
        return "py3", "none", super().get_tag()[2] if library.exists() else "any"


setup(
    long_description=runpy.run_path("scripts/package_page.py")["describe"](),
    long_description_content_type="text/markdown",
    # Microsoft's compiler takes other options, and the package loads no library there.
    ext_modules=[] if sys.platform == "win32" else [LIBRARY],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel},
)
