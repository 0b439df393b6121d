"""Chunks on the wire in numbers: what each part of a message takes, for updates of transformers.

    python -m bench.chunks --data pycode

Messages are those of `topk(chunk=4096, k=64) >> int2(block)`. The data are a folder of parquet files with the
columns `package` and `text`; the largest packages are the clients. They train small GPTs over bytes, 15 steps
of AdamW a round, with error feedback. The table has the messages of client 0, by parts, and what the coders
of versions 1 and 2 of the format would take. Then the coders are timed beside memcpy, and beside
`topk(comp) >> bf16` with as many values. `--keep FOLDER` stores the messages of gpt with int2(1024).
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import torch
from bench.wire import MEMORY, TURNS, entropy
from rich.console import Console
from rich.table import Table

from cfedavg import Config, Layout, decode, decompress, encode, parse
from cfedavg.compress import values_of
from cfedavg.core.payload import Levels, Payload
from cfedavg.data.tasks import build_task
from cfedavg.models import GPT, Shape
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.plan import Plan
from cfedavg.wire import read_header
from cfedavg.wire.coordinates import Matrices
from cfedavg.wire.frame import entropy_bound
from cfedavg.wire.indices import encode_indices

CHUNK, K = 4096, 64
SELECTOR = f"topk(chunk={CHUNK}, k={K})"
BLOCKS = (256, 1024, 4096)
ROUNDS = (2, 5, 10)  # those in the table
CLIENTS = 4
MODELS = {"gpt": "gpt", "GPT of width 256": "bench.chunks:gpt_256", "gpt_small": "gpt_small"}


def gpt_256(shape: Shape, classes: int) -> torch.nn.Module:
    """Build a GPT of 4 blocks of width 256."""
    return GPT(shape[0], classes, 256, 4, 4)


def pick_packages(data: Path, folder: Path) -> None:
    """Write the texts of the packages with the longest training texts to a folder."""
    sizes: Counter[str] = Counter()
    for file in data.glob("train*.parquet"):
        for row in parquet.read_table(file, columns=["package", "text"]).to_pylist():
            sizes[row["package"]] += len(row["text"])
    largest = [name for name, _ in sizes.most_common(CLIENTS)]
    for file in data.glob("*.parquet"):
        parquet.write_table(
            parquet.read_table(file, filters=[("package", "in", largest)]), folder / file.name
        )


class Update(NamedTuple):
    """What client 0 compressed in a round, and the residual's norm over that of the update."""

    layout: Layout
    round: int
    p: np.ndarray
    residual: float


def train(model: str, data: Path, rounds: int) -> Iterator[Update]:
    """Yield what client 0 compresses in each round."""
    config = Config(
        data_dir=str(data), client_column="package", model=model, tokens="bytes", sequence_length=128,
        local_steps="15", batch_size=8, local_optimiser="adamw(0.1)", eta_local=0.001, rounds=rounds,
        compressor=f"{SELECTOR} >> int2(1024)", compressor_down="none",
    )  # fmt: skip
    task = build_task(config)
    with TemporaryDirectory() as folder:
        engine = ReferenceEngine(Plan(config, task), task, torch.device("cpu"), Path(folder))
        state, before = engine.start(), np.zeros(engine.layout.d)
        for t in range(1, rounds + 1):
            state, _ = engine.round(state)
            file = sorted(Path(folder).glob("*-00000.cfa"))[-1]
            sent = decompress(decode(file.read_bytes(), layout=engine.layout))[0]
            residual = state.residuals.get(0, state.x).numpy()
            p = residual + sent
            share = float(np.linalg.norm(residual) / np.linalg.norm(p - before))
            before = residual
            yield Update(engine.layout, t, p, share)


class Parts(NamedTuple):
    """The bits of each part of a message, for one value."""

    indices: float
    magnitudes: float
    signs: float
    scales: float
    frame: float


def count_parts(payload: Payload, layout: Layout) -> Parts:
    """Return what the parts of a payload's message take. Magnitudes take what signs alone do not."""
    assert isinstance(payload.values, Levels)
    message, k = encode(payload, layout), payload.counts()[0]
    header = read_header(message)
    signs = Levels(np.sign(payload.values.levels), np.ones(1, np.float32), 0, 1, payload.values.per_level)
    alone = read_header(encode(replace(payload, values=signs), layout)).value_bytes
    sections = header.index_bytes, header.value_bytes - alone, alone, header.raw_bytes
    return Parts(*(8 * each / k for each in (*sections, len(message) - sum(header[-3:]))))


def count_parts_before(payload: Payload, layout: Layout) -> Parts:
    """Return what the parts would take with the coders of versions 1 and 2."""
    assert isinstance(payload.values, Levels)
    assert payload.indices is not None
    k = payload.counts()[0]
    words = np.empty(k + 10_000, np.uint32)
    listed = 32 * encode_indices(words, payload.indices, layout.d, Matrices.of(layout).shapes) / k
    levels = replace(payload.values, scales=np.ones(1, np.float32), block=0, per_level=False)
    now, parts = count_parts(payload, layout), count_parts(replace(payload, values=levels), layout)
    return Parts(listed, parts.magnitudes, parts.signs, now.scales, now.frame)


def bound(d: int) -> float:
    """Return the bits per index that a random set of K in each chunk needs."""
    rest = min(K, d % CHUNK)
    whole = d // CHUNK * K * entropy_bound(CHUNK, K) + rest * entropy_bound(d % CHUNK, rest)
    return whole / (d // CHUNK * K + rest)


def part_rows(name: str, update: Update) -> Iterator[list[str]]:
    """Yield the rows of a round, one for each length of the blocks that share two magnitudes."""
    layout, exact = update.layout, None
    for block in BLOCKS:
        payload = parse(f"{SELECTOR} >> int2({block})").compress(update.p, 1, layout)
        assert isinstance(payload.values, Levels)
        exact = exact if exact is not None else update.p[payload.indices].astype(np.float64)
        lost = np.square(values_of(payload) - exact).sum() / np.square(exact).sum()
        parts, before = count_parts(payload, layout), count_parts_before(payload, layout)
        numbers = [*parts, sum(parts), sum(before), entropy(abs(payload.values.levels))]
        bits = [f"{number:.2f}" for number in numbers]
        where = f"{name}, {layout.d:,}", f"{update.round} ({update.residual:.1f})", f"{block}", f"{lost:.2%}"
        yield [*where, f"{bound(layout.d):.2f}", f"{before.indices:.2f}", *bits]


def speeds(update: Update) -> dict[str, list[float]]:
    """Return what encoding and decoding take, in ns per value and in memcpys of the dense vector.

    These are medians of processor time, in turns, which other work on the machine hardly changes.
    """
    layout, p = update.layout, torch.from_numpy(update.p)
    vectors = cycle([p.clone() for _ in range(math.ceil(MEMORY / (4 * layout.d)))])
    chunks = parse(f"{SELECTOR} >> int2(1024)").compress(p, 1, layout).numpy()
    k, target = chunks.counts()[0], torch.empty_like(p)
    work: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(next(vectors))}
    plain = parse(f"topk({1 - k / layout.d!r}) >> bf16").compress(p, 1, layout).numpy()
    for name, payload in (("chunks >> int2", chunks), ("topk >> bf16", plain)):
        work[f"encode {name}"] = partial(encode, payload, layout)
        work[f"decode {name}"] = partial(decode, encode(payload, layout), layout=layout)
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(TURNS):
        for name, call in work.items():
            began = time.process_time()
            call()
            times[name].append(time.process_time() - began)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {name: [1e9 * t / k, t / middle["copy"]] for name, t in middle.items() if name != "copy"}


def keep(update: Update, folder: Path) -> None:
    """Store the message of a round."""
    payload = parse(f"{SELECTOR} >> int2(1024)").compress(update.p, 1, update.layout)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layout.json").write_text(update.layout.text)
    (folder / f"{update.round:05}-00000.cfa").write_bytes(encode(payload, update.layout, round=update.round))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="parquet files with package and text")
    parser.add_argument("--keep", type=Path, help="folder for the messages of gpt")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=200)
    parts = Table(
        "model, d", "round (residual / update)", "block", "lost", "bound", "listed", "in chunks",
        "magnitudes", "signs", "scales", "frame", "total", "before", "entropy of magnitudes",
        title=f"bits per value of {SELECTOR} >> int2(block)",
    )  # fmt: skip
    times = Table("model", "what", "ns per value", "/ memcpy", title="times on one core")
    with TemporaryDirectory() as folder:
        pick_packages(given.data, Path(folder))
        for name, model in MODELS.items():
            for update in train(model, Path(folder), max(ROUNDS)):
                if update.round in ROUNDS:
                    for row in part_rows(name, update):
                        parts.add_row(*row)
                    if given.keep and name == "gpt":
                        keep(update, given.keep)
            for what, (ns, copies) in speeds(update).items():
                times.add_row(name, what, f"{ns:.0f}", f"{copies:.1f}")
    console.print(parts)
    console.print(times)
    console.print(f"torch {torch.__version__}, NumPy {np.__version__}, {platform.machine()}, one thread")


if __name__ == "__main__":
    main()
