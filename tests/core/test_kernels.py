"""Kernels: machine code on disk is that of the present source, whoever was killed while writing it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALL = "import numpy as np; from parts.addition import add; print(add(np.ones(3)))"
KILLED = (
    "import os; from numba.core.caching import IndexDataCacheFile as File\n"
    "File._save_data = lambda *args: os._exit(9)  # the index is written, the data file is not\n" + CALL
)


def test_a_killed_compiler_leaves_no_old_code_behind(tmp_path: Path) -> None:
    path = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "CFEDAVG_KERNELS": "numba",
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(path),
    }
    (tmp_path / "parts").mkdir()

    def run(code: str, number: int) -> str:
        source = (
            f"from cfedavg.core.kernels import kernel\n\n\n@kernel\ndef add(a):\n    return a[0] + {number}\n"
        )
        (tmp_path / "parts" / "addition.py").write_text(source)
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    assert run(CALL, 1) == "2.0\n"
    assert run(KILLED, 100) == ""
    assert run(CALL, 100) == "101.0\n"
