"""The tables of docs/benchmarks.md on both directions, from results/both-ways, and their picture.

python -m bench.both_ways_tables                # prints the tables
python -m bench.both_ways_tables --draw docs/images/both-ways.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.both_ways import METHODS

from cfedavg.core.config import Config
from cfedavg.core.keys import Purpose, key, permutation
from cfedavg.core.units import format_bytes

RESULTS = Path(__file__).parents[1] / "results" / "both-ways"
ROUNDS = (8, 20, 40)
DRAWN = {
    "p2 epochs T100 default": "the default, both ways",
    "p2 epochs T100 int8": "int8(256) both ways",
    "p2 epochs T100 bf16": "bf16 both ways",
    "p2 epochs T100 up only": "the default, uplink only",
    "p2 epochs T33 none": "FedAvg, 30 epochs, 33 rounds",
    "p2 epochs T100 none": "FedAvg",
}
LEAST_DRAWN = 0.85  # accuracy


@dataclass(frozen=True)
class Cell:
    """One run: its options and its columns by round."""

    options: dict[str, Any]
    columns: dict[str, list[Any]]

    def accuracy(self, t: int, column: str = "test_accuracy") -> float:
        """In percent, after t rounds."""
        return 100 * float(self.columns[column][t - 1])

    def last(self, column: str = "test_accuracy") -> float:
        """In percent, mean of the last 5 rounds."""
        return 100 * statistics.mean(self.columns[column][-5:])

    def sum(self, column: str, t: int | None = None) -> int:
        """Bytes of the first t rounds, or of all."""
        return sum(self.columns[column][:t])

    def first(self, t: int | None = None) -> int:
        """Bytes of the clients' first downloads; of FedAvg, a whole model for each client that took part."""
        if "first_download_bytes" in self.columns:
            return self.sum("first_download_bytes", t)
        m, share = self.options["clients"], self.options.get("participation", 1.0)
        sampled, seed = round(share * m), self.options["seed"]
        seen = set[int]()
        for each in range(self.options["rounds"] if t is None else t):
            seen.update(permutation(key(seed, each, 0, Purpose.SAMPLE), m)[:sampled].tolist())
        return len(seen) * self.columns["downlink_bytes"][0] // sampled

    def total(self, t: int | None = None, *, first: bool = True) -> int:
        """Bytes up and down, with or without first downloads."""
        total = self.sum("uplink_bytes", t) + self.sum("downlink_bytes", t)
        return total if first else total - self.first(t)

    def rounds_to(self, accuracy: float) -> int:
        """The first round after which the test accuracy is as high."""
        return next(t for t, each in enumerate(self.columns["test_accuracy"], 1) if each >= accuracy)


def read(name: str) -> dict[str, Cell]:
    """The cells of a grid by their names, without the words that all share."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    found = map(json.loads, lines)
    return {line["cell"].removeprefix("mnist "): Cell(line["options"], line["columns"]) for line in found}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def points(values: Iterable[float], between: str = ", ") -> str:
    """Differences with their signs.

    >>> points([0.25, -1, -0.001])
    '+0.25, −1.00, 0.00'
    """
    rounded = [round(value, 2) for value in values]
    return between.join(f"{value:+.2f}".replace("-", "−") if value else "0.00" for value in rounded)


def percent(values: Iterable[float], between: str = ", ") -> str:
    return between.join(f"{value:.2f}" for value in values)


def kilobytes(value: float) -> str:
    return f"{value / 1000:,.1f}"


def share(base: float, own: float) -> str:
    """How many times fewer bytes."""
    return f"1/{base / own:.3g}"


def mean_of(cells: Sequence[Cell], value: Callable[[Cell], float]) -> float:
    return statistics.mean(map(value, cells))


def grid_table(work: str) -> str:
    """Methods by classes per client: points against no compression, and bytes."""
    cells = read("default")
    header = ["up and down", *(f"p = {p}" for p in (10, 5, 2, 1)), "up, kB", "down, kB", "of FedAvg"]
    return markdown(header, [_grid_row(cells, work, method) for method in METHODS])


def _grid_row(cells: dict[str, Cell], work: str, method: str) -> list[str]:
    up, down = METHODS[method]
    texts = []
    for p in (10, 5, 2, 1):
        own, base = (cells.get(f"p{p} {work} T40 {name} s0") for name in (method, "none"))
        if own is None or base is None:
            texts.append("not run")
        elif method == "none":
            texts.append(percent(map(base.accuracy, ROUNDS), " / "))
        else:
            texts.append(points([own.accuracy(t) - base.accuracy(t) for t in ROUNDS], " / "))
    found = [cell for p in (10, 5, 2, 1) if (cell := cells.get(f"p{p} {work} T40 {method} s0"))]
    base = cells[f"p2 {work} T40 none s0"]
    clients = 100
    sent = mean_of(found, lambda cell: cell.sum("uplink_bytes") / (40 * clients))
    got = mean_of(found, lambda cell: (cell.sum("downlink_bytes") - cell.first()) / (39 * clients))
    ratio = share(base.total(first=False), mean_of(found, lambda cell: cell.total(first=False)))
    name = f"`{up}`" if up == down else f"`{up}` up, `{down}` down"
    return [name, *texts, kilobytes(sent), kilobytes(got), "1" if method == "none" else ratio]


def small_table() -> str:
    """How many numbers a small net should send."""
    cells, rows = read("small"), []
    for comp in (0.97, 0.95, 0.93, 0.9, 0.87, 0.8):
        quick = [
            cells[f"small quick {comp}-int4 s{s}"].accuracy(8) - cells[f"small quick none s{s}"].accuracy(8)
            for s in range(3)
        ]
        own, base = cells[f"small dirichlet {comp}-int4 s0"], cells["small dirichlet none s0"]
        ratio = share(base.total(first=False), own.total(first=False))
        rows.append([
            f"{1 - comp:.0%}", f"{round((1 - comp) * 62_006):,}", points(quick),
            points([own.accuracy(20) - base.accuracy(20)]), points([own.last() - base.last()]), ratio,
        ])  # fmt: skip
    header = ["sent", "numbers", "4 clients, after 8 rounds, by seed", "20 unlike clients, after 20 rounds"]
    return markdown([*header, "after 60 rounds", "of FedAvg"], rows)


def copy_table() -> str:
    """Whether the copy on the grid of bf16 costs accuracy."""
    cells, rows = read("default"), []
    for kind, words in (("epochs", "10 epochs"), ("steps", "10 steps")):
        fp32, bf16 = (cells[f"p2 {kind} T40 97-{name}-copy s0"] for name in ("fp32", "bf16"))
        down = [(cell.sum("downlink_bytes") - cell.first()) / 3900 for cell in (fp32, bf16)]
        rows.append([words, *(percent([cell.last()]) for cell in (fp32, bf16)),
                     points([bf16.last() - fp32.last()]), *map(kilobytes, down)])  # fmt: skip
    header = ["local work", "copy in fp32", "copy on bf16's grid", "difference"]
    return markdown([*header, "down in fp32, kB", "down in bf16, kB"], rows)


def _pairs(grid: str, setting: str, seeds: int) -> tuple[list[Cell], list[Cell]]:
    """FedAvg and the default with the same seeds."""
    cells = read(grid)
    plain, own = (
        [cells[setting.format(method=name, seed=s)] for s in range(seeds)] for name in ("none", "default")
    )
    return plain, own


SETTINGS = {
    "p = 2, all 100": ("totals", "p2 epochs T100 {method} s{seed}", 3),
    "p = 5, all 100": ("totals", "p5 epochs T100 {method} s{seed}", 3),
    "p = 2, 10 of 100": ("partial", "p2 epochs T250 {method} s{seed} of 100", 1),
    "p = 2, 10 of 1,000": ("partial", "p2 epochs T500 {method} s{seed} of 1000", 1),
}


def accuracy_table() -> str:
    """The default beside FedAvg: mean of the last 5 rounds."""
    rows = []
    for words, place in SETTINGS.items():
        plain, own = _pairs(*place)
        columns = ("test_accuracy", "server_test_accuracy")
        differences = [
            points(mine.last(name) - base.last() for base, mine in zip(plain, own, strict=True))
            for name in columns
        ]
        means = [
            mean_of(plain, Cell.last),
            *(mean_of(own, lambda cell, n=name: cell.last(n)) for name in columns),
        ]
        rows.append(
            [words, str(plain[0].options["rounds"]), *(percent([mean]) for mean in means), *differences]
        )
    header = ["clients a round", "rounds", "FedAvg", "w", "x", "w − FedAvg, by seed", "x − FedAvg, by seed"]
    return markdown(header, rows)


def bytes_table() -> str:
    """What the same runs send, means over the seeds."""
    rows = []
    for words, place in SETTINGS.items():
        plain, own = _pairs(*place)
        for name, cells in (("FedAvg", plain), ("default", own)):
            values = [
                mean_of(cells, lambda cell: cell.sum("uplink_bytes")),
                mean_of(cells, lambda cell: cell.sum("downlink_bytes")),
                mean_of(cells, Cell.first), mean_of(cells, Cell.total),
                mean_of(cells, lambda cell: cell.total(first=False)),
            ]  # fmt: skip
            ratios = [
                share(mean_of(plain, lambda cell, f=first: cell.total(first=f)), value)
                for first, value in ((True, values[3]), (False, values[4]))
            ]
            shown = ratios if name == "default" else ["1", "1"]
            rows.append(
                [words, name, *map(format_bytes, values[:4]), shown[0], format_bytes(values[4]), shown[1]]
            )
    header = ["clients a round", "", "up", "down", "of it first downloads", "total", "of FedAvg"]
    return markdown([*header, "total without first downloads", "of FedAvg"], rows)


def speed_table(accuracy: float = 0.97) -> str:
    """Rounds and bytes until the model that clients hold is as good."""
    rows = []
    for words, place in SETTINGS.items():
        plain, own = _pairs(*place)
        texts, totals = [], []
        for cells in (plain, own):
            ends = [cell.rounds_to(accuracy) for cell in cells]
            total, later = (
                statistics.mean(cell.total(t, first=first) for cell, t in zip(cells, ends, strict=True))
                for first in (True, False)
            )
            texts += [", ".join(map(str, ends)), format_bytes(total)]
            totals.append((total, later))
        (base, base_later), (mine, later) = totals
        rows.append([words, *texts, share(base, mine), share(base_later, later)])
    header = ["clients a round", "FedAvg: rounds, by seed", "total", "default: rounds, by seed", "total"]
    return markdown([*header, "of FedAvg", "without first downloads"], rows)


def quick_table() -> str:
    """Flower's quickstart, simulated: five pairs."""
    plain, own = _pairs("quick", "small quick {method} s{seed}", 5)
    rows = []
    for seed, (base, mine) in enumerate(zip(plain, own, strict=True)):
        a, b = base.accuracy(8), mine.accuracy(8)
        x = mine.accuracy(8, "server_test_accuracy")
        ratios = [share(base.total(first=f), mine.total(first=f)) for f in (True, False)]
        rows.append([str(seed), *(f"{each:.2f}" for each in (a, b, x)), points([b - a]),
                     *(kilobytes(cell.total() / 32) for cell in (base, mine)), *ratios])  # fmt: skip
    header = ["seed", "FedAvg", "w", "x", "w − FedAvg", "FedAvg, kB", "default, kB", "of FedAvg"]
    return markdown([*header, "without first downloads"], rows)


TABLES = {
    "grid, 10 epochs": lambda: grid_table("epochs"),
    "grid, 10 steps": lambda: grid_table("steps"),
    "small net": small_table,
    "copy": copy_table,
    "accuracy": accuracy_table,
    "bytes": bytes_table,
    "rounds to 97%": speed_table,
    "quickstart": quick_table,
}


def draw(path: Path) -> None:
    """Accuracy over total bytes of the ways to send less, p = 2, seed 0."""
    from cfedavg.report import Group, Run
    from cfedavg.report.figures import as_png, make_figure
    from cfedavg.report.panels import choose_panels

    cells, groups = read("totals"), []
    for name, label in DRAWN.items():
        cell = cells[f"{name} s0"]
        rows = [
            {
                "round": t,
                "test_accuracy": accuracy if accuracy >= LEAST_DRAWN else None,
                "total_bytes": cell.total(t + 1) - cell.total(t),
            }
            for t, accuracy in enumerate(cell.columns["test_accuracy"])
        ]
        groups.append(Group(label, (Run(path, Config(**cell.options), rows, label),)))
    (panel,) = [panel for panel in choose_panels(groups, "test_accuracy") if panel.name == "metric-total"]
    path.write_bytes(as_png(make_figure([panel], groups, columns=1, width=8.0, height=2.7)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the picture instead")
    given = parser.parse_args()
    if given.draw:
        draw(given.draw)
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}")


if __name__ == "__main__":
    main()
