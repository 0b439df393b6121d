"""The tables of docs/benchmarks.md on other coders, from results/peers/coders.jsonl.

python -m bench.coders_tables
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cfedavg.core.units import format_bytes

RESULTS = Path(__file__).parents[1] / "results" / "peers" / "coders.jsonl"
KINDS = {
    "cnn-epochs": "CNN, 10 epochs", "cnn-steps": "CNN, 10 steps", "resnet18": "ResNet-18",
    "gpt": "transformer, AdamW", "adapters": "adapters, AdamW",
}  # fmt: skip
TARGETS = {"lenet": (0.80, 0.90), "cnn": (0.80, 0.85)}  # accuracies
SHOWN = (1, 5, 10, 20)  # rounds


def lines(part: str) -> list[dict[str, Any]]:
    """Return the lines of a part."""
    found = map(json.loads, RESULTS.read_text().splitlines())
    return [line for line in found if line["part"] == part]


def to_text(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heads = list(heads)
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n"


def bytes_table() -> str:
    heads = ("messages", "values", "d", "k", "ours", "NNCodec", "ours is smaller by",
             "NNCodec's payloads alone", "NNCodec, its defaults")  # fmt: skip
    return to_text(heads, (
        [KINDS[line["folder"]], f"`{line['values']}`", f"{line['d']:,}", f"{line['k']:,}",
         f"{line['ours']:,.0f}", f"{line['nncodec']:,.0f}", f"{1 - line['ours'] / line['nncodec']:.1%}",
         f"{line['nncodec_bare']:,.0f}", f"{line['nncodec_default']:,.0f}"]
        for line in lines("messages")
    ))  # fmt: skip


def time_table() -> str:
    heads = ("messages", "values", "encode: ours, ms", "NNCodec", "times", "its C++ alone, times",
             "again: ours, ms", "times", "its C++ alone, times", "decode: ours, ms", "NNCodec", "times",
             "again: times")  # fmt: skip
    rows = []
    for line in lines("messages"):
        row = [KINDS[line["folder"]], f"`{line['values']}`"]
        for name, digits in (("encode", 0), ("encode_again", 0), ("decode", 1), ("decode_again", 1)):
            found = line[f"{name}_ms"]
            ratios = [found[who] / found["ours"] for who in ("nncodec", "nncodec_bare") if who in found]
            shown = [] if name == "decode_again" else [f"{found['ours']:.2f}"]
            shown += [] if "again" in name else [f"{found['nncodec']:.1f}"]
            row += [*shown, *(f"{ratio:.{digits}f}" for ratio in ratios)]
        rows.append(row)
    return to_text(heads, rows)


def formula_table() -> str:
    heads = ("signs of", "k", "GRACE", "STC, by its formula", "STC, coded", "NNCodec", "ours",
             "ours against STC")  # fmt: skip
    return to_text(heads, (
        [KINDS[line["folder"]], f"{line['k']:,}", *(f"{line[name]:,.0f}" for name in
         ("grace", "stc_formula", "stc", "nncodec", "ours")), f"{line['ours'] / line['stc'] - 1:+.1%}"]
        for line in lines("messages") if line["values"] == "sign"
    ))  # fmt: skip


def federation_table(model: str) -> str:
    """Return the table of a model's federations: means over the seeds, bytes of all clients."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in lines("federation"):
        if line["model"] == model:
            runs.setdefault(line["name"], []).append(line)
    targets = TARGETS[model]
    heads = ["who", "compressor, both ways", "accuracy, last 5 rounds", "up", "down", "of it first downloads"]
    heads += [f"rounds until {target:.0%}, by seed" for target in targets]
    heads += [f"bytes until {target:.0%}" for target in targets]
    heads += [f"bytes until {target:.0%}, without first downloads" for target in targets]
    return to_text(heads, (
        [each[0]["who"], f"`{name}`" if each[0]["who"] == "ours" else name,
         f"{100 * statistics.fmean(a for line in each for a in line['accuracy'][-5:]):.2f}",
         *(format_bytes(statistics.fmean(sums)) for sums in zip(*map(sum_bytes, each), strict=True)),
         *(", ".join(str(rounds_until(line, target) or "–") for line in each) for target in targets),
         *(bytes_until(each, target, False) for target in targets),
         *(bytes_until(each, target, True) for target in targets)]
        for name, each in runs.items()
    ))  # fmt: skip


def sum_bytes(line: dict[str, Any]) -> tuple[int, int, int]:
    """Return a run's bytes up, down, and those of first downloads."""
    return sum(line["up"]), sum(line["down"]), line["first"]


def rounds_until(line: dict[str, Any], target: float) -> int | None:
    """Return after how many rounds the accuracy is first at a target; None if it never is."""
    return next((t for t, accuracy in enumerate(line["accuracy"], 1) if accuracy >= target), None)


def bytes_until(runs: list[dict[str, Any]], target: float, without_first: bool) -> str:
    """Return the mean bytes of the runs until the accuracy is first at a target."""
    found = []
    for line in runs:
        rounds = rounds_until(line, target)
        if rounds is None:
            return "not by every seed"
        found.append(sum(line["up"][:rounds] + line["down"][:rounds]) - without_first * line["first"])
    return format_bytes(statistics.fmean(found))


def lowrank_table() -> str:
    heads = ("rank", "who", "bytes", *(f"error, round {t}" for t in SHOWN), "ms")
    return to_text(heads, (
        [str(line["rank"]), name_of(line["name"]), f"{line['bytes']:,}",
         *(f"{line['errors'][t - 1]:.3f}" for t in SHOWN), f"{line['ms']:.1f}"]
        for line in lines("lowrank")
    ))  # fmt: skip


def name_of(name: str) -> str:
    return {"hook, warm": "PyTorch's hook, warm start", "hook, drawn": "PyTorch's hook, drawn start",
            "hook, ours": "PyTorch's hook, our start"}.get(name, f"`{name}`")  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "bytes": bytes_table, "times": time_table, "formulas": formula_table,
    "federation, lenet": lambda: federation_table("lenet"),
    "federation, cnn": lambda: federation_table("cnn"), "lowrank": lowrank_table,
}  # fmt: skip


def main() -> None:
    for name, make in TABLES.items():
        print(f"{name}:\n\n{make()}")


if __name__ == "__main__":
    main()
