"""Our messages, directions and factors beside those of others, in turns in one run.

    bench/peers/coders/install                                     # .venv-coders
    .venv-coders/bin/python -m bench.coders --out results/peers/coders.jsonl
    python -m bench.coders_tables                                  # the tables of docs/benchmarks.md

Parts: `messages`: NNCodec, STC and GRACE on recorded messages; `federation`: NNCodec's Flower client and
strategy against ours; `lowrank`: PyTorch's PowerSGD hook against `lowrank`. A line that the file has is not
measured again. Everything runs on one core; seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from cfedavg.core.files import append

PARTS = ("messages", "federation", "lowrank")


def cases_of(part: str) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yield each case of a part: the fields that name it, and a function that measures it."""
    if part == "messages":
        from bench.peers.coders import messages

        for folder, quantiser in messages.KINDS:
            values = quantiser or messages.SENT[folder]
            yield {"folder": folder, "values": values}, partial(messages.compare, folder, quantiser)
    elif part == "federation":
        from bench.peers.coders import federation

        for model, plan in federation.PLANS.items():
            for name, seed in product(plan.names, federation.SEEDS):
                case = {"model": model, "name": name, "seed": seed}
                yield case, partial(federation.compare, model, name, seed)
    else:
        from bench.peers.coders import lowrank

        for rank in lowrank.RANKS:
            layout, updates = lowrank.train_updates()
            for name in lowrank.names(rank):
                yield {"rank": rank, "name": name}, partial(lowrank.compare, layout, updates, rank, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/peers/coders.jsonl"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    for part in given.parts:
        for name, measure in cases_of(part):
            if any(line | {"part": part} | name == line for line in done):
                continue
            line = measure()
            print(json.dumps(line), flush=True)
            append(given.out, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
