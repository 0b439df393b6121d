"""The same round by us, by pfl-research, by plain PyTorch and by Flower, in turns in one run: one table.

    make bench-peers                     (installs the peers into .venv-peers first)
    python bench/compare.py --turns 3 --clients 10 --epochs 1 --processes 2
    python bench/compare.py --device cuda --clients 100 --epochs 10 --data-dir DIR

Every contender is a process of its own that trains the paper's CNN and prints a line of JSON
(bench/round.py, bench/peers/). They take turns, so a machine that slows down does so for all, and the ratios
are medians over the turns. Flower runs in a network namespace of its own: Ray looks for the outside world.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("CFEDAVG_PEERS", HERE.parent / ".venv-peers")) / "bin" / "python"
ISOLATED = ["unshare", "-r", "-n", "-p", "-f", "--kill-child", "--mount-proc"]
LIMIT = 900  # seconds that a contender may take


def ours(given: argparse.Namespace, **options: Any) -> list[str]:
    """Our round, of any configuration."""
    data = [f"dataset=mnist data_dir={given.data_dir}" if given.data_dir else "dataset=embedded"]
    fields = {
        "clients": given.clients, "iid": "true", "model": "cnn", "local_epochs": given.epochs,
        "batch_size": 64, "rounds": given.rounds + 1, "device": given.device,
    } | options  # fmt: skip
    words = [*" ".join(data).split(), *(f"{name}={value}" for name, value in fields.items())]
    return [sys.executable, str(HERE / "round.py"), *words]


def peer(given: argparse.Namespace, script: str, processes: int, threads: int, python: Path) -> list[str]:
    """A peer's round."""
    words = ["--clients", given.clients, "--epochs", given.epochs, "--rounds", given.rounds]
    words += ["--device", given.device, "--processes", processes, "--threads", threads, "--limit", LIMIT]
    words += ["--data-dir", given.data_dir] if given.data_dir else []
    return [str(python), str(HERE / "peers" / script), *map(str, words)]


def contenders(given: argparse.Namespace) -> dict[str, list[str]]:
    """Who takes part, by name; those that are not installed are left out, and that is said."""
    n, python = given.processes, Path(sys.executable)
    if given.device == "cuda":
        found = {
            f"cfedavg, {precision}, {text}": ours(given, precision=precision, compressor=text)
            for precision, text in (("bf16", "topk(0.99)"), ("tf32", "topk(0.99)"), ("float32", "none"))
        }
    else:
        found = {
            f"cfedavg, {text}": ours(given, workers=n, compressor=text) for text in ("none", "topk(0.99)")
        }
        found["cfedavg, topk(0.99), bf16"] = ours(given, workers=n, compressor="topk(0.99)", precision="bf16")
    found["plain PyTorch"] = peer(given, "plain_round.py", n, 1, python)
    if not PEERS.exists():
        Console(stderr=True).print(
            f"{PEERS} is missing: bench/peers/install makes it; going on without the peers"
        )
        return found
    found["pfl-research 0.6.0"] = peer(given, "pfl_round.py", n, 1, PEERS)
    if given.device == "cpu" and shutil.which("unshare"):
        found["Flower 1.41.0 (Ray)"] = ISOLATED + peer(given, "flower_round.py", n, 1, PEERS)
    return found


def turn(command: list[str]) -> dict[str, Any]:
    """What a contender says of itself."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def show(found: dict[str, list[dict[str, Any]]], base: str) -> None:
    table = Table(
        "who", "s a round", "steps/s", f"against {base}: median", "least", "most", "memory", "accuracy"
    )
    seconds = {
        name: [statistics.median(line["seconds_per_round"]) for line in lines]
        for name, lines in found.items()
    }
    for name, lines in found.items():
        ratios = sorted(theirs / mine for mine, theirs in zip(seconds[name], seconds[base], strict=True))
        rates = [line["steps_per_second"] for line in lines]
        table.add_row(
            name,
            f"{statistics.median(seconds[name]):.3f}",
            f"{statistics.median(rates):,.1f}",
            *(f"{ratio:.2f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])),
            f"{max(line['peak_memory_bytes'] for line in lines) / 1e9:.2f} GB",
            f"{lines[0]['test_accuracy'][-1]:.4f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1, help="local epochs")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of a turn; one more warms up")
    parser.add_argument("--processes", type=int, default=2, help="on a CPU one thread each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", help="MNIST as parquet files; without it, the embedded subset")
    parser.add_argument("--out", type=Path, help="file for the lines of JSON")
    given = parser.parse_args()
    commands = contenders(given)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in track(range(given.turns), "turns"):
        for name, command in commands.items():
            found[name].append(turn(command))
    if given.out:
        lines = [{"contender": name} | line for name, each in found.items() for line in each]
        given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(found, next((name for name in found if name.startswith("pfl")), "plain PyTorch"))


if __name__ == "__main__":
    main()
