"""What the SuperLink is asked through the command `flwr`: to register nodes, and to start and follow runs."""

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
from cfedavg.launch.services import POLL, Link, Node, last_line, plain, toml

COMMAND = 120.0  # seconds that a `flwr` command may take; it takes 2 on an idle machine
SETTLED = 60.0  # seconds from the end of a run's log until the SuperLink says how it ended; 2 when it is idle
KNOWN = "already in use"  # what the SuperLink says of a key that it has
ONGOING, DONE = ("pending", "starting", "running"), "finished:completed"
UNKNOWN = "unknown"  # the SuperLink did not answer this time


class RunFailed(RuntimeError):
    """A run ended with an error that is not a sentence of ours."""


class Status(NamedTuple):
    """Of a run, in Flower's words: `running`, `finished:completed`, ...; and what it says besides."""

    text: str
    details: str


class Control:
    """The SuperLink's owner, who registers nodes and starts runs."""

    def __init__(self, processes: Processes, link: Link, logs: Path) -> None:
        self._processes, self._home, self._logs = processes, {"FLWR_HOME": str(link.home)}, logs
        where = toml({"address": link.address, "root-certificates": str(link.files.ca)})
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}'
        write_atomic(link.home / "config.toml", text.encode())

    def ask(self, *command: str | Path) -> dict[str, Any]:
        """The answer to a command. Its exit code says nothing: `success` in the answer does."""
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
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise InputError(f"{name} failed: {last_line(done.stderr.decode(errors='replace'))}") from None
        return answer

    def register(self, nodes: Sequence[Node]) -> None:
        """Makes the nodes' keys known; those that the SuperLink has already are left as they are."""

        def one(node: Node) -> None:
            answer = self.ask("supernode", "register", node.key.public, "here", "--name", node.name)
            if not answer["success"] and KNOWN not in answer["error-message"]:
                raise InputError(f"{node.name} is not registered: {last_line(answer['error-message'])}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process that mostly starts
            list(pool.map(one, nodes))

    def run(self, app: Path, config: Mapping[str, object]) -> Run:
        """Starts the app in a folder; `config` overrides what its pyproject.toml says."""
        logs = [re.fullmatch(r"run([0-9]{1,9})\.log", path.name) for path in self._logs.iterdir()]
        number = max((int(found[1]) for found in logs if found), default=-1) + 1
        log = self._logs / f"run{number}.log"
        command: list[str | Path] = ["flwr", "run", app, "here", "--stream"]
        if config:
            overrides = log.with_suffix(".toml")
            write_atomic(overrides, toml(config).encode())
            command += ["--run-config", overrides]
        return Run(self, self._processes.start(command, log, self._home), log)


class Run:
    """A run of an app. A `flwr` of its own follows it, and writes what the ServerApp says to the log."""

    def __init__(self, control: Control, follower: Process, log: Path) -> None:
        self.log, self._control, self._follower = log, control, follower
        self.id = self._await_start(time.monotonic() + COMMAND)

    def _await_start(self, end: float) -> int:
        """Wait until the SuperLink has taken the run, and return the run's id."""
        while True:
            waiting = self.followed and time.monotonic() < end  # asked first: it may speak and end at once
            said = plain(self.log)
            if found := re.search(r"started run (\d+)\s", said):
                return int(found[1])
            if not waiting:
                raise InputError(f"the run did not start: {last_line(said)} (see {self.log})")
            time.sleep(POLL)

    @property
    def followed(self) -> bool:
        """Whether it goes on, as far as one can see: not if it has ended, nor if the SuperLink has."""
        return self._follower.poll() is None

    def status(self) -> Status:
        """What the SuperLink says of it."""
        answer = self._control.ask("ls", "here", "--run-id", str(self.id))
        if not answer["success"]:
            return Status(UNKNOWN, last_line(answer["error-message"]))
        return next(
            (Status(run["status"], run["status-details"]) for run in answer["runs"]), Status(UNKNOWN, "")
        )

    def wait(self, limit: float) -> Status:
        """How it ended; or how it is when the seconds are over, or the SuperLink is gone."""
        end = time.monotonic() + limit
        while self.followed and time.monotonic() < end:
            time.sleep(POLL)
        end = min(end, time.monotonic() + SETTLED)  # its log ends a moment before it does
        while (status := self.status()).text in (*ONGOING, UNKNOWN) and time.monotonic() < end:
            time.sleep(POLL)
        return status

    def check(self) -> None:
        """Raises what ended it, if that was not its last round: a sentence of ours as the error it was."""
        status = self.wait(SETTLED)
        if status.text == DONE:
            return
        raised = re.findall(r"^cfedavg\.core\.errors\.(\w+): (.*)$", plain(self.log), re.MULTILINE)
        found = getattr(errors, raised[-1][0], None) if raised else None  # a log may name anything
        if isinstance(found, type) and issubclass(found, InputError):
            raise InputError(raised[-1][1])
        raise RunFailed(f"the run ended as {status.text}: {status.details} (see {self.log})")
