"""Requests to the SuperLink through the command `flwr`: register nodes, start runs and follow them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cfedavg.core import errors
from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.launch.processes import Process, Processes
from cfedavg.launch.services import POLL, SuperLink, SuperNode, format_toml, get_last_line, read_log

COMMAND = 120.0  # time limit of a `flwr` command in seconds; on an idle machine a command takes 2
SETTLED = 60.0  # longest wait in seconds for a run's final status after its log has ended; 2 if idle
KNOWN = "already in use"  # part of the SuperLink's error about a key that is registered already
ONGOING, DONE = ("pending", "starting", "running"), "finished:completed"
UNKNOWN = "unknown"  # the status of a run if the SuperLink does not tell it


class RunFailed(RuntimeError):
    """An error: a run failed for a reason other than bad input (InputError)."""


class Status(NamedTuple):
    """A run's status in Flower's words (`running`, `finished:completed`, ...), and details of the status."""

    text: str
    details: str


class Control:
    """The administrator of a SuperLink: it registers nodes and starts runs with the command `flwr`."""

    def __init__(self, processes: Processes, link: SuperLink, logs: Path) -> None:
        self._processes, self._home, self._logs = processes, {"FLWR_HOME": str(link.home)}, logs
        where = format_toml({"address": link.address, "root-certificates": str(link.files.ca)})
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}'
        write_atomic(link.home / "config.toml", text.encode())

    def ask(self, *command: str | Path) -> dict[str, Any]:
        """Return the JSON reply to a `flwr` command; the key `success` says whether the command succeeded."""
        name = f"`flwr {command[0]}`"
        try:
            done = subprocess.run(
                ["flwr", *command, "--format", "json"],
                env={**self._processes.environment, **self._home},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"{name} did not answer within {COMMAND:g} s; try again") from None
        try:
            reply: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            why = get_last_line(done.stderr.decode(errors="replace"))
            raise InputError(f"{name} failed: {why}") from None
        return reply

    def register(self, nodes: Sequence[SuperNode]) -> None:
        """Register the public keys of `nodes` at the SuperLink; skip keys that are registered already."""

        def register_one(node: SuperNode) -> None:
            reply = self.ask("supernode", "register", node.key.public, "here", "--name", node.name)
            if not reply["success"] and KNOWN not in reply["error-message"]:
                raise InputError(f"{node.name} is not registered: {get_last_line(reply['error-message'])}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each call starts a `flwr` process, which is slow
            list(pool.map(register_one, nodes))

    def run(self, app: Path, config: Mapping[str, object]) -> AppRun:
        """Start the Flower app in the folder `app`; `config` overrides settings in its pyproject.toml."""
        logs = [re.fullmatch(r"run([0-9]{1,9})\.log", path.name) for path in self._logs.iterdir()]
        log = self._logs / f"run{max((int(found[1]) for found in logs if found), default=-1) + 1}.log"
        command: list[str | Path] = ["flwr", "run", app, "here", "--stream"]
        if config:
            overrides = log.with_suffix(".toml")
            write_atomic(overrides, format_toml(config).encode())
            command += ["--run-config", overrides]
        return AppRun(self, self._processes.start(command, log, self._home), log)


class AppRun:
    """A run of a Flower app. A `flwr` process follows the run and writes the ServerApp's output to `log`."""

    def __init__(self, control: Control, follower: Process, log: Path) -> None:
        self.log, self._control, self._follower = log, control, follower
        self.id = self._await_start(time.monotonic() + COMMAND)

    def _await_start(self, end: float) -> int:
        """Wait until the SuperLink has started the run, at most until the time `end`; return the run's id."""
        while True:
            # Before the log is read: the `flwr` process may write the id and end in between.
            waiting = self.followed and time.monotonic() < end
            text = read_log(self.log)
            if found := re.search(r"started run (\d+)\s", text):
                return int(found[1])
            if not waiting:
                raise InputError(f"the run did not start: {get_last_line(text)} (see {self.log})")
            time.sleep(POLL)

    @property
    def followed(self) -> bool:
        """Whether the `flwr` process still follows the run; it ends when the run or the SuperLink ends."""
        return self._follower.poll() is None

    def status(self) -> Status:
        """Ask the SuperLink for the run's status."""
        reply = self._control.ask("ls", "here", "--run-id", str(self.id))
        if not reply["success"]:
            return Status(UNKNOWN, get_last_line(reply["error-message"]))
        found = [Status(run["status"], run["status-details"]) for run in reply["runs"]]
        return found[0] if found else Status(UNKNOWN, "")

    def wait(self, limit: float) -> Status:
        """Wait until the run or the SuperLink ends or `limit` seconds pass; return the last known status."""
        end = time.monotonic() + limit
        while self.followed and time.monotonic() < end:
            time.sleep(POLL)
        end = min(end, time.monotonic() + SETTLED)  # the log ends a moment before the run
        while (status := self.status()).text in (*ONGOING, UNKNOWN) and time.monotonic() < end:
            time.sleep(POLL)
        return status

    def check(self) -> None:
        """Raise an error if the run failed: an InputError if the run's log ends with one, else RunFailed."""
        status = self.wait(SETTLED)
        if status.text == DONE:
            return
        module = re.escape(InputError.__module__)
        raised = re.findall(rf"^{module}\.(\w+): (.*)$", read_log(self.log), re.MULTILINE)
        found = getattr(errors, raised[-1][0], None) if raised else None  # the name may be any text
        if isinstance(found, type) and issubclass(found, InputError):
            raise InputError(raised[-1][1])
        raise RunFailed(f"the run ended with status {status.text}: {status.details} (see {self.log})")
