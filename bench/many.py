"""Ten thousand clients on a small machine: memory and disk, round by round, as numbers and a picture.

    python bench/many.py --out runs/many --rounds 100

The paper's CNN, 100 of 10,000 clients a round, one local step each (the residuals are what is looked at),
top-k 0.99. Their residuals come to 23 GB once everyone has taken part, so they live on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cfedavg import Config, run
from cfedavg.simulate.run import Observer

CLIENTS, A_ROUND = 10_000, 100


def resident(pid: int) -> int:
    """Bytes of memory of a process and its children; pages of files in the cache are not among them."""
    total = 0
    for each in [pid, *children(pid)]:
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Meter(Observer):
    """Memory (the most since the last round) and disk at the end of each round."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows = out, list[dict[str, Any]]()
        self._most = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._most = max(self._most, resident(os.getpid()))
            time.sleep(0.05)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def row(self, row: dict[str, Any]) -> None:
        files = (path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        self.rows.append(
            {
                "round": row["round"],
                "seconds": row["seconds"],
                "memory": self._most,
                "disk": sum(files),
                "clients_with_a_residual": len(
                    {p.name[:6] for p in self.out.glob("residuals/*.safetensors")}
                ),
            }
        )
        self._most = 0
        print(self.rows[-1], flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rounds = [row["round"] + 1 for row in rows]
    left.plot(rounds, [row["memory"] / 1e9 for row in rows], color="#3366aa")
    left.set(xlabel="round", ylabel="GB of memory, all processes", ylim=(0, None), title="memory")
    right.plot(rounds, [row["disk"] / 1e9 for row in rows], color="#aa5533")
    right.set(xlabel="round", ylabel="GB on disk", ylim=(0, None), title="disk: grows with the clients seen")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/many"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data-dir", help="MNIST as parquet files; without it, the embedded subset")
    given = parser.parse_args()
    config = Config(
        dataset="mnist" if given.data_dir else "embedded", data_dir=given.data_dir, clients=CLIENTS, iid=True,
        model="cnn", local_steps="1", batch_size=20, participation=A_ROUND / CLIENTS, rounds=given.rounds,
        compressor="topk(0.99)", workers=given.workers, device="cpu", eval_every=given.rounds,
    )  # fmt: skip
    meter = Meter(given.out)
    run(config, out=given.out, observer=meter)
    (given.out / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in meter.rows))
    draw(meter.rows, given.out / "memory.png")


if __name__ == "__main__":
    main()
