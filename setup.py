"""What pyproject.toml cannot say: how the C library of clients/c is built, and the page of a package index.

The library goes into the package if there is a compiler. The page is the README with other links.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("clients/c")
# The bytes of a message depend on float costs: no fused multiply-add.
FLAGS = ["-std=c99", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared"]


class BuildLibrary(build_ext):
    """Build a library that does not use Python: one file for all versions of Python."""

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, "-o", str(library), *ext.sources, "-lm"]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{error}: cfedavg is installed without its C library") from None

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"


class TagWheel(bdist_wheel):
    """Tag the wheel for this platform if it holds the library, and for all platforms if it does not."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir, "cfedavg/core/_native.so")
        return "py3", "none", super().get_tag()[2] if library.exists() else "any"


# Without a compiler, the package uses numba or plain Python. Microsoft's takes other options than FLAGS.
LIBRARY = Extension(
    "cfedavg.core._native",
    sources=sorted(str(path) for path in FOLDER.glob("*.c")),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    optional=True,
)
setup(
    long_description=runpy.run_path("scripts/package_page.py")["describe"](),
    long_description_content_type="text/markdown",
    ext_modules=[] if sys.platform == "win32" else [LIBRARY],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel},
)
