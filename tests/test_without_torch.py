"""Parts that a light client needs work where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

CLIENT = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def run_without_torch(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", CLIENT + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_compressor_runs() -> None:
    found = run_without_torch(
        """
import numpy as np
from cfedavg.compress import EXAMPLES, decompress, parse
p = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
for text in EXAMPLES:
    sent = decompress(parse(text).compress(p, np.arange(3)))
    assert sent.shape == p.shape and np.square(sent - p).sum() <= np.square(p).sum(), text
assert "torch" not in sys.modules
print(len(EXAMPLES))
"""
    )
    assert int(found) > 10
