"""A federation's folder: config.toml and metrics.jsonl as in a simulation, nodes.jsonl, and the state.

The state stored at the end of a round also holds that round's rows of metrics. So if the server is killed at
any moment, the next start can make the files match the state.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

from cfedavg.algorithm import ServerMemory
from cfedavg.core import run_files
from cfedavg.core.config import APP, Config
from cfedavg.core.errors import Busy, InputError
from cfedavg.core.files import exists, make_folder, read_file, remove_temporaries, sync, write_atomic
from cfedavg.core.run_files import METRICS, Record, checksum_rows, format_row, read_rows
from cfedavg.core.tensors import save_tensors
from cfedavg.federate import replica as replicas
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import Server, new_generation, restore_backup
from cfedavg.federate.state_file import FILE, OtherCopy, OtherModel
from cfedavg.federate.stores import ServerStore
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import FederationState, FixedOptions, RoundRows

NODES, STATE = "nodes.jsonl", "state"
HANDOVER = 20.0  # seconds to wait for the lock; a ServerApp may run 9 s longer than its SuperLink


@dataclass
class FederationFolder:
    """The folder of a federation. `hold` locks the folder, so that only one server at a time uses it."""

    out: Path
    config: Config
    form: Form
    replica: ModelReplica | None  # None if broadcasts are not compressed
    options: FixedOptions
    also: Mapping[str, Any]  # more options, written to config.toml as comments
    rows: list[Record] = field(default_factory=list)  # of metrics.jsonl

    @contextmanager
    def hold(self) -> Iterator[FederationFolder]:
        """Make the folder and lock it; wait up to `HANDOVER` seconds until another server unlocks it."""
        if not exists(self.out / STATE / FILE) and read_rows(self.out / METRICS):
            raise InputError(
                f"`out`: {self.out / METRICS} exists, but the folder holds no federation's state. "
                "Give another folder."
            )
        make_folder(self.out, "`out`")
        with ExitStack() as stack:
            end = time.monotonic() + HANDOVER
            while True:
                try:
                    stack.enter_context(ServerStore(self.out / STATE, "", self.form.layout).lock())
                    break
                except Busy:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.5)
            remove_temporaries(self.out)
            self.federation = self._read_name()  # under the lock, so that two servers do not make two names
            dtype = self.replica.dtype if self.replica else "float32"
            self.store = ServerStore(self.out / STATE, self.federation, self.form.layout, dtype)
            yield self

    def _read_name(self) -> str:
        """Return the federation's name, which nodes store with their state; draw one for a new folder."""
        path = self.out / run_files.FEDERATION
        if not path.is_symlink() and not exists(path):
            if exists(self.out / STATE / FILE):
                raise InputError(f"`out`: {path} is missing, but the federation needs it. Put the file back.")
            write_atomic(path, secrets.token_hex(16).encode())
        try:
            name = read_file(path).decode(errors="replace")
        except OSError as error:
            raise InputError(f"`out`: cannot read {path} ({error.strerror})") from None
        if not re.fullmatch("[0-9a-f]{32}", name):
            raise InputError(
                f"`out`: {path} must hold the federation's name, 32 characters from 0-9 and a-f, "
                f"got {reprlib.repr(name)}. Put the original file back."
            )
        return name

    def begin(
        self,
        x: NDArray[np.float32],
        uncompressed: bytes,
        memory: ServerMemory,
        *,
        resume: bool,
        from_backup: bool,
    ) -> FederationState:
        """Return the state to start from. This method writes no file: `open` does.

        A new federation starts from the model, which is `x` and `uncompressed`, and from the server's first
        `memory`. With `resume`, the federation starts from the stored state, which is checked.
        """
        state = self._load()
        if state is None:
            sums, server = _sum_rows({METRICS: [], NODES: []}), Server(x)
            if self.replica:
                primary = replicas.begin(x, self.replica, server.stamp.generation, server.t)
                server = replace(server, primary=primary)
            state = FederationState(server, self._form_hash, self.options, uncompressed, sums, memory=memory)
        elif not resume:
            raise InputError(f"`out`: {self.out} holds a federation. Set `resume`, or give another folder.")
        else:
            self._check(state, memory)
            if from_backup:
                held = state.server.primary
                digest = self.replica.digest(held.w) if self.replica and held else None
                server = restore_backup(state.server, new_generation(state.server), digest)
                state = replace(state, server=server)
        self._read = self._read_rows(state)  # by file: the rows that `open` writes
        self.rows = self._read[METRICS]
        return state

    @property
    def _form_hash(self) -> str:
        return hashlib.sha256(self.form.text.encode()).hexdigest()

    def _check(self, state: FederationState, memory: ServerMemory) -> None:
        """Raise InputError if the stored state does not fit the model, the options or `num_rounds`."""
        if state.form != self._form_hash:
            raise InputError(
                f"{self.out / STATE} is of another model: names, shapes or dtypes of the uncompressed arrays "
                "differ. Start with the same model, or give another `out`."
            )
        if state.server.t > self.config.rounds:
            raise InputError(
                f"`num_rounds` is {self.config.rounds}, but the federation in {self.out} has done "
                f"{state.server.t} rounds. Raise `num_rounds`."
            )
        for item in fields(FixedOptions):
            before, now = getattr(state.options, item.name), getattr(self.options, item.name)
            if before != now:
                was = reprlib.repr(before)
                raise InputError(
                    f"`{item.name}` is {now!r}, but the federation in {self.out} has {was}. "
                    "A resume must not change this option."
                )
        with self.store.naming_damage():
            state.check(self.form, self.replica, memory)

    def open(self, state: FederationState) -> None:
        """Write the rows of metrics that `begin` has checked to the files, and store `state` durably.

        Call this before any request is sent.
        """
        for name, rows in self._read.items():
            write_atomic(self.out / name, "".join(map(format_row, rows)).encode())
        del self._read
        self.store_state(state)

    def _load(self) -> FederationState | None:
        try:
            stored = self.store.load()
        except OtherModel as error:
            raise InputError(
                f"{error}; if the model is the same, `uncompressed` differs: give the same as before"
            ) from None
        except OtherCopy:
            which = "does not round" if self.replica and self.replica.rounds_values else "rounds"
            raise InputError(
                f"`compressor_down` is {self.options.compressor_down!r}, but the federation in {self.out} "
                f"began with a compressor that {which} values. Give the `compressor_down` of its config.toml."
            ) from None
        if stored is None:
            return None
        with self.store.naming_damage():
            return FederationState.from_stored(stored)

    def store_state(self, state: FederationState) -> None:
        """Store the state durably, and write config.toml with the present number of clients."""
        self.store.save(state.to_stored())
        config = self.config
        if config.dataset == APP:
            config = config.replace(clients=max(1, len(state.clients) + len(state.lent)))
        options = "".join(f"# {name}: {value}\n" for name, value in self.also.items() if value is not None)
        text = f"{config.to_toml()}\n# Of the server\n{options}"
        write_atomic(self.out / run_files.CONFIG, text.encode())

    def _read_rows(self, state: FederationState) -> dict[str, list[Record]]:
        """Return the rows of metrics of all rounds in the state, by file name.

        The last round's rows come from the state, earlier rows from the files.
        """
        t, last = state.server.t, state.last
        ended = {METRICS: [last.row], NODES: last.nodes} if last else {METRICS: [], NODES: []}
        rows = {}
        for name, last_rows in ended.items():  # stop at the last round, or at a row without a round
            read = read_rows(self.out / name)
            rounds = (row.get("round") for row in read)
            count = sum(1 for _ in takewhile(lambda i: type(i) is int and i < t - 1, rounds))
            rows[name] = read[:count] + last_rows
        if len(rows[METRICS]) != t or any(row["round"] != i for i, row in enumerate(rows[METRICS])):
            raise InputError(
                f"resume: {self.out / METRICS} does not hold rounds 0 to {t - 1}, which the state needs; "
                "put the original file back, or start another federation"
            )
        for name, each in rows.items():
            try:
                found = checksum_rows(each)
            except RecursionError:  # lists nested so deep that they can be read but not written
                found = None
            if found is None or found != state.checksums.get(name):
                raise InputError(
                    f"resume: {self.out / name} was changed after the state was written; "
                    "put the original file back, or start another federation"
                )
        return rows

    def store_round(self, state: FederationState, row: Record, nodes: list[Record]) -> FederationState:
        """Store the state after a round durably, with the round's rows of metrics in it.

        `end_round` later appends these rows to the files.
        """
        sums = _sum_rows({METRICS: [row], NODES: nodes}, state.checksums)
        state = replace(state, last=RoundRows(row, nodes), checksums=sums)
        for name in (METRICS, NODES):  # sync first: the new state lacks the previous round's rows
            with self._writing(name) as path:
                sync(path)
        self.store.save(state.to_stored())
        return state

    def end_round(self, state: FederationState, row: Record, nodes: list[Record]) -> FederationState:
        """Store the state after a round durably, then append the round's rows to the two .jsonl files."""
        state = self.store_round(state, row, nodes)
        self.rows.append(row)
        for name, rows in ((METRICS, [row]), (NODES, nodes)):
            with self._writing(name) as path, path.open("a", encoding="utf-8") as file:
                file.write("".join(map(format_row, rows)))
        return state

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self.out / name
        except OSError as error:
            raise InputError(f"`out`: cannot write {self.out / name} ({error.strerror})") from None

    def round_statistics(self, uncompressed: bytes) -> bytes:
        """Return the uncompressed arrays; round running statistics to bf16 if model copies are rounded."""
        short = bool(self.replica and self.replica.rounds_values)
        return self.form.unpack(self.form.pack(uncompressed, short=short), short=short)

    def held_model(self, state: FederationState) -> NDArray[np.float32]:
        """Return the model that clients train from: their model copy, or the server's x if they keep none."""
        primary = state.server.primary
        if primary is None or self.replica is None:
            x: NDArray[np.float32] = state.server.x
            return x
        w: NDArray[np.float32] = self.replica.model(primary.w)
        return w

    def close(self, state: FederationState) -> None:
        """Write the model and the pictures after the last round."""
        from cfedavg.report import write_run_pictures  # here, as it imports matplotlib

        save_tensors(self.form.join(self.held_model(state), state.uncompressed), self.out / run_files.MODEL)
        if state.server.primary:
            save_tensors(
                self.form.join(state.server.x, state.uncompressed), self.out / run_files.SERVER_MODEL
            )
        if not self.rows:
            return
        try:
            write_run_pictures(self.out)
        except ModuleNotFoundError as error:  # the model and the rows are there: no reason to fail at the end
            log(WARNING, "no pictures are drawn: %s", error)


def _sum_rows(rows: Mapping[str, list[Record]], before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return each file's checksum after `rows` are appended; `before`: the checksums without these rows."""
    return {name: checksum_rows(each, (before or {}).get(name, 0)) for name, each in rows.items()}
