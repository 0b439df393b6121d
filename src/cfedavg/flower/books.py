"""A federation's folder: the same config.toml and metrics.jsonl as a simulation's, nodes.jsonl, the state.

A round's rows are part of the state that ends it, so that after a kill at any moment the files can be
brought in step with it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cfedavg.config import APP, Config
from cfedavg.errors import Busy, InputError
from cfedavg.federation.protocol import Server, restored
from cfedavg.federation.store import FILE, OtherModel, Served, ServerStore, as_tensor, new_generation
from cfedavg.files import make_folder, sync, tidy, write_atomic
from cfedavg.flower.form import Form
from cfedavg.folder import CONFIG, FEDERATION, METRICS, as_line, read_rows
from cfedavg.metrics import Record
from cfedavg.tensors import save_tensors

NODES, STATE = "nodes.jsonl", "state"
WHOLE = "whole"
HANDOVER = 20.0  # seconds: after its SuperLink has died, a ServerApp lives on for up to nine


class Books:
    """One server at a time keeps them: it holds a lock for as long as the `with` lasts."""

    def __init__(
        self, out: Path, config: Config, form: Form, stays: Mapping[str, Any], also: Mapping[str, Any]
    ) -> None:
        """`stays`: options that a resume must not change; `also`: others that a reader wants to know."""
        self.out, self.config, self.form, self.stays, self.also = out, config, form, stays, also
        self.rows: list[Record] = []

    @contextmanager
    def kept(self) -> Iterator[Books]:
        """Makes the folder and takes the lock; waits a while for a server that is about to end."""
        if not (self.out / STATE / FILE).exists() and read_rows(self.out / METRICS):
            raise InputError(
                f"out: {self.out / METRICS} is of a run that is no federation, or whose state is gone; "
                "give another folder"
            )
        make_folder(self.out, "out")
        with ExitStack() as stack:
            self._lock(stack)
            tidy(self.out)
            if not (self.out / FEDERATION).exists():  # looked at under the lock: it gets one name only
                write_atomic(self.out / FEDERATION, secrets.token_hex(16).encode())
            self.federation = (self.out / FEDERATION).read_text(encoding="ascii")
            self.store = ServerStore(self.out / STATE, self.federation, self.form.layout)
            yield self

    def _lock(self, stack: ExitStack) -> None:
        end = time.monotonic() + HANDOVER
        while True:
            try:
                stack.enter_context(ServerStore(self.out / STATE, "", self.form.layout).locked())
                return
            except Busy:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def begin(self, x: NDArray[np.float32], whole: bytes, *, resume: bool, from_backup: bool) -> Served:
        """The state to go on from; a new one is durable before anything is sent."""
        served, form = self._load(), hashlib.sha256(self.form.text.encode()).hexdigest()
        if served and not resume:
            raise InputError(f"out: {self.out} holds a federation already; resume it, or give another folder")
        if served and served.facts["form"] != form:
            raise InputError(f"{self.out / STATE} is of another model: what is not compressed differs")
        if served and served.server.t > self.config.rounds:
            raise InputError(
                f"num_rounds is {self.config.rounds}, but the federation in {self.out} has done "
                f"{served.server.t}"
            )
        if served:
            self._check_options(served.facts["options"])
        if served is None:
            facts = {"form": form, "options": dict(self.stays), "numbers": {}, "norms": []}
            served = Served(Server(torch.from_numpy(x)), extra={WHOLE: as_tensor(whole)}, facts=facts)
        elif from_backup:
            server = restored(served.server, new_generation(served.server))
            served = replace(served, server=server)
        self._read_rows(served)
        self.meet(served)
        return served

    def _load(self) -> Served | None:
        try:
            return self.store.load()
        except OtherModel as error:
            raise InputError(f"{error}; if the model is the same, `whole` is another") from None

    def meet(self, served: Served) -> None:
        """Makes the state durable, and says how many clients there are, which only their coming tells."""
        self.store.save(served)
        config = self.config
        if config.dataset == APP:
            config = config.replace(clients=max(1, len(served.clients) + len(served.facts["numbers"])))
        options = "".join(f"# {name}: {value}\n" for name, value in self.also.items() if value is not None)
        text = f"{config.to_toml()}\n# Of the server\n{options}"
        write_atomic(self.out / CONFIG, text.encode())

    def _check_options(self, before: dict[str, Any]) -> None:
        """Residuals are in the units of the update, draws are keyed by the seed, curves are of one run."""
        for name, now in self.stays.items():
            if before[name] != now:
                raise InputError(f"{name} is {now!r}, but the federation in {self.out} has {before[name]!r}")

    def _read_rows(self, served: Served) -> None:
        """Brings both files in step with the state: what is after it goes, what it ended with is there."""
        t, last = served.server.t, served.facts.get("last", {})
        ended = [last["row"]] if last else []
        rows = [row for row in read_rows(self.out / METRICS) if row.get("round", t) < t - len(ended)] + ended
        if [row["round"] for row in rows] != list(range(t)):
            raise InputError(
                f"resume: {self.out / METRICS} does not hold rounds 0 to {t - 1}, which the state needs"
            )
        before = [row for row in read_rows(self.out / NODES) if row.get("round", t) < t - len(ended)]
        self.rows = rows
        for name, lines in ((METRICS, rows), (NODES, before + last.get("nodes", []))):
            write_atomic(self.out / name, "".join(map(as_line, lines)).encode())

    def end_round(self, served: Served, row: Record, nodes: list[Record]) -> Served:
        """Makes the end of a round durable, and then writes its rows where everyone reads them."""
        served = replace(served, facts={**served.facts, "last": {"row": row, "nodes": nodes}})
        for name in (
            METRICS,
            NODES,
        ):  # of the last round a power cut may take the lines: the state holds them
            with self._writing(name) as path:
                sync(path)
        self.store.save(served)
        self.rows.append(row)
        self._append(METRICS, [row])
        self._append(NODES, nodes)
        return served

    def _append(self, name: str, rows: list[Record]) -> None:
        with self._writing(name) as path, path.open("a", encoding="utf-8") as file:
            file.write("".join(map(as_line, rows)))

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self.out / name
        except OSError as error:
            raise InputError(f"out: cannot write {self.out / name} ({error.strerror})") from None

    def close(self, served: Served) -> None:
        """The model, and pictures, once the last round is over."""
        from cfedavg.report import write_run_pictures  # matplotlib, only now

        arrays = self.form.join(served.server.x.numpy(), whole_of(served))
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        save_tensors(tensors, self.out / "model.safetensors")
        if self.rows:
            write_run_pictures(self.out)


def whole_of(served: Served) -> bytes:
    """What of the model travels whole."""
    return served.extra[WHOLE].numpy().tobytes()


def with_whole(served: Served, whole: bytes) -> Served:
    """The state with another part of the model that travels whole."""
    return replace(served, extra={**served.extra, WHOLE: as_tensor(whole)})


def with_facts(served: Served, **facts: Any) -> Served:
    """The state with these facts."""
    return replace(served, facts={**served.facts, **facts})
