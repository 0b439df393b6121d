"""What `make` installs is pinned by version and by hash, build tools included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = ROOT / "constraints.torch.lock"  # apart from the others; the Makefile says why


def versions(text: str) -> dict[str, str]:
    """Every pinned package and its version, by the name that an index gives it."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


@pytest.mark.parametrize("folder", ["", "bench/peers", "bench/peers/coders"])
def test_every_pin_has_its_hashes(folder: str) -> None:
    lock = (ROOT / folder / "constraints.lock").read_text() + TORCH.read_text()
    assert versions(lock) == versions((ROOT / folder / "constraints.txt").read_text())
    for entry in re.split(r"^(?=\S)", lock, flags=re.MULTILINE)[1:]:
        assert re.fullmatch(r"\S+==\S+ (\\\n    --hash=sha256:[0-9a-f]{64} ?)+\n", entry), entry[:80]


def test_build_tools_are_pinned_too() -> None:
    build = re.findall(r'requires = \["([a-z]+)', (ROOT / "pyproject.toml").read_text())
    assert build == ["setuptools"]
    assert "setuptools" in versions((ROOT / "constraints.txt").read_text())


def test_make_installs_only_what_the_hashes_allow() -> None:
    installs = re.findall(r"\$\(PIP\) install (.*)", (ROOT / "Makefile").read_text())
    *hashed, own = installs
    assert hashed
    assert all("--require-hashes" in line and "--no-deps" in line for line in hashed)
    assert "--no-build-isolation" in own
