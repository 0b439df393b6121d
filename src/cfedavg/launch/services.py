"""The processes of a federation: the SuperLink, the SuperNodes, and the runs of Flower apps."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cfedavg.core import errors
from cfedavg.core.config import toml_value
from cfedavg.core.errors import InputError
from cfedavg.core.files import check_regular, exists, make_folder, open_regular, write_atomic
from cfedavg.launch.processes import HOST, PATIENCE, Ports, Process, Processes

if TYPE_CHECKING:  # this import needs Flower; if Flower is missing, an error says so later
    from cfedavg.launch.credentials import Certificates, NodeKey

READY = 90.0  # time limit for the start of a process in seconds; on an idle machine a start takes 3
FORGOTTEN = 75.0  # seconds after which the SuperLink has surely noticed that a node was killed
COMMAND = 120.0  # time limit of a `flwr` command in seconds; on an idle machine a command takes 2
SETTLED = 60.0  # longest wait in seconds for a run's final status after the end of its log; normally 2
POLL = 0.1  # seconds between two looks at a process
REGISTERED = "already in use"  # part of the SuperLink's error about a key that is registered already
ONGOING, DONE = ("pending", "starting", "running"), "finished:completed"
UNKNOWN = "unknown"  # the status of a run if the SuperLink does not know it

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Service:
    """A process of a federation, with a folder and a log. It can be stopped and started again."""

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
        """Ask the process to end (SIGTERM), so that a node can sign off; kill it if it does not end."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        self.kill()  # if it has not ended by now

    def kill(self) -> None:
        """Kill the process and its children at once (SIGKILL)."""
        if self.process is not None and self.running:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(PATIENCE)  # this also reaps the process: the children of a zombie live on

    def read_log(self) -> str:
        """Return the log's text since the last start of the process."""
        return read_log(self.log, self._log_start)

    def _spawn(self, *command: str | Path) -> None:
        assert not self.running, f"{self.name} is running already"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self.process = self._processes.start(command, self.log, {"FLWR_HOME": str(self.home)})


class SuperLink(Service):
    """The server's process, with a database. The command `flwr` asks it to register nodes and start runs."""

    def __init__(
        self, processes: Processes, logs: Path, folder: Path, files: Certificates, port: int
    ) -> None:
        super().__init__(processes, logs, folder, "superlink")
        self.files, self.port, self.address = files, port, f"{HOST}:{port}"
        where = format_toml({"address": self.address, "root-certificates": str(files.ca)})
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}'
        write_atomic(self.home / "config.toml", text.encode())

    def start(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        database = self.folder / "link.db"
        try:
            if exists(database):
                check_regular(database)  # on a pipe the SuperLink would wait for ever
        except OSError as error:
            raise InputError(f"cannot read the SuperLink's database {database} ({error.strerror})") from None
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

    def ask(self, *command: str | Path) -> dict[str, Any]:
        """Return the JSON reply to a `flwr` command; the key `success` says whether the command succeeded."""
        name = f"`flwr {command[0]}`"
        try:
            done = subprocess.run(
                ["flwr", *command, "--format", "json"],
                env={**self._processes.environment, "FLWR_HOME": str(self.home)},
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
        """Register the public keys of `nodes`; skip keys that are registered already."""

        def register_one(node: SuperNode) -> None:
            reply = self.ask("supernode", "register", node.key.public, "here", "--name", node.name)
            if not reply["success"] and REGISTERED not in reply["error-message"]:
                raise InputError(
                    f"the SuperLink cannot register {node.name}: {get_last_line(reply['error-message'])}"
                )

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each call starts a `flwr` process, which is slow
            list(pool.map(register_one, nodes))

    def run(self, app: Path, config: Mapping[str, object]) -> AppRun:
        """Start the Flower app in the folder `app`; `config` overrides settings in its pyproject.toml."""
        logs = self.log.parent
        numbers = [re.fullmatch(r"run([0-9]{1,9})\.log", path.name) for path in logs.iterdir()]
        log = logs / f"run{max((int(found[1]) for found in numbers if found), default=-1) + 1}.log"
        command: list[str | Path] = ["flwr", "run", app, "here", "--stream"]
        if config:
            overrides = log.with_suffix(".toml")
            write_atomic(overrides, format_toml(config).encode())
            command += ["--run-config", overrides]
        return AppRun(self, self._processes.start(command, log, {"FLWR_HOME": str(self.home)}), log)


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
        self._ports, self._config = ports, folder / "node.toml"
        self.id: int | None = None
        make_folder(self.state, "`out`")
        facts = {"partition-id": number, "num-partitions": of, "state-dir": str(self.state)}
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

        After a node was killed, the SuperLink still takes it for online and refuses a new process of the
        node, until the SuperLink notices that the old process is gone.
        """
        began, said = time.monotonic(), False
        while True:
            # Before the log is read: the process may write its id and end in between.
            running, waited = self.running, time.monotonic() - began
            text = self.read_log()
            if found := re.search(r"SuperNode ID: (\d+)\s", text):
                self.id = int(found[1])
                return
            if not running:
                self._check_refusal(text, waited, limit)
                if not said:
                    say(f"{self.name} still counts as online at the SuperLink: trying for up to {limit:g} s")
                said = True
                time.sleep(1)
                self.begin()
            elif waited > max(limit, READY):
                raise InputError(f"{self.name} is not online after {waited:.0f} s; see {self.log}")
            time.sleep(POLL)

    def _check_refusal(self, text: str, waited: float, limit: float) -> None:
        if "Failed to activate" not in text:
            raise InputError(f"{self.name} ended at once: {get_last_line(text)} (see {self.log})")
        if waited > limit:
            raise InputError(
                f"the SuperLink has refused {self.name} for {limit:g} s. "
                f"If another process uses the key {self.key.public}, stop that process. "
                "If the key is not registered at the SuperLink, register it or use another folder."
            )


class RunFailed(RuntimeError):
    """An error: a run failed, but not because of bad input (that would be an InputError)."""


class Status(NamedTuple):
    """A run's status in Flower's words (`running`, `finished:completed`, ...), and details of the status."""

    text: str
    details: str


class AppRun:
    """A run of a Flower app. A `flwr` process follows the run and writes the ServerApp's output to `log`."""

    def __init__(self, link: SuperLink, follower: Process, log: Path) -> None:
        """Wait until the SuperLink has started the run that the process `follower` asked for."""
        self.log, self._link, self._follower = log, link, follower
        end = time.monotonic() + COMMAND
        while True:
            # Before the log is read: the `flwr` process may write the id and end in between.
            waiting = self.followed and time.monotonic() < end
            text = read_log(self.log)
            if found := re.search(r"started run (\d+)\s", text):
                self.id = int(found[1])
                return
            if not waiting:
                raise InputError(f"the run did not start: {get_last_line(text)} (see {self.log})")
            time.sleep(POLL)

    @property
    def followed(self) -> bool:
        """Whether the `flwr` process still follows the run. The process ends when run or SuperLink ends."""
        return self._follower.poll() is None

    def status(self) -> Status:
        """Ask the SuperLink for the run's status."""
        reply = self._link.ask("ls", "here", "--run-id", str(self.id))
        if not reply["success"]:
            return Status(UNKNOWN, get_last_line(reply["error-message"]))
        found = [Status(run["status"], run["status-details"]) for run in reply["runs"]]
        return found[0] if found else Status(UNKNOWN, "")

    def wait(self, limit: float) -> Status:
        """Wait until the run or the SuperLink ends, at most `limit` seconds; return the run's last status."""
        end = time.monotonic() + limit
        with suppress(subprocess.TimeoutExpired):
            self._follower.wait(limit)
        end = min(end, time.monotonic() + SETTLED)  # the log ends a moment before the run
        while (status := self.status()).text in (*ONGOING, UNKNOWN) and time.monotonic() < end:
            time.sleep(POLL)
        return status

    def check(self) -> None:
        """Raise an error if the run failed: an InputError if the run's log shows one, else RunFailed."""
        status = self.wait(SETTLED)
        if status.text == DONE:
            return
        module = re.escape(InputError.__module__)
        raised = re.findall(rf"^{module}\.(\w+): (.*)$", read_log(self.log), re.MULTILINE)
        found = getattr(errors, raised[-1][0], None) if raised else None  # the name may be any text
        if isinstance(found, type) and issubclass(found, InputError):
            raise InputError(raised[-1][1])
        raise RunFailed(f"the run ended with status {status.text}: {status.details} (see {self.log})")


def format_toml(table: Mapping[str, object]) -> str:
    """Return a mapping as TOML text, with one line for each key."""
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
    """Return the last line of text in a log, without box characters; skip Flower's link to its docs."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith("For more information")]
    return useful[-1] if useful else "no output"
