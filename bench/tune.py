"""Does `cfedavg tune` beat the default at equal total bytes? Two tasks on which nothing here was chosen.

    python bench/tune.py TASK --data DIR --out results/tune [--minutes 4]
    python bench/tune.py --table results/tune           # prints tables of docs/tune.md

TASK is fashion or shakespeare.
DIR holds folders fashion_mnist and shakespeare of parquet files. The search runs in OUT/TASK and its record
stays there. Then three configurations train with three seeds until they have spent the budget: the default,
the default's compressors with the chosen local work and rates, and the chosen one. Each becomes one line of
OUT/TASK.jsonl, so that a broken-off measurement goes on where it stopped. The searches use one core.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cfedavg
from cfedavg import Callback, Config, Task
from cfedavg.data.tasks import ClientSamples, build_task
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.record import Record

SEEDS = (0, 1, 2)
BUDGETS = {"fashion": "12MB", "shakespeare": "2MB"}
ARMS = ("default", "rates", "tuned")
COMPRESSORS = ("compressor", "compressor_down")
ROLES = 10


class CharMLP(nn.Module):
    """Scores of the next character at every place, from the 8 characters before it: 128 hidden units."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.hidden = nn.Linear(64, 128)
        self.out = nn.Linear(128, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(x, (7, 0)).unfold(1, 8, 1)
        return self.out(torch.relu(self.hidden(self.embedding(before).flatten(2))))


def fashion(data: Path, seed: int) -> tuple[Config, Task]:
    """Fashion-MNIST, 30 clients with class shares from Dirichlet(0.3), an MLP of 50,890 parameters."""
    named = {"dataset": "fashion_mnist", "data_dir": str(data / "fashion_mnist"), "model": "mlp"}
    task = build_task(Config(**named, clients=30, dirichlet=0.3, seed=seed))
    return Config(seed=seed, workers=1), task


def shakespeare(data: Path, seed: int) -> tuple[Config, Task]:
    """The 10 roles with the most text, an MLP on 8 characters; tested on the roles' own test rows."""
    named = {"dataset": "shakespeare", "data_dir": str(data / "shakespeare"), "client_column": "role"}
    whole = build_task(Config(**named, model="char_lstm_small", sequence_length=40))
    order = sorted(range(len(whole.clients)), key=lambda i: (-len(whole.clients[i]), i))[:ROLES]
    rows = torch.cat([torch.as_tensor(whole.test_parts[i]) for i in order]).numpy()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CharMLP(whole.model.embedding.num_embeddings)
    test = ClientSamples(whole.test, rows)
    task = Task(model, [whole.clients[i] for i in order], test=test, name="10 roles of Shakespeare")
    return Config(seed=seed, batch_size=10, workers=1), task


TASKS = {"fashion": fashion, "shakespeare": shakespeare}


class Until(Callback):
    """Ends a run after the round with which it has spent more than the budget."""

    def __init__(self, budget: float) -> None:
        self.budget, self.rows = budget, []

    def on_row(self, row: dict[str, Any]) -> bool:
        self.rows.append(row)
        return sum(each["total_bytes"] for each in self.rows) > self.budget


def train(config: Config, task: Task, budget: float) -> dict[str, Any]:
    """Return the rounds that fit the budget, their bytes, and the test accuracy after the last of them."""
    until = Until(budget)
    cfedavg.run(config.replace(rounds=10**6), task, callbacks=[until], draw=False, progress=False)
    *rows, _ = until.rows
    return {
        "rounds": len(rows),
        "total_bytes": sum(row["total_bytes"] for row in rows),
        "test_accuracy": rows[-1]["test_accuracy"],
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def measure(name: str, data: Path, out: Path, minutes: float) -> None:
    config, task = TASKS[name](data, 0)
    folder, file, budget = out / name, out / f"{name}.jsonl", BUDGETS[name]
    if not file.exists():
        began = time.monotonic()
        tuned = cfedavg.tune(
            config, task, budget=budget, minutes=minutes, out=folder, resume=folder.exists(), progress=True
        )
        print(tuned, flush=True)
        shutil.rmtree(folder / "runs")  # gigabytes for large models; the record and the table stay
        about = {"search_seconds": round(time.monotonic() - began, 1), "minutes": minutes, "budget": budget}
        about |= {"changes": tuned.chosen.changes}
        about |= {"clients": tuned.ladder.clients, "of_clients": tuned.ladder.of_clients}
        write(file, about)
    about, *done = read(file)
    amount = Record.read(folder).budget.amount
    for seed in SEEDS:
        for arm in ARMS:
            if any((line["arm"], line["seed"]) == (arm, seed) for line in done):
                continue
            config, task = TASKS[name](data, seed)
            kept = [] if arm == "tuned" else COMPRESSORS if arm == "rates" else about["changes"]
            changes = {key: value for key, value in about["changes"].items() if key not in kept}
            write(file, {"arm": arm, "seed": seed, **train(config.replace(**changes), task, amount)})


def write(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    print(line, flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


WORDS = {
    "default": "the default",
    "rates": "its compressors, with the chosen local work and rates",
    "tuned": "the chosen configuration",
}


def table(out: Path, name: str) -> str:
    """Return a task's table: of each configuration the accuracy at the budget, by seed, and its rounds."""
    _, *lines = read(out / f"{name}.jsonl")
    rows = ["| | test accuracy, by seed | mean | rounds | bytes |", "| --- | --- | --- | --- | --- |"]
    for arm in ARMS:
        own = [line for line in lines if line["arm"] == arm]
        each = [100 * line["test_accuracy"] for line in own]
        spent = statistics.fmean(line["total_bytes"] for line in own) / 1e6
        seeds, rounds = ", ".join(f"{value:.1f}" for value in each), [str(line["rounds"]) for line in own]
        mean = f"{statistics.fmean(each):.1f}"
        rows.append(f"| {WORDS[arm]} | {seeds} | {mean} | {', '.join(rounds)} | {spent:.2f} MB |")
    return "\n".join(rows)


def about(out: Path, name: str) -> str:
    """Return the sentence about a task's search, for the page."""
    search, *_ = read(out / f"{name}.jsonl")
    changes = ", ".join(f"`{key}` {value}" for key, value in search["changes"].items())
    rungs = Record.read(out / name).rungs
    tried = len({entry.name for rung in rungs for entry in rung.entries})
    return (
        f"Budget {Budget.parse(search['budget'])}. The search tried {tried} candidates on "
        f"{search['clients']} of {search['of_clients']} clients, in {search['search_seconds']:.0f} s of the "
        f"{search['minutes']:g} minutes stated. It chose {changes}."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        for name in (path.stem for path in sorted(options.table.glob("*.jsonl"))):
            print(f"{about(options.table, name)}\n\n{table(options.table, name)}\n")
        return
    measure(options.task, options.data, options.out, options.minutes)


if __name__ == "__main__":
    main()
