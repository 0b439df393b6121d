"""Progress in a notebook: one output that is replaced, which a saved notebook shows without widgets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CELLS = (
    "from cfedavg import BF16, Config, Selector, TopK, run\n"
    "small = Config(model='linear', clients=4, rounds=3, local_steps=1)\n"
    "run(small.replace(compressor=TopK(0.9) >> BF16()), progress=True)",
    "run(small)",  # takes less than two seconds, or shows its progress too
    # A class of the notebook's own is a part too.
    "from dataclasses import dataclass\n"
    "@dataclass(frozen=True)\n"
    "class Mine(TopK):\n"
    "    pass\n"
    "run(small.replace(compressor=Mine(0.9)), progress=False)",
)


@pytest.mark.slow  # a kernel starts
def test_a_notebook_shows_the_progress_of_a_run(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "n.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "n.ipynb"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=300)
    page = (tmp_path / "n.html").read_text()
    lines = re.findall(r'<progress [^>]*value="(\d+)"[^>]*></progress> 3/3  accuracy \d', page)
    assert lines in (["3"], ["3", "3"])
    assert page.count("Result: test accuracy ") == 3
    assert "jupyter-widgets" not in page.split("<body")[1]
