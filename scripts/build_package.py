"""Build the wheel and the sdist in a folder of their own, and look into them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is no source: environments, caches, and what runs and builds leave behind.
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.so", "build", "dist", "runs",
    "site", "carried",
)  # fmt: skip


def copy_source(folder: Path) -> Path:
    """Copy the repository without what is no source, so that a build leaves nothing behind here."""
    shutil.copytree(ROOT, folder, ignore=_LEFT_OUT)
    return folder


def build(source: Path, out: Path, *what: str) -> list[Path]:
    """Build `what` (`--sdist`, `--wheel`) of the sources in a folder; return the files, the sdist first."""
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe build of {source} failed")
    return sorted(out.iterdir(), key=lambda path: path.suffix == ".whl")


def unpack(sdist: Path, out: Path) -> Path:
    """Unpack an sdist and return its folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (folder,) = out.iterdir()
    return folder


def read_wheel(wheel: Path) -> dict[str, bytes]:
    """Return the name and the content of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
