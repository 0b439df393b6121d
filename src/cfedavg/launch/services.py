"""The long-running processes of a federation: the SuperLink and the SuperNodes."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cfedavg.core.config import toml_value
from cfedavg.core.errors import InputError
from cfedavg.core.files import check_regular, exists, make_folder, open_regular, write_atomic
from cfedavg.launch.processes import HOST, PATIENCE, Ports, Process, Processes

if TYPE_CHECKING:  # this import needs Flower; if Flower is missing, an error says so later
    from cfedavg.launch.credentials import Certificates, NodeKey

READY = 90.0  # time limit for the start of a process in seconds; on an idle machine a start takes 3
FORGOTTEN = 75.0  # seconds after which the SuperLink has surely noticed that a node was killed
POLL = 0.1

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Service:
    """One process of a federation, with its folder and its log."""

    def __init__(self, processes: Processes, logs: Path, folder: Path, name: str) -> None:
        self.name, self.folder, self.log = name, folder, logs / f"{name}.log"
        self.process: Process | None = None
        self._processes, self._log_start = processes, 0
        self.home = folder / "home"
        make_folder(self.home, "`out`")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), so that a node signs off; kill the process if it does not end."""
        self._send(signal.SIGTERM, os.kill)
        self.kill()  # if it has not ended by now

    def kill(self) -> None:
        """Kill the process and its children at once (SIGKILL)."""
        self._send(signal.SIGKILL, os.killpg)

    def read_log(self) -> str:
        """Return the log's text since the last start of the process."""
        return read_log(self.log, self._log_start)

    def _spawn(self, *command: str | Path) -> None:
        assert not self.running, f"{self.name} is running already"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self.process = self._processes.start(command, self.log, {"FLWR_HOME": str(self.home)})

    def _send(self, signum: signal.Signals, send: Callable[[int, int], None]) -> None:
        if self.process is None or not self.running:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            send(self.process.pid, signum)
            self.process.wait(PATIENCE)  # this also reaps the process: the children of a zombie live on


class SuperLink(Service):
    """The server's process. Its state is in a database in its folder."""

    def __init__(
        self, processes: Processes, logs: Path, folder: Path, files: Certificates, port: int
    ) -> None:
        super().__init__(processes, logs, folder, "superlink")
        self.files, self.port, self.address = files, port, f"{HOST}:{port}"

    def start(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        database = self.folder / "link.db"
        try:
            if exists(database):
                check_regular(database)  # on a pipe the SuperLink would wait for ever
        except OSError as error:
            raise InputError(f"cannot read {database} ({error.strerror})") from None
        ca, certificate, key = self.files.ca, self.files.certificate, self.files.key
        tls = "--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key
        where = "--host", HOST, "--port", str(self.port), "--database", database
        self._spawn("flower-superlink", "--enable-supernode-auth", *tls, *where)
        end = time.monotonic() + READY
        while not self._is_healthy():
            if not self.running:
                why = get_last_line(self.read_log())
                raise InputError(f"the SuperLink ended at once: {why} (see {self.log})")
            if time.monotonic() > end:
                raise InputError(f"the SuperLink did not answer within {READY:g} s; see {self.log}")
            time.sleep(POLL)

    def _is_healthy(self) -> bool:
        """Return whether the SuperLink answers with a certificate that our CA has signed."""
        secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(self.files.ca)))
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
        with suppress(OSError), direct.open(f"https://{self.address}/health", timeout=5) as response:
            return bool(response.status == 200)
        return False


class SuperNode(Service):
    """A client's process, with a key of its own, a part of the data and a folder for its state."""

    def __init__(
        self,
        processes: Processes,
        logs: Path,
        folder: Path,
        link: SuperLink,
        ports: Ports,
        key: NodeKey,
        number: int,
        of: int,
    ) -> None:
        super().__init__(processes, logs, folder, f"node{number}")
        self.link, self.key, self.number, self.state = link, key, number, folder / "state"
        self._ports = ports
        self.id: int | None = None
        make_folder(self.state, "`out`")
        facts = {"partition-id": number, "num-partitions": of, "state-dir": str(self.state)}
        self._config = folder / "node.toml"
        write_atomic(self._config, format_toml(facts).encode())

    def start(self, limit: float = FORGOTTEN) -> None:
        """Start the node, and wait until it is online."""
        self.begin()
        self.wait_online(limit)

    def begin(self) -> None:
        """Start the node without waiting until it is online; call `wait_online` next."""
        self.id = None
        link = "--root-certificates", self.link.files.ca, "--superlink", self.link.address
        port = self._ports.take()  # a new one at each start: old children may still use the last port
        own = "--host", HOST, "--port", str(port), "--auth-supernode-private-key", self.key.private
        self._spawn("flower-supernode", *link, *own, "--node-config", self._config)

    def wait_online(self, limit: float = FORGOTTEN, say: Callable[[str], None] = lambda text: None) -> None:
        """Wait until the node is online; start the node again while the SuperLink refuses it.

        If a node was killed, the SuperLink refuses the node until the SuperLink has noticed the kill.
        """
        began, told = time.monotonic(), False
        while True:
            # Before the log is read: the process may write its id and end in between.
            running, waited = self.running, time.monotonic() - began
            if found := re.search(r"SuperNode ID: (\d+)\s", self.read_log()):
                self.id = int(found[1])
                return
            if not running:
                self._check_refusal(waited, limit)
                if not told:
                    say(f"{self.name} still counts as online at the SuperLink: trying for up to {limit:g} s")
                told = True
                time.sleep(1)
                self.begin()
            elif waited > max(limit, READY):
                raise InputError(f"{self.name} is not online after {waited:.0f} s; see {self.log}")
            time.sleep(POLL)

    def _check_refusal(self, waited: float, limit: float) -> None:
        text = self.read_log()
        if "Failed to activate" not in text:
            raise InputError(f"{self.name} ended at once: {get_last_line(text)} (see {self.log})")
        if waited > limit:
            raise InputError(
                f"the SuperLink refuses {self.name} for {limit:g} s: its key {self.key.public} is not "
                f"registered there, or another process uses it; stop that process, or use another folder"
            )


def format_toml(table: Mapping[str, object]) -> str:
    """Return a table as TOML text, one line for each key."""
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in table.items())


def read_log(log: Path, start: int = 0) -> str:
    """Return the text of a log file from byte `start` on, without colour codes."""
    try:
        with open_regular(log, "rb") as file:  # a log is read many times: not the whole file
            file.seek(start)
            data = file.read()
    except OSError as error:
        raise InputError(f"cannot read {log} ({error.strerror})") from None
    return _COLOUR.sub("", data.decode(errors="replace"))


def get_last_line(text: str) -> str:
    """Return the last line with words in a log, without box characters and Flower's link to its docs."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith("For more information")]
    return told[-1] if told else "no output"
