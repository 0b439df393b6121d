"""A whole Flower federation on this machine: a SuperLink, SuperNodes and runs, on 127.0.0.1.

Connections are encrypted, and every node authenticates itself with a key. All started processes are stopped
at the end, even if this process is killed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cfedavg.callbacks import Callback, CallbackList, Start
from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import InputError
from cfedavg.core.extras import explain
from cfedavg.core.files import exists, lock_folder, make_folder, write_atomic
from cfedavg.core.interrupts import catch_kills
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import CONFIG, FEDERATION, METRICS, check_same, read_rows
from cfedavg.data.tasks import build_task
from cfedavg.flower.options import RoundPolicy
from cfedavg.launch.app import TRUST, run_config_of
from cfedavg.launch.app.plan import make_plan
from cfedavg.launch.processes import HOST, Ports, Processes
from cfedavg.launch.services import ONGOING, AppRun, RunFailed, SuperLink, SuperNode, format_toml

COMPONENTS = {"serverapp": "cfedavg.launch.app.server:app", "clientapp": "cfedavg.launch.app.client:app"}
POLL = 0.5  # seconds between two reads of the metrics that the ServerApp writes


def make_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Flower's processes (no telemetry, quick polling, ...), with `more` added."""
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
        "COLUMNS": "500",  # so that logs do not break lines
        **more,
    }


class LocalFederation:
    """A federation in a folder: `with LocalFederation(folder, nodes=4) as federation: federation.start()`.

    `federation.link` and `federation.nodes[i]` can be stopped, killed and started again. Keys, the
    SuperLink's database and the nodes' states stay in the folder. A later LocalFederation can use them.
    `more` holds environment variables for all processes. `say` is called with a text about each step.
    """

    link: SuperLink
    nodes: list[SuperNode]

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        port: int | None = None,
        more: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if sys.platform == "win32":
            raise InputError(
                "a federation on this machine needs Linux or macOS, for which Flower is made; "
                "on Windows, start it in WSL"
            )
        self.folder, self.count, self.port, self.say = folder.resolve(), nodes, port, say
        self.processes = Processes(str(self.folder), make_environment(more or {}))
        if shutil.which("flower-superlink", path=self.processes.environment["PATH"]) is None:
            raise InputError(f"{explain(ModuleNotFoundError(name='flwr'))}")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from cfedavg.launch import credentials  # needs a package that comes with Flower

        with ExitStack() as stack:
            make_folder(self.folder, "`out`")
            self.folder.chmod(0o700)
            busy = f"`out`: another federation is running in {self.folder}"
            stack.enter_context(lock_folder(self.folder, busy))
            stack.enter_context(catch_kills())
            stack.callback(self.processes.close)
            self.processes.stop()  # left by a killed launcher: the lock shows that no launcher is alive
            keys, logs = self.folder / "keys", self.folder / "logs"
            for each in (keys, logs):
                make_folder(each, "`out`")
                each.chmod(0o700)  # until now, the parent folder kept other users out
            ports, shared = Ports(), (self.processes, logs)
            stack.callback(ports.close)
            files, port = credentials.ensure_certificates(keys), ports.take(self.port or 0)
            self.link = SuperLink(*shared, self.folder / "link", files, port)
            pairs = [credentials.ensure_node_key(keys, f"node{i}") for i in range(self.count)]
            self.nodes = [
                SuperNode(*shared, self.folder / "nodes" / str(i), self.link, ports, pair, i, self.count)
                for i, pair in enumerate(pairs)
            ]
            stack.callback(self.processes.stop)
            stack.callback(lambda: self.say("stopping the nodes and the SuperLink"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes of the federation and their child processes."""
        self._stack.close()

    def start(self) -> None:
        """Start the SuperLink, then all nodes, and wait until they are online."""
        self.say("starting the SuperLink")
        self.link.start()
        self.say("registering the nodes")
        self.link.register(self.nodes)
        for node in self.nodes:
            node.begin()
        for online, node in enumerate(self.nodes):
            self.say(f"nodes online: {online} of {self.count}")
            node.wait_online(say=self.say)
        self.say(f"nodes online: {self.count} of {self.count}")

    def run(self, app: Path, config: Mapping[str, object] | None = None) -> AppRun:
        """Start the Flower app in the folder `app`; `config` overrides settings in its pyproject.toml."""
        return self.link.run(app, config or {})


def format_app(config: Config, **more: object) -> str:
    """Return the pyproject.toml of a Flower app that uses this package's code and a run's settings."""
    project = {"name": "federation", "version": "1.0.0", "license": "Apache-2.0"}
    settings = run_config_of(config) | {name.replace("_", "-"): value for name, value in more.items()}
    parts = {
        "project": format_toml(project) + "dependencies = []\n",
        "tool.flwr.app": format_toml({"publisher": "cfedavg"}),
        "tool.flwr.app.components": format_toml(COMPONENTS),
        "tool.flwr.app.config": format_toml(settings),
    }
    return "\n".join(f"[{name}]\n{text}" for name, text in parts.items())


def trust_typed_code(config: Config) -> dict[str, str]:
    """Return the environment variable that allows nodes to import the user's classes in `config`, if any."""
    return {TRUST: "1"} if config.names_code else {}


def train_federation(
    config: Config,
    out: Path,
    callback: Callback,
    *,
    resume: bool = False,
    port: int | None = None,
    round_timeout: float = 120.0,
    quorum: float = 0.5,
) -> bool:
    """Train with a node for each client, then stop all processes; return False if no round was left to do."""
    out = out.resolve()
    if _is_done(config, out, resume):
        callback.on_message(f"all {config.rounds} rounds are done; set `rounds` higher for more")
        return False
    folder = out / "federation"
    more = trust_typed_code(config)
    federation = LocalFederation(folder, config.clients, port=port, more=more, say=callback.on_wait)
    callback.on_message(_describe(config))
    least = max(1, RoundPolicy(quorum=quorum).count_quorum(config.clients))
    policy = {"round_timeout": round_timeout, "quorum": quorum, "min_nodes": least}
    text = format_app(config, out=str(out), resume=resume, **policy)
    with federation:
        make_folder(folder / "app", "`out`")
        write_atomic(folder / "app" / "pyproject.toml", text.encode())
        federation.start()
        callback.on_wait("starting the run")
        run = federation.run(folder / "app")
        callback.on_wait("waiting for the first round")
        with CallbackList([callback]) as callbacks:
            _follow(run, federation, out, config, callbacks)
        if not federation.link.running:
            log = federation.link.log
            raise RunFailed(f"the SuperLink has ended (see {log}); continue with `resume`")
        run.check()
    return True


def _is_done(config: Config, out: Path, resume: bool) -> bool:
    """Return whether the run in `out` has done all rounds; raise InputError if the options do not fit."""
    if not str(out).isprintable():
        raise InputError(f"`out` must be printable text, got {str(out)!r}")
    begun = exists(out / "federation")
    if not exists(out / CONFIG):
        if resume and begun:  # the options are stored with the first round
            raise InputError(
                f"cannot resume: no round of the run in {out} has begun; "
                "give its options again, without `resume`"
            )
        return False
    if not resume:
        raise InputError(f"`out`: {out} holds a run already; set `resume` or choose another folder")
    if not begun:
        what = "a simulation, not a federation"
        if exists(out / FEDERATION):
            what = "the federation of an app; resume it with the app's own server"
        raise InputError(f"cannot resume: {out} holds {what}")
    old = read_config(out / CONFIG)
    if old.clients != config.clients:
        raise InputError(
            f"cannot resume: `nodes` is {config.clients}, but the run in {out} has {old.clients}"
        )
    check_same(old, config, out)
    page, metrics = out / "report.html", out / METRICS
    if (done := len(read_rows(metrics))) > config.rounds:
        raise InputError(f"cannot resume: `rounds` is {config.rounds}, but the run in {out} has done {done}")
    # The report is written last: if it is older than the metrics, it lacks the last round.
    return done == config.rounds and exists(page) and page.stat().st_mtime >= metrics.stat().st_mtime


def _describe(config: Config) -> str:
    """Return a description of the run; also check the options, and download the data once for all nodes."""
    task = build_task(config)
    plan, layout = make_plan(config, task), Layout.of(task.model)
    if config.deadline is None:
        return plan.in_words(layout)
    steps = f"{config.clients} nodes, local steps for {config.deadline:g} s"
    return f"{steps}; {layout.d:,} parameters, {plan.compressor}"


def _follow(run: AppRun, federation: LocalFederation, out: Path, config: Config, callback: Callback) -> None:
    """Read the metrics file until the run is over, and pass each new row to the callback."""
    rows = read_rows(metrics := out / METRICS)
    callback.on_begin(Start(config, out, rows))
    if rows:
        callback.on_message(f"resuming after round {len(rows)} of {config.rounds}")
    lost: set[int] = set()
    while True:
        # The process that follows the log may end while the run continues: so ask for the status too.
        over = not run.followed and (not federation.link.running or run.status().text not in ONGOING)
        known, rows = len(rows), read_rows(metrics)
        for row in rows[known:]:
            callback.on_row(row)
        for node in federation.nodes:
            if not node.running and node.number not in lost:
                lost.add(node.number)
                callback.on_message(f"{node.name} has ended; the run continues without it (see {node.log})")
        if over:
            return
        time.sleep(POLL)
