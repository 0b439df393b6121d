"""A whole Flower federation on this machine: a SuperLink, SuperNodes and runs, on 127.0.0.1.

Connections are encrypted, and every node proves with a key who it is. What is started here is stopped at the
end, whatever the end is, a SIGKILL of this process included.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cfedavg.core.errors import InputError
from cfedavg.core.files import lock_folder, make_folder
from cfedavg.core.interrupts import catch_kills
from cfedavg.flower import MISSING
from cfedavg.launch.control import Control, Run
from cfedavg.launch.ports import HOST, Ports
from cfedavg.launch.processes import Processes
from cfedavg.launch.services import Link, Node

Say = Callable[[str], None]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """What Flower's processes inherit: nothing is reported, looked up or installed, and polling is quick."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    direct = f"{direct},{HOST}" if direct else HOST
    return {
        "OMP_NUM_THREADS": "1",  # nodes share the machine's cores
        **os.environ,
        "PATH": path,  # Flower starts its own commands by name
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
        "PYTHONSAFEPATH": "1",  # `python -m` would look for modules in the current folder first
        "PYTHONUNBUFFERED": "1",  # so that logs are up to date
        "COLUMNS": "500",  # and their sentences whole
        **more,
    }


class Machine:
    """A federation in a folder: `with Machine(folder, nodes=4) as machine: machine.start()`.

    `machine.link` and `machine.nodes[i]` can be stopped, killed and started again. Keys, the SuperLink's
    database and the nodes' states stay in the folder; another Machine goes on with them. `more` are variables
    for the environment of all processes, `say` hears what is going on.
    """

    link: Link
    nodes: list[Node]
    control: Control

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        port: int | None = None,
        more: Mapping[str, str] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self.folder, self.count, self.port, self.say = folder.resolve(), nodes, port, say
        self.processes = Processes(str(self.folder), environment(more or {}))
        if shutil.which("flower-superlink", path=self.processes.environment["PATH"]) is None:
            raise InputError(MISSING)
        self.logs = self.folder / "logs"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops everything that was started, and what that has started."""
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        from cfedavg.launch.credentials import certificates, node_key  # needs what Flower brings along

        make_folder(self.folder, "`out`")
        self.folder.chmod(0o700)
        stack.enter_context(
            lock_folder(self.folder, f"`out`: another federation is running in {self.folder}")
        )
        stack.enter_context(catch_kills())
        stack.callback(self.processes.close)
        self.processes.stop()  # what is left of one that was killed, since nobody else holds the folder
        keys, parts, numbers = self.folder / "keys", self.folder / "nodes", range(self.count)
        for each in (keys, self.logs):
            make_folder(each, "`out`")
            each.chmod(0o700)  # nobody else could enter the folder above meanwhile
        ports, shared = Ports(), (self.processes, self.logs)
        stack.callback(ports.close)
        self.link = Link(*shared, self.folder / "link", certificates(keys), ports.take(self.port or 0))
        pairs = [node_key(keys, f"node{i}") for i in numbers]
        self.nodes = [
            Node(*shared, parts / str(i), self.link, ports, pairs[i], i, self.count) for i in numbers
        ]
        self.control = Control(self.processes, self.link, self.logs)
        stack.callback(self._end)

    def _end(self) -> None:
        try:
            self.say("stopping the nodes and the SuperLink")
        finally:
            self.processes.stop()

    def start(self) -> None:
        """The SuperLink, then all nodes; returns when they are online."""
        self.say("starting the SuperLink")
        self.link.start()
        self.say("registering the nodes")
        self.control.register(self.nodes)
        for node in self.nodes:
            node.begin()
        for online, node in enumerate(self.nodes):
            self.say(f"nodes online: {online} of {self.count}")
            node.wait_online(say=self.say)
        self.say(f"nodes online: {self.count} of {self.count}")

    def run(self, app: Path, config: Mapping[str, object] | None = None) -> Run:
        """Starts the app in a folder; `config` overrides what its pyproject.toml says."""
        return self.control.run(app, config or {})
