"""What an installation takes: bytes on the disk, and time and memory of the first import.

    python bench/footprint.py --before 393b5f1

Each row of the table is installed from the last commit into a fresh virtual environment in a temporary
folder, in the versions of constraints.txt. Size is what the files of the environment take on the disk,
without pip. Time and memory are those of a new process that has imported what the row names (the median of
several processes; the first one, which may compile, does not count). `--before` also measures the package as
it is at a commit. Downloads take minutes, and all rows together 7 GB in the folder that TMPDIR chooses.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMPORTS = 5  # processes that are measured

MEASURE = """
import sys, time
start = time.perf_counter()
exec(sys.argv[1])
seconds = time.perf_counter() - start
with open("/proc/self/statm") as statm:
    pages = int(statm.read().split()[1])
import os
print(seconds, pages * os.sysconf("SC_PAGE_SIZE"))
"""


class Row(NamedTuple):
    """An installation: what pip installs (`.` is this package), and the import that is measured."""

    name: str
    requirements: tuple[str, ...]
    imported: str


FLOWER = "import flwr.app, flwr.clientapp"
CODER = "from cfedavg import decode, encode, parse"
MOD = "from cfedavg.flower import compressed"
ROWS = (
    Row("Flower and NumPy alone", ("flwr", "numpy"), FLOWER),
    Row("cfedavg", (".",), CODER),
    Row("cfedavg[client]", (".[client]",), MOD),
    Row("cfedavg[flower]", (".[flower]",), "from cfedavg.flower import CFedAvg"),
    Row("cfedavg[report]", (".[report]",), "from cfedavg.report import import_drawing; import_drawing()"),
    Row("cfedavg[data]", (".[data]",), "from cfedavg.data import load; load('embedded')"),
    Row("cfedavg[sim]", (".[sim]", "torch"), "from cfedavg import run"),
    Row("cfedavg[all]", (".[all]", "torch"), "from cfedavg import run"),
)
BEFORE = (
    Row("before: cfedavg", (".", "torch"), CODER),
    Row("before: cfedavg[flower], a node", (".[flower]", "torch"), MOD),
)


def install(row: Row, source: Path, environment: Path) -> None:
    """Make a virtual environment and install a row into it. torch is pinned: its default build has CUDA."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    wanted = [f"{source}{each[1:]}" if each.startswith(".") else each for each in row.requirements]
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), *wanted], check=True, cwd=environment
    )


def measure(row: Row, environment: Path) -> dict[str, object]:
    """Return the size of an environment, and the time and memory of its import, in seconds and MB."""
    size = sum(path.lstat().st_blocks * 512 for path in environment.rglob("*"))
    command = [environment / "bin" / "python", "-c", MEASURE, row.imported]
    found = [
        tuple(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))
        for _ in range(1 + IMPORTS)
    ][1:]
    seconds, memory = (statistics.median(each) for each in zip(*found, strict=True))
    return {
        "installation": row.name,
        "disk_mb": round(size / 1e6),
        "import": row.imported,
        "import_seconds": round(seconds, 2),
        "import_mb": round(memory / 1e6),
    }


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit to a folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="also measure the package at this commit")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "footprint.json")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        todo = [(row, check_out("HEAD", folder / "now")) for row in ROWS[:1]]
        todo += [(row, folder / "now") for row in ROWS[1:]]
        if options.before:
            then = check_out(options.before, folder / "then")
            todo += [(row, then) for row in BEFORE]
        for i, (row, source) in enumerate(todo):
            install(row, source, folder / str(i))
            lines.append(measure(row, folder / str(i)))
            print(format_row(lines[-1]), flush=True)
    options.out.write_text(json.dumps(lines, indent=2) + "\n")


def format_row(line: dict[str, object]) -> str:
    """Return a line of the table in docs/install.md."""
    name = re.sub(r"cfedavg(\[\w+\])?", r"`\g<0>`", str(line["installation"]))
    return f"| {name} | {line['disk_mb']:,} MB | `{line['import']}` | {line['import_mb']} MB |"


if __name__ == "__main__":
    main()
