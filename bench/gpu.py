"""All lines of one GPU machine in docs/benchmarks.md, each a process of its own, one after another.

    python bench/gpu.py --data-dir DIR --out OUT/gpu.jsonl --minutes 8
    python bench/gpu.py --data-dir DIR --out OUT/gpu.jsonl --only "pfl*"

DIR holds MNIST as parquet files. A part whose line is in the file already is left out, so the parts can be
measured in several calls on one machine. No part begins after --minutes; a part takes up to 75 s, and its
programs are ended after 110 s. `start` and `again` run the command from nothing to the report: the first with
empty caches (the data set, compiled steps, torch's and Triton's own), the second with the caches of the
first, or of a run of 2 rounds if another call has measured the first. ResNet-18 begins with empty caches,
too. It trains on random images of the shape of CIFAR-10, if --cifar-dir does not name a folder with CIFAR-10
as parquet files. All parts are warm after their first round. A part that fails says so and is left out.

A machine without the package installed needs the C library, `src/cfedavg/core/_native.so`, which git ignores:
carry it along, or `start` and `again` also measure how long numba takes to compile the message coders.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lines import Line, Lines

HERE = Path(__file__).parent
COMMAND = "from cfedavg.cli import command; command()"
MNIST = {"dataset": "mnist", "clients": 100, "model": "cnn", "local_epochs": 10, "batch_size": 64}
LIMIT = 110  # seconds that a program may take


class Failed(Exception):
    """Raised if a program of a part fails."""


def last_line(command: list[str], **more: str) -> Line:
    """Run a program and return the line of JSON that it prints last."""
    environment = os.environ | more
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    line: Line = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def places(caches: Path) -> dict[str, str]:
    """Return the environment variables of a program that keeps its caches in a folder."""
    names = ("CFEDAVG_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")
    return {name: str(caches / name.lower()) for name in names}


def draw_images(folder: Path) -> str:
    """Write random images of the shape of CIFAR-10 as parquet files to a folder; return its name."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for split, n in (("train", 50_000), ("test", 10_000)):
        images = []
        for pixels in random.integers(256, size=(n, 32, 32, 3), dtype=np.uint8):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG", compress_level=0)
            images.append({"bytes": file.getvalue(), "path": None})
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns = {"img": pa.array(images, kind), "label": random.integers(10, size=n)}
        pq.write_table(pa.table(columns), folder / f"{split}-00000.parquet")
    return str(folder)


def command(caches: Path, data_dir: str, rounds: int, **more: str) -> Line:
    """Time `cfedavg run` from the start of Python to the report, and its rounds."""
    fields = MNIST | {"data_dir": data_dir, "rounds": rounds, "precision": "bf16", "device": "cuda"} | more
    options = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        program = [sys.executable, "-c", COMMAND, "run", "--iid", *options, "--out", f"{out}/run"]
        environment = os.environ | places(caches)
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=LIMIT)
        whole = time.perf_counter() - began
        rows = [json.loads(line) for line in Path(out, "run/metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows]
    longest = max(range(1, rounds), key=seconds.__getitem__)
    return {
        "seconds_in_all": round(whole, 2), "rounds": rounds, "first_round_seconds": round(seconds[0], 2),
        "median_seconds": round(statistics.median(seconds[1:]), 4),
        "longest_later_seconds": seconds[longest], "longest_later_round": longest,
        "test_accuracy": rows[-1]["test_accuracy"], "total_bytes": rows[-1]["total_bytes"],
    }  # fmt: skip


def again(caches: Path, data_dir: str) -> Line:
    """Time the command with the caches of a run before; make that run if the caches are empty."""
    if not any(Path(place).exists() for place in places(caches).values()):
        command(caches, data_dir, 2)
    return command(caches, data_dir, 10)


def rounds(data_dir: str, caches: Path | None = None, **options: object) -> Line:
    """Time rounds of a configuration (bench/round.py)."""
    fields = MNIST | {"data_dir": data_dir, "iid": "true", "device": "cuda", "rounds": 21} | options
    words = [f"{name}={value}" for name, value in fields.items()]
    return last_line([sys.executable, str(HERE / "round.py"), *words], **(places(caches) if caches else {}))


def peer(data_dir: str, script: str, processes: int, *words: str) -> Line:
    """Time rounds of a peer (bench/peers)."""
    given = ["--device", "cuda", "--data-dir", data_dir, "--processes", str(processes), *words]
    began = time.perf_counter()
    line = last_line([sys.executable, str(HERE / "peers" / script), *given])
    return line | {"seconds_in_all": round(time.perf_counter() - began, 2)}


def resnet(cifar_dir: str | None, caches: Path, *, again: bool) -> Line:
    """Time the command on ResNet-18 with empty caches or, `again`, rounds with the caches of the first."""
    fields = {"dataset": "cifar10", "model": "resnet18"}
    directions = {"compressor": "topk(0.99)", "compressor_down": "none"}
    folder = caches / "images"
    data_dir = cifar_dir or (str(folder) if folder.exists() else draw_images(folder))
    if again:
        line = rounds(data_dir, caches / "resnet", **fields, **directions, precision="bf16", rounds=4)
    else:
        line = command(caches / "resnet", data_dir, 6, **fields, **directions)
    return line | {"images": "CIFAR-10" if cifar_dir else "random"}


def lstm(engine: str, precision: str) -> Line:
    """Time our rounds of the peers' LSTM: 50 clients, 10 local steps each."""
    words = ["--model", "lstm", "--clients", "50", "--epochs", "1", "--rounds", "5", "--device", "cuda"]
    program = [sys.executable, str(HERE / "peers" / "our_round.py"), *words]
    return last_line(program, ENGINE=engine, PRECISION=precision)


def parts(data_dir: str, cifar_dir: str | None, caches: Path) -> dict[str, Callable[[], Line]]:
    """All parts, by name; the most important first."""
    pfl, ours = partial(peer, data_dir, "pfl_round.py"), partial(rounds, data_dir)
    text = ("--model", "lstm", "--clients", "50", "--epochs", "1", "--rounds", "3")
    return {
        "start: 100 rounds, no caches": lambda: command(caches, data_dir, 100),
        "again: 10 rounds, caches of the first": lambda: again(caches, data_dir),
        "pfl, 5 processes": lambda: pfl(5, "--rounds", "3"),
        "cfedavg, bf16, both directions": lambda: ours(precision="bf16"),
        "cfedavg, float32, topk(0.99) up": lambda: ours(compressor="topk(0.99)", compressor_down="none"),
        "LSTM: cfedavg, batched, bf16": lambda: lstm("batched", "bf16"),
        "LSTM: cfedavg, batched, float32": lambda: lstm("batched", "float32"),
        "LSTM: cfedavg, sequential, float32": lambda: lstm("sequential", "float32"),
        "LSTM: pfl, 1 process": lambda: pfl(1, *text),
        "LSTM: pfl, 5 processes": lambda: pfl(5, *text),
        "ResNet-18, bf16, no caches": lambda: resnet(cifar_dir, caches, again=False),
        "ResNet-18, bf16, caches of the first": lambda: resnet(cifar_dir, caches, again=True),
        "plain PyTorch, 1 process": lambda: peer(data_dir, "plain_round.py", 1, "--rounds", "1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--cifar-dir", help="CIFAR-10 as parquet files; without it, random images")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.jsonl"))
    parser.add_argument("--only", default="*", help="parts of these names; * stands for anything")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no part after so many minutes")
    given = parser.parse_args()
    lines = Lines(given.out, given.minutes)
    with tempfile.TemporaryDirectory() as caches:
        for name, measure in parts(given.data_dir, given.cifar_dir, Path(caches)).items():
            if not lines.is_due(part=name) or not fnmatch.fnmatch(name, given.only):
                continue
            try:
                lines.add({"part": name} | measure())
            except (Failed, subprocess.SubprocessError) as error:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
