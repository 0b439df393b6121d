"""A run's folder: config.toml, metrics.jsonl and a checkpoint, in step with each other whatever happens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from torch import Tensor

from cfedavg.config import Config, flag, read_config
from cfedavg.errors import InputError
from cfedavg.files import make_folder, sync, write_atomic
from cfedavg.layout import Layout
from cfedavg.metrics import Record
from cfedavg.state import State, load, save

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"

# What may change when a run goes on; everything else decides the result.
MAY_CHANGE = {"rounds", "device", "checkpoint_every"}


class Folder:
    """Rows are appended as rounds end; a checkpoint vouches for the rows before it, and only for those."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, config: Config, *, resume: bool) -> None:
        """Writes the configuration, or checks it against the one that the run began with."""
        begun = (self.path / CONFIG).exists()
        if begun and not resume:
            raise InputError(f"--out: {self.path} holds a run already; add --resume or choose another folder")
        make_folder(self.path, "--out")
        if begun:
            _check_same(read_config(self.path / CONFIG), config, self.path)
        write_atomic(self.path / CONFIG, config.to_toml().encode())

    def restore(self, layout: Layout, like: Tensor) -> tuple[State, list[Record]] | None:
        """The last checkpoint and the rows before it; later rows go, since their rounds run again."""
        checkpoint = self.path / CHECKPOINT
        if not checkpoint.exists():
            self.rewrite([])
            return None
        state = load(checkpoint, layout, like)
        rows = read_rows(self.path / METRICS)[: state.t]
        if len(rows) < state.t:
            raise InputError(
                f"--resume: {self.path / METRICS} has {len(rows)} whole rows, the checkpoint needs {state.t}"
            )
        self.rewrite(rows)
        return state, rows

    def append(self, row: Record) -> None:
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise InputError(f"--out: cannot write {self.path / METRICS} ({error.strerror})") from None

    def rewrite(self, rows: list[Record]) -> None:
        write_atomic(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def checkpoint(self, state: State, layout: Layout) -> None:
        sync(self.path / METRICS)  # the rows first, then the checkpoint that vouches for them
        save(state, self.path / CHECKPOINT, layout)


def read_rows(path: Path) -> list[Record]:
    """The rows of a metrics file up to the first that is not whole."""
    rows: list[Record] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _check_same(old: Config, new: Config, path: Path) -> None:
    for item in dataclasses.fields(Config):
        before, now = getattr(old, item.name), getattr(new, item.name)
        if before == now or (item.name in MAY_CHANGE and not _horizon(item.name, new)):
            continue
        raise InputError(
            f"--resume: {flag(item.name)} is {now!r}, but the run in {path} has {before!r}; "
            "leave it out or start another run"
        )


def _horizon(name: str, config: Config) -> bool:
    """Whether the number of rounds decides the learning rate."""
    return name == "rounds" and config.schedule.strip().startswith(("corollary1", "corollary3"))
