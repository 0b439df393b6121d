"""Adapters of a small language model on twenty clients: dense against compressed in both directions.

    python bench/adapters.py pretrain --data DIR --model runs/gpt.pt --minutes 10 --device cuda
    python bench/adapters.py federate --data DIR --model runs/gpt.pt --out runs/adapters.jsonl --device cuda
    python bench/adapters.py federate --out results/adapters.jsonl --table

DIR holds Python sources as parquet files with the columns `package` and `text`. `pretrain` trains a GPT on
the bytes of 14 packages. `federate` freezes it and trains adapters (LoRA) of rank 8 on 20 clients, one for
each of the other packages, 2 of them a round, with AdamW. The test set is held-out files of these packages.
Each run of `federate` adds a line of JSON for each evaluation; a run whose lines are there is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from cfedavg import Callback, Config, Task, run
from cfedavg.adapters import add_adapters
from cfedavg.models import GPT

LENGTH = 256  # bytes of a sequence
LAST = 5  # evaluations whose mean counts as the loss; single ones jump by 0.003
# The packages of the pre-training; all others are clients.
BASE = (
    "aiohttp", "astropy", "celery", "dask", "django", "ipython", "mypy", "networkx", "nltk", "numpy", "pip",
    "pytest", "sympy", "transformers",
)  # fmt: skip
SIZES = {"small": (128, 4, 4), "medium": (384, 6, 6)}  # width, blocks, heads; small is for a CPU


class Setting(NamedTuple):
    """The parts of a federation: compressors up and down, the clients' feedback, and the server's rate."""

    up: str = "none"
    down: str = "none"
    feedback: str = "ef"
    eta: float = 1.0


SPARSE = Setting("topk(0.8) >> sign", "topk(0.98) >> sign", feedback="none")
SETTINGS = {
    "dense": Setting(),
    "dense, eta 1.4": Setting(eta=1.4),
    "bf16": Setting("bf16", "bf16"),
    "30% up, 3% down, ef": Setting("topk(0.7) >> sign", "topk(0.97) >> sign"),
    "30% up, 3% down": Setting("topk(0.7) >> sign", "topk(0.97) >> sign", feedback="none"),
    "20% up, 2% down": SPARSE,
    "20% up, 2% down, eta 1.4": SPARSE._replace(eta=1.4),
}


def read_bytes(folder: Path, split: str) -> dict[str, np.ndarray]:
    """Return the bytes of each package's files, one file after another."""
    table = pq.read_table(next(folder.glob(f"{split}-*.parquet")), columns=["package", "text"])
    found: dict[str, list[bytes]] = {}
    for package, text in zip(*(table[name].to_pylist() for name in ("package", "text")), strict=True):
        found.setdefault(package, []).append(text.encode())
    return {name: np.frombuffer(b"\n".join(texts), np.uint8) for name, texts in sorted(found.items())}


def sequences(text: np.ndarray, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return sequences of a text and, for each place, the byte that follows; at most `most` of them."""
    rows = np.arange((len(text) - 1) // LENGTH)
    if most and len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(int)]
    at = torch.from_numpy(rows)[:, None] * LENGTH + torch.arange(LENGTH + 1)
    tokens = torch.from_numpy(text.astype(np.int64))[at]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_model(size: str) -> nn.Module:
    torch.manual_seed(0)
    width, blocks, heads = SIZES[size]
    return GPT(LENGTH, 256, width, blocks, heads)


def pretrain(given: argparse.Namespace) -> None:
    """Train the base model for some minutes, with a rate that falls to zero by then."""
    texts = read_bytes(given.data, "train")
    text = torch.from_numpy(np.concatenate([texts[name] for name in BASE]).astype(np.int64)).to(given.device)
    model = make_model(given.size).to(given.device)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    began, losses, step, batch = time.monotonic(), list[float](), 0, 16 if given.size == "small" else 64
    while (share := (time.monotonic() - began) / (60 * given.minutes)) < 1:
        rate = 1e-3 * min(1.0, step / 200) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimiser.param_groups:
            group["lr"] = rate
        at = torch.randint(len(text) - LENGTH - 1, (batch, 1), device=given.device)
        tokens = text[at + torch.arange(LENGTH + 1, device=given.device)]
        with torch.autocast(given.device, torch.bfloat16):
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 100 == 0:
            losses.append(float(loss.detach()))
            print(f"step {step}, {time.monotonic() - began:.0f} s, loss {losses[-1]:.3f}", flush=True)
    given.model.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"size": given.size, "steps": step, "weights": model.cpu().state_dict()}, given.model)


class Keep(Callback):
    """Writes a line for each evaluation of a run."""

    def __init__(self, about: dict[str, Any], out: Path) -> None:
        self.about, self.out, self.bytes = about, out, 0

    def on_row(self, row: dict[str, Any]) -> None:
        self.bytes += row["total_bytes"]
        if "test_loss" in row:
            line = {**self.about, "round": row["round"] + 1, "test_loss": row["test_loss"],
                    "test_accuracy": row["test_accuracy"], "server_test_loss": row.get("server_test_loss"),
                    "total_bytes": self.bytes, "seconds": row["seconds"]}  # fmt: skip
            print(json.dumps(line), flush=True)
            with self.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def on_message(self, text: str) -> None:
        print(text, flush=True)


def federate(given: argparse.Namespace) -> None:
    """Train adapters with each setting that has no lines yet."""
    saved = torch.load(given.model, weights_only=True)
    base = make_model(saved["size"])
    base.load_state_dict(saved["weights"])
    train, test = (read_bytes(given.data, split) for split in ("train", "test"))
    names = [name for name in train if name not in BASE]
    clients = [sequences(train[name], given.samples) for name in names]
    tests = [sequences(test[name], 40) for name in names]
    held_out = tuple(torch.cat(each) for each in zip(*tests, strict=True))
    model = add_adapters(base, rank=given.rank, layers="blocks.*")
    sent = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = {(json.loads(line)["setting"], json.loads(line)["seed"]) for line in lines}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for setting in given.settings or SETTINGS:
        if (setting, given.seed) in done:
            continue
        parts = SETTINGS[setting]
        config = Config(
            rounds=given.rounds, participation=0.1, local_steps=given.steps, batch_size=16, seed=given.seed,
            local_optimiser="adamw", eta_local=given.rate, eta=parts.eta, compressor=parts.up,
            compressor_down=parts.down, feedback=parts.feedback, eval_every=given.every, device=given.device,
            precision=given.precision,
        )  # fmt: skip
        about = {"setting": setting, "seed": given.seed, **parts._asdict(), "adapters": sent,
                 "pretrained_steps": saved["steps"], "size": saved["size"]}  # fmt: skip
        task = Task(model, clients, test=held_out, name="adapters")
        run(config, task, callbacks=[Keep(about, given.out)], progress=False)


def table(out: Path) -> str:
    """Return a Markdown table: each setting's last loss, and its bytes to a loss that dense reaches too."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        runs.setdefault(line["setting"], []).append(line)
    dense = smooth(runs["dense"])
    header = "adapters, rounds, loss, bytes (MB), a loss that both reach, dense (MB), bytes (MB), of dense"
    rows = [f"| {header.replace(', ', ' | ')} |", "|---" * 8 + "|"]
    for setting, found in runs.items():
        curve, last = smooth(found), found[-1]
        target = max(min(loss for _, loss in each) for each in (dense, curve))
        both = [bytes_to(each, target) for each in (dense, curve)]
        rows.append(
            f"| {setting} | {last['round']} | {curve[-1][1]:.4f} | {last['total_bytes'] / 1e6:.2f} "
            f"| {target:.4f} | {both[0] / 1e6:.2f} | {both[1] / 1e6:.2f} | 1/{both[0] / both[1]:.1f} |"
        )
    return "\n".join(rows)


def smooth(found: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return, for each evaluation of a run but the first ones, its bytes and the mean of the last losses."""
    losses = [line["test_loss"] for line in found]
    return [
        (found[i]["total_bytes"], statistics.fmean(losses[i + 1 - LAST : i + 1]))
        for i in range(LAST - 1, len(found))
    ]


def bytes_to(curve: list[tuple[int, float]], loss: float) -> int:
    """Return the bytes of a run until its loss is first at most `loss`."""
    return next(sent for sent, reached in curve if reached <= loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pretrain", "federate"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path, default=Path("runs/gpt.pt"))
    parser.add_argument("--out", type=Path, default=Path("runs/adapters.jsonl"))
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--minutes", type=float, default=10.0, help="of pre-training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20, help="local steps")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--samples", type=int, default=2000, help="sequences of a client, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS)
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    given = parser.parse_args()
    if given.table and not given.out.exists():
        parser.error(f"--out {given.out} does not exist; make it with `federate`")
    if given.table:
        print(table(given.out))
    elif given.what == "pretrain":
        pretrain(given)
    else:
        federate(given)


if __name__ == "__main__":
    main()
