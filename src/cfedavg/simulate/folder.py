"""The folder of a simulation: config.toml, metrics.jsonl, the checkpoint, and residuals kept on disk.

A crash at any moment leaves these files consistent.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import nn

from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.files import lock_folder, make_folder, read_file, sync, write_atomic
from cfedavg.core.run_files import (
    CHECKPOINT,
    CONFIG,
    FEDERATION,
    METRICS,
    MODEL,
    RESIDUALS,
    SERVER_MODEL,
    Record,
    are_usable,
    check_options,
    check_same,
    checksum_rows,
    fixed_options,
    format_row,
    read_rows,
)  # fmt: skip
from cfedavg.core.tensors import save_tensors
from cfedavg.simulate.residuals import InMemory, OnDisk, sweep
from cfedavg.simulate.state import State, Vouched, load, save

ENGINE = "engine.txt"  # which engine ran, and why


class Folder:
    """The folder of a run. Inside `with`, the folder is locked, so that only one run writes to the folder.

    Each round appends a row of metrics. A checkpoint holds a checksum of the rows before the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.residuals = path, path / RESIDUALS
        self._lock = ExitStack()
        self._rows, self._options = 0, dict[str, Any]()

    def __enter__(self) -> Folder:
        make_folder(self.path, "`out`")
        self._lock.enter_context(
            lock_folder(self.path, f"`out`: another run is writing to {self.path} right now")
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def begin(
        self, config: Config, identity: int, start: State, *, resume: bool
    ) -> tuple[State, list[Record]]:
        """Return the first state and rows: those of the checkpoint to resume, else `start` and no rows."""
        begun = (self.path / CHECKPOINT).exists() or bool(read_rows(self.path / METRICS))
        if (self.path / FEDERATION).exists():
            raise InputError(f"`out`: {self.path} holds a federation: choose another folder for a simulation")
        if begun and not resume:
            raise InputError(f"`out`: {self.path} holds a run already; set `resume` or choose another folder")
        state, rows = start, list[Record]()
        if begun:
            if not (self.path / CONFIG).exists():
                raise CannotResume(f"{self.path / CONFIG} is missing; put the file back, or start again")
            try:
                old = read_config(self.path / CONFIG)
            except InputError as error:
                raise CannotResume(str(error)) from None
            check_same(old, config, self.path)
            self._check_checkpoint(old)
        if begun and (self.path / CHECKPOINT).exists():
            state, rows = self._restore(config, identity, start)
            if state.t > config.rounds:
                raise InputError(
                    f"cannot resume: `rounds` is {config.rounds}, "
                    f"but the run in {self.path} has done {state.t} rounds"
                )
        # The code above changes no file, so a refused resume leaves the folder unchanged.
        sweep(self.residuals, state.residuals)
        residuals = start.residuals.adopt(state.residuals, start.x)
        write_atomic(self.path / CONFIG, config.to_toml().encode())
        self.rewrite(rows)
        self._options = fixed_options(config)
        return dataclasses.replace(state, residuals=residuals), rows

    def _check_checkpoint(self, config: Config) -> None:
        """Raise CannotResume if the checkpoint is missing although the run must have written one."""
        done, every = len(read_rows(self.path / METRICS)), config.checkpoint_every
        far = (self.path / MODEL).exists() or 0 < every < done
        if far and not (self.path / CHECKPOINT).exists():
            raise CannotResume(
                f"{self.path / CHECKPOINT} is missing, so the run of {done} rounds cannot go on; "
                "choose another folder to start again"
            )

    def _restore(self, config: Config, identity: int, like: State) -> tuple[State, list[Record]]:
        """Return the last checkpoint's state and rows; the rounds of later rows will run again."""
        state, vouched = load(self.path / CHECKPOINT, identity, like, self.residuals, config.clients)
        if vouched:
            check_options(vouched.options, config, self.path / CONFIG)
        if isinstance(state.residuals, OnDisk):
            state.residuals.check()
        rows = read_rows(self.path / METRICS)[: state.t]
        if len(rows) != state.t or any(row.get("round") != t for t, row in enumerate(rows)):
            raise CannotResume(
                f"{self.path / METRICS} does not hold rounds 0 to {state.t - 1}, "
                "which the checkpoint needs; start again in another folder"
            )
        if not are_usable(rows) or (vouched and vouched.rows != checksum_rows(rows)):
            raise CannotResume(
                f"{self.path / METRICS} was changed after the checkpoint was written; "
                "restore the file, or start again in another folder"
            )
        return state, rows

    def append(self, row: Record) -> None:
        """Append a row to metrics.jsonl."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(format_row(row))
            self._rows = checksum_rows([row], self._rows)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self.path / METRICS} ({error.strerror})") from None

    def rewrite(self, rows: list[Record]) -> None:
        """Replace the content of metrics.jsonl by these rows."""
        write_atomic(self.path / METRICS, "".join(map(format_row, rows)).encode())
        self._rows = checksum_rows(rows)

    def checkpoint(self, state: State, identity: int) -> None:
        """Save a state: first sync rows and residuals to disk, then write the checkpoint that needs both."""
        try:
            sync(self.path / METRICS)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self.path / METRICS} ({error.strerror})") from None
        state.residuals.flush()
        save(state, self.path / CHECKPOINT, identity, Vouched(self._rows, self._options))
        state.residuals.settle()
        if isinstance(state.residuals, InMemory):
            sweep(self.residuals, state.residuals)  # delete files if residuals were on disk before a resume

    def read_engines(self) -> str:
        """Return the text of engine.txt, empty if the file is unreadable: no run depends on the file."""
        with suppress(OSError):
            return read_file(self.path / ENGINE).decode(errors="replace")
        return ""

    def save_models(self, model: nn.Module, server: nn.Module | None, iterate: nn.Module | None) -> None:
        """Write the state_dict of each given model; a tied parameter is written under each of its names."""
        models = {MODEL: model, SERVER_MODEL: server, "iterate.safetensors": iterate}
        for name, each in models.items():
            if each is not None:
                tensors = {key: tensor.detach().clone() for key, tensor in each.state_dict().items()}
                save_tensors(tensors, self.path / name)
