"""A cell that is a training run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfedavg.core.config import Config
from cfedavg.core.errors import CannotResume, Diverged
from cfedavg.core.run_files import METRICS, Record, read_rows
from cfedavg.reproduce.archive import rounded
from cfedavg.simulate.run import Observer, run

# The columns that figures and claims are made of; bytes and counts are whole numbers and stay exact.
COLUMNS = (
    "train_loss", "test_loss", "test_accuracy", "client_accuracy_min", "uplink_bytes", "model_sizes_sent",
    "delta_norm2", "delta_norm", "error_norm2", "error_norm", "alpha", "snr_min", "local_steps_mean",
    "simulated_seconds",
)  # fmt: skip


def measure(settings: Mapping[str, Any], work: Path, how: Mapping[str, Any], watch: Observer) -> Record:
    """Trains in the folder `work`, going on with what is there, and gives the columns of all rounds."""
    config = Config.from_dict(settings).replace(**how)
    # A checkpoint holds everyone's residuals; four in a run are a compromise. Stopped politely, it saves too.
    config = config.replace(checkpoint_every=max(1, config.rounds // 4))
    try:
        rows = _rows(config, work, watch)
    except Diverged as error:  # which is a result too
        return _columns(read_rows(work / METRICS)) | {"diverged": str(error)}
    return _columns(rows)


def _rows(config: Config, work: Path, watch: Observer) -> list[Record]:
    try:
        return run(config, out=work, resume=work.exists(), observer=watch, draw=False).rows
    except CannotResume as error:
        watch.say(f"{work.name} is done again from its first round ({error})")
        shutil.rmtree(work)
        return run(config, out=work, observer=watch, draw=False).rows


def _columns(rows: list[Record]) -> Record:
    known = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return {name: [rounded(row.get(name)) for row in rows] for name in known}


def rounds_done(work: Path) -> int:
    """How far a run has come that is not done yet."""
    return len(read_rows(work / METRICS))
