"""Flower is an extra: where it is missing, what speaks to it is left out, and the header says so."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = find_spec("flwr") is None
NEED_IT = [
    "tests/flower/test_*.py",
    "tests/grid.py",
    "tests/witness.py",
    "src/cfedavg/flower",
    "src/cfedavg/launch",
]

collect_ignore_glob = NEED_IT * MISSING


def pytest_report_header() -> list[str]:
    return [f"without flwr, which is not installed: {', '.join(NEED_IT)} are left out"] * MISSING
