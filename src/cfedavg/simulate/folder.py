"""The folder of a simulation: config.toml, metrics.jsonl, the checkpoint, and residuals kept on disk.

A crash at any moment leaves these files consistent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from cfedavg.core import run_files
from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.files import exists, lock_folder, make_folder, read_file, sync, write_atomic
from cfedavg.core.run_files import Record
from cfedavg.core.tensors import save_tensors
from cfedavg.simulate.host_copies import Copy, HostCopies
from cfedavg.simulate.residual_files import sweep
from cfedavg.simulate.residuals import InMemory
from cfedavg.simulate.state import State, load, save

ENGINE = "engine.txt"  # which engine ran, and why


class Folder:
    """The folder of a run.

    Each round appends a row of metrics. A checkpoint holds a checksum of the rows before the checkpoint.
    """

    def __init__(self, path: Path, writer: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._saving: Future[None] | None = None
        self._copies = HostCopies()
        self.path, self.residuals = path, path / run_files.RESIDUALS
        self._metrics, self._checkpoint = path / run_files.METRICS, path / run_files.CHECKPOINT
        self._rows, self._options, self._engines = 0, dict[str, Any](), ""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Folder]:
        """Create the folder and lock it inside `with`, so that only one run writes to the folder."""
        make_folder(path, "`out`")
        busy = f"`out`: another run is writing to {path} right now"
        with lock_folder(path, busy), ThreadPoolExecutor(1, "checkpoint") as writer:
            yield cls(path, writer)

    def begin(
        self, config: Config, identity: int, start: State, *, resume: bool
    ) -> tuple[State, list[Record]]:
        """Return the state and the rows of metrics from which the run starts.

        If there is a checkpoint to resume, they are the checkpoint's, otherwise `start` and no rows.
        """
        begun = self._checkpoint.exists() or bool(run_files.read_rows(self._metrics))
        if (self.path / run_files.FEDERATION).exists():
            raise InputError(f"`out`: {self.path} holds a federation: choose another folder for a simulation")
        if begun and not resume:
            raise InputError(f"`out`: {self.path} holds a run already; set `resume` or choose another folder")
        state, rows = start, list[Record]()
        if begun:
            self._check_files(config)
        if self._checkpoint.exists():
            state, rows = self._restore(config, identity, start)
        # The code above changes no file, so a refused resume leaves the folder unchanged.
        sweep(self.residuals, state.residuals)
        residuals = start.residuals.adopt(state.residuals, start.residuals.shape(start.x))
        write_atomic(self.path / run_files.CONFIG, config.to_toml().encode())
        self.rewrite(rows)
        if state.t:
            with suppress(OSError):  # no run depends on this file
                self._engines = read_file(self.path / ENGINE).decode(errors="replace")
        self._options = run_files.fixed_options(config)
        return dataclasses.replace(state, residuals=residuals), rows

    def _check_files(self, config: Config) -> None:
        """Raise InputError if a file of the run is missing, or if `config` changes an option it must not."""
        file, done = self.path / run_files.CONFIG, len(run_files.read_rows(self._metrics))
        if not file.exists():
            raise CannotResume(f"{file} is missing; put the file back, or start again in another folder")
        try:
            old = read_config(file)
        except InputError as error:
            raise CannotResume(str(error)) from None
        run_files.check_same(old, config, self.path)
        saved = (self.path / run_files.MODEL).exists() or 0 < old.checkpoint_every < done
        if saved and not self._checkpoint.exists():
            raise CannotResume(
                f"{self._checkpoint} is missing, so the run of {done} rounds cannot go on; "
                "choose another folder to start again"
            )

    def _restore(self, config: Config, identity: int, like: State) -> tuple[State, list[Record]]:
        """Return the checkpoint's state and the rows before it; rounds after the checkpoint run again."""
        state, about = load(self._checkpoint, identity, like, self.residuals, config.clients)
        run_files.check_options(about.get("options", {}), config, self.path / run_files.CONFIG)
        for path in sorted(state.residuals.paths()):
            if not exists(path):
                raise CannotResume(f"the residual file {path} is missing; start again in another folder")
        rows = run_files.read_rows(self._metrics)[: state.t]
        if len(rows) != state.t or any(row.get("round") != t for t, row in enumerate(rows)):
            raise CannotResume(
                f"{self._metrics} does not hold rounds 0 to {state.t - 1}, "
                "which the checkpoint needs; start again in another folder"
            )
        if not run_files.are_usable(rows) or about.get("rows") not in (None, run_files.checksum_rows(rows)):
            raise CannotResume(
                f"{self._metrics} was changed after the checkpoint was written; "
                "restore the file, or start again in another folder"
            )
        if state.t > config.rounds:
            raise InputError(
                f"cannot resume: `rounds` is {config.rounds}, "
                f"but the run in {self.path} has done {state.t} rounds; set `rounds` to {state.t} or more"
            )
        return state, rows

    def append(self, row: Record) -> None:
        """Append a row to metrics.jsonl."""
        try:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(run_files.format_row(row))
            self._rows = run_files.checksum_rows([row], self._rows)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self._metrics} ({error.strerror})") from None

    def rewrite(self, rows: list[Record]) -> None:
        """Replace the content of metrics.jsonl by these rows."""
        write_atomic(self._metrics, "".join(map(run_files.format_row, rows)).encode())
        self._rows = run_files.checksum_rows(rows)

    def checkpoint(self, state: State, identity: int, beside: bool = False) -> None:
        """Save a state: first sync rows and residuals to disk, then write the checkpoint that needs both.

        With `beside`, a thread does it, and the next call raises the thread's error. Use this for a state
        whose residuals are in memory: threads must not delete residual files.
        """
        if self._saving:
            self._saving.result()
        about = {"identity": identity, "rows": self._rows, "options": self._options}
        self._saving = self._writer.submit(self._save, state, about, self._copies.begin(state.x.device))
        if not beside:
            self._saving.result()

    def _save(self, state: State, about: dict[str, Any], copy: Copy) -> None:
        try:
            sync(self._metrics)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self._metrics} ({error.strerror})") from None
        state.residuals.flush()
        save(state, self._checkpoint, about, copy)
        state.residuals.settle()
        if isinstance(state.residuals, InMemory):
            sweep(self.residuals, state.residuals)  # delete files if residuals were on disk before a resume

    def add_engines(self, lines: str) -> None:
        """Append lines to engine.txt; a run that resumes no checkpoint replaces the file of an older run."""
        self._engines += lines
        write_atomic(self.path / ENGINE, self._engines.encode())

    def save_models(self, model: nn.Module, server: nn.Module | None, iterate: nn.Module | None) -> None:
        """Write the state_dict of each given model; a tied parameter is written under each of its names."""
        models = {run_files.MODEL: model, run_files.SERVER_MODEL: server, "iterate.safetensors": iterate}
        for name, each in models.items():
            if each is not None:
                tensors = {key: tensor.detach().clone() for key, tensor in each.state_dict().items()}
                save_tensors(tensors, self.path / name)
