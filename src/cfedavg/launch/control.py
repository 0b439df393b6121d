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

COMMAND = 120.0  # seconds that a `flwr` command may take; it takes 2 on an idle machine
SETTLED = 60.0  # seconds from the end of a run's log until the SuperLink says how it ended; 2 when it is idle
KNOWN = "already in use"  # the SuperLink's words about a key that it has
ONGOING, DONE = ("pending", "starting", "running"), "finished:completed"
UNKNOWN = "unknown"  # the SuperLink did not answer this time


class RunFailed(RuntimeError):
    """A run ended with an error that is not an InputError."""


class Status(NamedTuple):
    """The status of a run in Flower's words (`running`, `finished:completed`, ...), and its details."""

    text: str
    details: str


class Control:
    """The SuperLink's owner, who registers nodes and starts runs."""

    def __init__(self, processes: Processes, link: SuperLink, logs: Path) -> None:
        self._processes, self._home, self._logs = processes, {"FLWR_HOME": str(link.home)}, logs
        where = format_toml({"address": link.address, "root-certificates": str(link.files.ca)})
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}'
        write_atomic(link.home / "config.toml", text.encode())

    def ask(self, *command: str | Path) -> dict[str, Any]:
        """Return the reply to a command. Its exit code says nothing: `success` in the reply does."""
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
            raise InputError(f"{name} does not answer within {COMMAND:g} s: try again") from None
        try:
            reply: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            why = get_last_line(done.stderr.decode(errors="replace"))
            raise InputError(f"{name} failed: {why}") from None
        return reply

    def register(self, nodes: Sequence[SuperNode]) -> None:
        """Make the nodes' keys known to the SuperLink; a key that it has already stays."""

        def register_one(node: SuperNode) -> None:
            reply = self.ask("supernode", "register", node.key.public, "here", "--name", node.name)
            if not reply["success"] and KNOWN not in reply["error-message"]:
                raise InputError(f"{node.name} is not registered: {get_last_line(reply['error-message'])}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process that mostly starts
            list(pool.map(register_one, nodes))

    def run(self, app: Path, config: Mapping[str, object]) -> AppRun:
        """Start the app in a folder; `config` overrides its pyproject.toml."""
        logs = [re.fullmatch(r"run([0-9]{1,9})\.log", path.name) for path in self._logs.iterdir()]
        log = self._logs / f"run{max((int(found[1]) for found in logs if found), default=-1) + 1}.log"
        command: list[str | Path] = ["flwr", "run", app, "here", "--stream"]
        if config:
            overrides = log.with_suffix(".toml")
            write_atomic(overrides, format_toml(config).encode())
            command += ["--run-config", overrides]
        return AppRun(self, self._processes.start(command, log, self._home), log)


class AppRun:
    """A run of an app. A `flwr` process follows it, and writes the ServerApp's output to the log."""

    def __init__(self, control: Control, follower: Process, log: Path) -> None:
        self.log, self._control, self._follower = log, control, follower
        self.id = self._await_start(time.monotonic() + COMMAND)

    def _await_start(self, end: float) -> int:
        """Wait until the SuperLink has taken the run, and return the run's id."""
        while True:
            waiting = self.followed and time.monotonic() < end  # asked first: it may write and end at once
            text = read_log(self.log)
            if found := re.search(r"started run (\d+)\s", text):
                return int(found[1])
            if not waiting:
                raise InputError(f"the run did not start: {get_last_line(text)} (see {self.log})")
            time.sleep(POLL)

    @property
    def followed(self) -> bool:
        """Whether its log still grows; it ends with the run, and with the SuperLink."""
        return self._follower.poll() is None

    def status(self) -> Status:
        """Ask the SuperLink for the run's status."""
        reply = self._control.ask("ls", "here", "--run-id", str(self.id))
        if not reply["success"]:
            return Status(UNKNOWN, get_last_line(reply["error-message"]))
        found = [Status(run["status"], run["status-details"]) for run in reply["runs"]]
        return found[0] if found else Status(UNKNOWN, "")

    def wait(self, limit: float) -> Status:
        """Wait for the end, for `limit` seconds or while the SuperLink is there; return the last status."""
        end = time.monotonic() + limit
        while self.followed and time.monotonic() < end:
            time.sleep(POLL)
        end = min(end, time.monotonic() + SETTLED)  # its log ends a moment before it does
        while (status := self.status()).text in (*ONGOING, UNKNOWN) and time.monotonic() < end:
            time.sleep(POLL)
        return status

    def check(self) -> None:
        """Raise the error that ended the run, if one did: an InputError as itself, any other as RunFailed."""
        status = self.wait(SETTLED)
        if status.text == DONE:
            return
        module = re.escape(InputError.__module__)
        raised = re.findall(rf"^{module}\.(\w+): (.*)$", read_log(self.log), re.MULTILINE)
        found = getattr(errors, raised[-1][0], None) if raised else None  # a log may name anything
        if isinstance(found, type) and issubclass(found, InputError):
            raise InputError(raised[-1][1])
        raise RunFailed(f"the run ended as {status.text}: {status.details} (see {self.log})")
