"""`cfedavg federate up`: a federation on this machine, from the SuperLink's start to the last round."""

from __future__ import annotations

import time
from pathlib import Path

from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, make_folder, write_atomic
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import CONFIG, FEDERATION, METRICS, check_same, read_rows
from cfedavg.data.tasks import build_task
from cfedavg.flower.round_policy import RoundPolicy
from cfedavg.launch.app.settings import TRUST, run_config_of
from cfedavg.launch.control import ONGOING, Run, RunFailed
from cfedavg.launch.local_federation import Machine
from cfedavg.launch.services import toml
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.run import Observer

COMPONENTS = {"serverapp": "cfedavg.launch.app.server:app", "clientapp": "cfedavg.launch.app.client:app"}
POLL = 0.5  # seconds between two looks at what the ServerApp has written


def app_toml(config: Config, **more: object) -> str:
    """The pyproject.toml of an app whose code is this package, with the configuration of a run."""
    project = {"name": "federation", "version": "1.0.0", "license": "Apache-2.0"}
    settings = run_config_of(config) | {name.replace("_", "-"): value for name, value in more.items()}
    parts = {
        "project": toml(project) + "dependencies = []\n",
        "tool.flwr.app": toml({"publisher": "cfedavg"}),
        "tool.flwr.app.components": toml(COMPONENTS),
        "tool.flwr.app.config": toml(settings),
    }
    return "\n".join(f"[{name}]\n{text}" for name, text in parts.items())


def up(
    config: Config,
    out: Path,
    observer: Observer,
    *,
    resume: bool = False,
    port: int | None = None,
    round_timeout: float = 120.0,
    quorum: float = 0.5,
) -> bool:
    """Trains with a node for each client; everything that it starts is stopped when it returns or raises.

    False if there was nothing left to do.
    """
    out = out.resolve()
    _check(config, out, resume)
    if resume and _is_done(config, out):
        observer.say(f"all {config.rounds} rounds are done; set `rounds` higher for more")
        return False
    observer.say(_in_words(config))
    folder = out / "federation"
    least = max(1, RoundPolicy(quorum=quorum).count_quorum(config.clients))
    machine = Machine(folder, config.clients, port=port, more=_trust(config), say=observer.now)
    federation = {"round_timeout": round_timeout, "quorum": quorum, "min_nodes": least}
    text = app_toml(config, out=str(out), resume=resume, **federation)
    with machine:
        make_folder(folder / "app", "`out`")
        write_atomic(folder / "app" / "pyproject.toml", text.encode())
        machine.start()
        observer.now("starting the run")
        run = machine.run(folder / "app")
        observer.now("waiting for the first round")
        _follow(run, machine, out / METRICS, config.rounds, observer)
        if not machine.link.running:
            raise RunFailed(f"the SuperLink has ended (see {machine.link.log}); `resume` goes on from here")
        run.check()
    return True


def _check(config: Config, out: Path, resume: bool) -> None:
    """What can be found out before anything is started."""
    if not str(out).isprintable():
        raise InputError(f"`out` must be printable text, got {str(out)!r}")
    if not exists(out / CONFIG):
        if resume and exists(out / "federation"):  # whose options nobody has written down
            raise InputError(
                f"cannot resume: no round of {out} has begun; give its options again, without `resume`"
            )
        return
    if not resume:
        raise InputError(f"`out`: {out} holds a run already; set `resume` or choose another folder")
    if not exists(out / "federation"):
        what = (
            "the federation of an app, which its own server resumes"
            if exists(out / FEDERATION)
            else ("a simulation, which no federation can go on with")
        )
        raise InputError(f"cannot resume: {out} holds {what}")
    old = read_config(out / CONFIG)
    if old.clients != config.clients:
        raise InputError(
            f"cannot resume: `nodes` is {config.clients}, but the run in {out} has {old.clients}"
        )
    check_same(old, config, out)
    if (done := len(read_rows(out / METRICS))) > config.rounds:
        raise InputError(f"cannot resume: `rounds` is {config.rounds}, but the run in {out} has done {done}")


def _is_done(config: Config, out: Path) -> bool:
    """Whether the last round was followed by the pictures, which come last."""
    page, metrics = out / "report.html", out / METRICS
    return (
        len(read_rows(metrics)) == config.rounds
        and exists(page)
        and page.stat().st_mtime >= metrics.stat().st_mtime
    )


def _in_words(config: Config) -> str:
    """What the run is about to do. Bad options show here; and data are fetched once, not by every node."""
    task = build_task(config)
    plan, layout = Plan(config, task), Layout.of(task.model)
    if config.deadline is None:
        return plan.in_words(layout)
    steps = f"{config.clients} nodes, local steps for {config.deadline:g} s"
    return f"{steps}; {layout.d:,} parameters, {plan.compressor}"


def _trust(config: Config) -> dict[str, str]:
    """Let the processes import what the user has typed or trusts, as `cfedavg run` does."""
    return {TRUST: "1"} if config.names_code else {}


def _is_over(run: Run, machine: Machine) -> bool:
    """The stream of its log may break, and the run go on."""
    return not run.followed and (not machine.link.running or run.status().text not in ONGOING)


def _follow(run: Run, machine: Machine, metrics: Path, rounds: int, observer: Observer) -> None:
    """Shows rows as the ServerApp writes them, until the run is over."""
    rows = read_rows(metrics)
    observer.begin(rows)
    if rows:
        observer.say(f"resuming after round {len(rows)} of {rounds}")
    lost: set[int] = set()
    while True:
        over, known = _is_over(run, machine), len(rows)
        rows = read_rows(metrics)
        for row in rows[known:]:
            observer.row(row)
        for node in machine.nodes:
            if not node.running and node.number not in lost:
                lost.add(node.number)
                observer.say(f"{node.name} has ended; the run goes on without it (see {node.log})")
        if over:
            return
        time.sleep(POLL)
