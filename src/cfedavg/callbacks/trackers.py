"""Trackers: callbacks that log a run to TensorBoard or to Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cfedavg.callbacks.callback import Callback, Start
from cfedavg.core.errors import InputError, show
from cfedavg.core.files import read_input, write_atomic
from cfedavg.core.run_files import Record
from cfedavg.core.totals import Totals, numbers_of


class Tracker(Callback):
    """The base class of trackers: `log` receives the numbers of a round, and the bytes sent up to then.

    A resumed run continues its curves: its steps go on from the rounds that are done.
    """

    def __init__(self) -> None:
        self._totals = Totals()

    def on_begin(self, start: Start) -> None:
        self._totals = Totals()
        for row in start.rows:
            self._totals.add(row)

    def on_row(self, row: Record) -> bool | None:
        self._totals.add(row)
        self.log(numbers_of(row) | self._totals.columns(), row["round"] + 1)
        return None

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Log the numbers of a round; `step` is the number of rounds that are done."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Writes a run's metrics for TensorBoard, into `folder` or into `tensorboard` in the run's folder."""

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        if not isinstance(folder, str | Path | None):
            raise InputError(f"TensorBoard: `folder` must be the path of a folder, got {show(folder)}")
        self._folder, self._writer = folder, import_extra("tensorboard", "torch.utils.tensorboard")

    def on_begin(self, start: Start) -> None:
        super().on_begin(start)
        folder = Path(self._folder) if self._folder else start.folder and start.folder / "tensorboard"
        if folder is None:
            raise InputError(
                '`callbacks`: TensorBoard needs a `folder`, or a run with `out`, as in out="runs/a"'
            )
        # Steps that an interrupted run logged after its last checkpoint are hidden from step `purge_step` on.
        self.writer = self._writer.SummaryWriter(str(folder), purge_step=len(start.rows) + 1)
        lines = (f"    {line}" for line in start.config.to_toml().splitlines())
        self.writer.add_text("config", "\n".join(lines), len(start.rows))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def on_end(self, error: BaseException | None) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class Wandb(Tracker):
    """Logs a run to Weights & Biases, in this project; other arguments are those of `wandb.init`.

    The id of the W&B run lies in the run's folder, so that a resumed run continues it. Set the environment
    variable WANDB_MODE=offline to log without a network.
    """

    def __init__(self, project: str = "cfedavg", **init: Any) -> None:
        super().__init__()
        self._init, self._wandb = {"project": project, **init}, import_extra("wandb", "wandb")

    def on_begin(self, start: Start) -> None:
        super().on_begin(start)
        how: dict[str, Any] = {"config": dataclasses.asdict(start.config), "reinit": "create_new"}
        if start.folder:
            kept = start.folder / "wandb-id.txt"
            how |= {"dir": str(start.folder), "name": start.folder.name}
            if start.rows and kept.exists():
                how |= {"id": read_input(kept).decode(), "resume": "allow"}
        try:
            self.logged = self._wandb.init(**how | self._init)
        except TypeError as error:  # an argument that wandb.init does not have
            raise InputError(f"`callbacks`: Wandb has a wrong argument: {error}") from None
        except self._wandb.Error as error:
            why = str(error).rstrip(".")
            raise InputError(
                f"Weights & Biases cannot start: {why}; set WANDB_MODE=offline to log without it"
            ) from None
        if start.folder:
            write_atomic(kept, self.logged.id.encode())

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.log(numbers, step=step)

    def on_end(self, error: BaseException | None) -> None:
        if hasattr(self, "logged"):
            self.logged.finish(exit_code=0 if error is None else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def make_trackers(names: Iterable[str]) -> list[Callback]:
    """Return a tracker for each name; raise InputError if a name is unknown or its library is missing."""
    made = list[Callback]()
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"`track` must be {' or '.join(TRACKERS)}, got {name!r}")
        made.append(TRACKERS[name]())
    return made


def import_extra(name: str, module: str) -> Any:
    """Return the imported module of a tracker's library `name`; raise InputError if it is not installed."""
    try:
        importlib.import_module(name)
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f'{name} is not installed here: pip install "cfedavg[{name}]"') from None
