"""A federation on this machine: its keys, its processes, its errors, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cfedavg import Config, InputError
from cfedavg.callbacks.progress import Display
from cfedavg.core.interrupts import catch_kills, ignore_stops
from cfedavg.core.run_files import format_row, read_rows
from cfedavg.launch.app import DEFAULT, TRUST, config_of
from cfedavg.launch.local_federation import (
    LocalFederation,
    _follow,
    format_app,
    make_environment,
    trust_typed_code,
)
from cfedavg.launch.processes import HOST, MARK, Ports, Processes, alive
from cfedavg.launch.services import AppRun, RunFailed, SuperNode, read_log
from tests.conftest import Command
from tests.simulate.test_bad_files import NO_FILE, put, text

flower = pytest.mark.skipif(
    shutil.which("flwr", path=Path(sys.executable).parent) is None, reason="Flower is not installed"
)

# What the processes may import


def test_processes_trust_what_was_typed_and_not_the_current_folder() -> None:
    assert trust_typed_code(DEFAULT) == {}
    for field in ("model", "compressor", "schedule"):
        found = make_environment(trust_typed_code(DEFAULT.replace(**{field: "mine:Part"})))
        assert found[TRUST] == found["PYTHONSAFEPATH"] == "1"
        assert found.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


# Keys and certificates


@flower
def test_private_keys_are_private_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cfedavg.launch.credentials import ensure_certificates, ensure_node_key

    modes: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "cfedavg.core.files.sync", lambda path: modes.append((path.name, path.stat().st_mode & 0o777))
    )
    before = os.umask(0)
    try:
        files, pair = ensure_certificates(tmp_path), ensure_node_key(tmp_path, "node0")
    finally:
        os.umask(before)
    secret = [
        mode for name, mode in modes if name.startswith((".server.key", ".node0.")) and ".pub" not in name
    ]
    assert secret == [0o600, 0o600]
    assert files.key.stat().st_mode & 0o777 == pair.private.stat().st_mode & 0o777 == 0o600


@flower
def test_node_keys_are_p384_as_openssh_writes_them(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from cfedavg.launch.credentials import ensure_node_key

    pair = ensure_node_key(tmp_path, "node3")
    private = serialization.load_ssh_private_key(pair.private.read_bytes(), None)
    public = serialization.load_ssh_public_key(pair.public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public
    assert pair.public.read_text().startswith("ecdsa-sha2-nistp384 ")
    held = pair.private.read_bytes()
    assert ensure_node_key(tmp_path, "node3").private.read_bytes() == held
    assert ensure_node_key(tmp_path, "node4").private.read_bytes() != held


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Make a TLS connection without a network; raise the client's objection."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not ends


@flower
def test_the_certificate_is_good_for_its_hosts_and_its_ca(tmp_path: Path) -> None:
    from cfedavg.launch.credentials import ensure_certificates

    (tmp_path / "other").mkdir()
    files, other = ensure_certificates(tmp_path), ensure_certificates(tmp_path / "other")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    ours, theirs = (ssl.create_default_context(cafile=str(f.ca)) for f in (files, other))
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    for host in ("127.0.0.1", "localhost"):
        _handshake(server, ours, host)
    for context, host in ((ours, "example.org"), (ours, "10.0.0.1"), (theirs, "localhost")):
        with pytest.raises(ssl.SSLCertVerificationError):
            _handshake(server, context, host)
    assert ensure_certificates(tmp_path) == files
    assert "PRIVATE" not in files.ca.read_text() + files.certificate.read_text()


@flower
@pytest.mark.parametrize("name", [*NO_FILE, "another's", "nothing", "no key"])
@pytest.mark.parametrize("file", ["ca.pem", "server.pem", "server.key", "node0", "node0.pub"])
def test_bad_keys(tmp_path: Path, file: str, name: str) -> None:
    """The error is one sentence, before anything starts; Flower's processes would say nothing, or hang."""
    from cfedavg.launch.credentials import ensure_certificates, ensure_node_key

    if file in ("ca.pem", "node0.pub") and "link" in name:
        return  # whoever has no such file gets a new one
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        ensure_certificates(folder)
        ensure_node_key(folder, "node0")
    other = (tmp_path / "other" / file).read_bytes()
    makes = NO_FILE | {"another's": text(other), "nothing": text(""), "no key": text(b"\xff" * 99)}
    put(tmp_path / file, makes[name])
    with pytest.raises(InputError, match=re.escape(str(tmp_path / file))) as caught:
        ensure_node_key(tmp_path, "node0") if "node" in file else ensure_certificates(tmp_path)
    assert "\n" not in str(caught.value)


@flower
@pytest.mark.parametrize("path", ["keys", "logs", "link", "link/home", "nodes", "nodes/0", "nodes/0/state"])
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("")
    with pytest.raises(InputError, match="`out`: "), LocalFederation(tmp_path, 1):
        pass


@flower
@pytest.mark.parametrize("path", ["logs/superlink.log", "link/link.db"])
@pytest.mark.parametrize("name", ["a pipe", "a folder", "a device"])
def test_no_file_in_a_federation(tmp_path: Path, path: str, name: str) -> None:
    """Nothing hangs, and nothing is started."""
    with LocalFederation(tmp_path, 1) as machine:
        put(tmp_path / path, NO_FILE[name])
        with pytest.raises(InputError, match=path):
            machine.link.start()
        assert machine.link.process is None
        with pytest.raises(InputError, match="cannot read"):
            read_log(tmp_path / path)


# Processes and signals

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
"""


def _until(true: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def test_what_a_killed_one_has_left_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has its own session and ignores SIGTERM; its parent and its watchdog are gone."""
    monkeypatch.setattr("cfedavg.launch.processes.PATIENCE", 1.0)
    log, marked = tmp_path / "log", {**os.environ, MARK: str(tmp_path)}
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", PARENT, STUBBORN], env=marked, stdout=file, check=True)
    _until(lambda: "up" in log.read_text())
    bystander = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], env={**os.environ, MARK: str(tmp_path) + "2"}
    )
    try:
        after = Processes(str(tmp_path), os.environ)
        assert len(after.left()) == 1
        after.stop()
        _until(lambda: not after.left())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from cfedavg.launch.processes import Processes

mark, log, *command = sys.argv[1:]
Processes(mark, os.environ).start([sys.executable, "-c", *command], Path(log), {})
time.sleep(600)
"""
SERVER = """
import socket, subprocess, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[2]))):
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
    time.sleep(600)
"""
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has no command line."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_all_processes_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """A server, its child in another session, and the watchdog end; the server's port is free again."""
    log, mark, ports = tmp_path / "log", str(tmp_path / "federation"), Ports()
    port = ports.take()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, mark, log, SERVER, SLEEPER, str(port)], start_new_session=True
    )
    after = Processes(mark, os.environ)
    try:
        _until(lambda: log.exists() and "up" in log.read_text())
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        everyone = after.left() | set(map(int, children))
        assert len(everyone) == 3
        launcher.kill()
        launcher.wait()
        _until(lambda: all(map(_is_gone, everyone)))
        assert not after.left()
        socket.create_server((HOST, port)).close()
    finally:
        launcher.kill()
        launcher.wait()
        after.stop()
        ports.close()


def test_a_watchdog_spares_those_of_the_next_launcher(tmp_path: Path) -> None:
    """The next launcher of a federation starts while the watchdog of the killed one is still at work."""
    killed, following = (Processes(str(tmp_path), os.environ) for _ in range(2))
    try:
        mine = killed.start(["sleep", "600"], tmp_path / "log", {})
        other = following.start(["sleep", "600"], tmp_path / "log", {})
        killed.close()
        assert (mine.wait(60), other.poll()) == (-signal.SIGTERM, None)
    finally:
        killed.stop()
        following.close()
        other.wait(60)


@pytest.mark.parametrize("command", ["stopped", "deaf"])
def test_a_watchdog_that_hangs_is_not_waited_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(str(tmp_path), os.environ)
    processes.start(["sleep", "600"], tmp_path / "log", {})
    watchdog: Any = processes._watchdog
    if command == "stopped":
        processes.stop()
        watchdog.send_signal(signal.SIGSTOP)
    else:
        processes.stop()
        watchdog.stdin.close()
        watchdog.wait()
        monkeypatch.setattr("cfedavg.launch.processes.PATIENCE", 0.05)
        watchdog = processes._watchdog = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    closing = threading.Thread(target=lambda: _closed(processes), daemon=True)
    closing.start()
    closing.join(60)
    try:
        assert not closing.is_alive()
        assert watchdog.poll() is not None
    finally:
        watchdog.kill()


def _closed(processes: Processes) -> None:
    """Close from another thread, which must not set signals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cfedavg.launch.processes.ignore_stops", nullcontext)
        processes.close()


def test_where_environments_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are known by the launcher's pids; one that leads no session is somebody else's."""
    monkeypatch.setattr("cfedavg.launch.processes.PROC", tmp_path / "none")
    ours, gone = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
    other = subprocess.Popen(["sleep", "600"])
    try:
        gone.kill()
        gone.wait()
        assert alive("A=b", [ours.pid, gone.pid, other.pid]) == {ours.pid}
    finally:
        for each in (ours, other):
            each.kill()
            each.wait()


def test_a_polite_kill_is_an_interrupt_and_a_second_one_is_not_heard() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), catch_kills():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with ignore_stops():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


# What is said when something is wrong, with commands that only look like Flower's


@pytest.fixture
def commands(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Write shell scripts in the place of Flower's commands; return the environment that finds them."""

    def make(**scripts: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, script in ({"flower_superlink": "exit 1"} | scripts).items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        return {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}

    return make


@pytest.fixture
def machine(
    tmp_path: Path, commands: Callable[..., dict[str, str]]
) -> Iterator[Callable[..., LocalFederation]]:
    """Make a federation of one node with such commands, open until the test ends."""
    opened: list[LocalFederation] = []

    def make(port: int | None = None, **scripts: str) -> LocalFederation:
        opened.append(
            LocalFederation(tmp_path / "federation", 1, port=port, more=commands(**scripts)).__enter__()
        )
        return opened[-1]

    yield make
    for each in opened:
        each.close()
        assert not each.processes.left()


Make = Callable[..., LocalFederation]


@flower
def test_the_folder_is_for_its_owner_and_for_one_at_a_time(machine: Make, tmp_path: Path) -> None:
    folder = machine().folder
    assert folder.stat().st_mode & 0o777 == (folder / "keys").stat().st_mode & 0o777 == 0o700
    with pytest.raises(InputError, match="another federation is running in"):
        machine()


@flower
def test_a_port_in_use(machine: Make) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"`port` must be usable .*, got {port} .*; choose another"):
            machine(port)


def test_a_port_is_ours_before_anyone_listens_on_it() -> None:
    """Nobody else gets the port; a server that asks for it, as Flower's do, can use it several times."""
    ports = Ports()
    try:
        port = ports.take()
        for _ in range(2):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((HOST, port))
            with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
                pass
    finally:
        ports.close()


@flower
def test_a_superlink_that_dies(machine: Make) -> None:
    with pytest.raises(InputError, match="the SuperLink ended at once: no such table"):
        machine(flower_superlink="echo '\033[91mno such table\033[0m'; exit 1").link.start()


@flower
def test_a_node_that_is_refused_tries_again(machine: Make, tmp_path: Path) -> None:
    """The third attempt succeeds; the log then holds the node's id."""
    script = f"""
        echo >> {tmp_path}/tries
        if [ $(wc -l < {tmp_path}/tries) -lt 3 ]; then echo '[code: 2004] Failed to activate.'; exit 1; fi
        echo 'SuperNode ID: 77'; exec sleep 60"""
    made = machine(flower_supernode=script)
    (node,) = made.nodes
    said: list[str] = []
    node.begin()
    node.wait_online(60, said.append)
    assert (node.id, node.running, len(said)) == (77, True, 1)
    node.stop()
    assert not node.running
    (tmp_path / "tries").unlink()
    with pytest.raises(InputError, match=r"the SuperLink has refused node0 for 0 s\. If .*node0\.pub, stop"):
        node.start(limit=0)
    config = tomllib.loads((node.folder / "node.toml").read_text())
    assert config == {"partition-id": 0, "num-partitions": 1, "state-dir": str(node.state)}


@flower
def test_a_node_that_ends_for_another_reason(machine: Make) -> None:
    made = machine(flower_supernode="echo 'no such option'; exit 2")
    with pytest.raises(InputError, match="node0 ended at once: no such option"):
        made.nodes[0].start()


class Hasty:
    """A process that writes to its log and ends just before it is polled."""

    def __init__(self, log: Path, says: str) -> None:
        self.log, self.says = log, says
        log.touch()

    def poll(self) -> int:
        self.log.write_text(self.says)
        return 0


@flower
def test_a_node_that_ends_while_it_is_looked_at(machine: Make) -> None:
    """The node was online; that it has ended is found out later."""
    (node,) = machine().nodes
    hasty: Any = Hasty(node.log, "SuperNode ID: 77\n")
    node.process = hasty
    node.wait_online()
    assert node.id == 77


def test_only_the_tail_of_a_log_is_read(tmp_path: Path) -> None:
    """A log is read ten times a second; the whole of this one would not fit into memory."""
    with (tmp_path / "log").open("wb") as file:
        file.truncate(2**42)
        file.seek(2**42)
        file.write(b"\x1b[92mup\x1b[0m\n")
    assert read_log(tmp_path / "log", 2**42) == "up\n"


def test_a_run_whose_follower_ends_while_it_is_looked_at(tmp_path: Path) -> None:
    """The log says that the run has started; the SuperLink will say how it ended."""
    log = tmp_path / "log"
    hasty: Any = Hasty(log, "Successfully started run 9\n")
    link: Any = SimpleNamespace()
    assert AppRun(link, hasty, log).id == 9


@flower
def test_registering_goes_by_the_answer_not_by_the_exit_code(machine: Make) -> None:
    made = machine(flwr="cat $FLWR_HOME/answer")
    answer = made.link.home / "answer"
    answer.write_text('{"success": true, "node-id": 5}')
    made.link.register(made.nodes)
    answer.write_text('{"success": false, "error-message": "[code: 23] Public key already in use"}')
    made.link.register(made.nodes)
    answer.write_text('{"success": false, "error-message": "Connection refused"}')
    with pytest.raises(InputError, match="cannot register node0: Connection refused"):
        made.link.register(made.nodes)
    answer.write_text("Traceback")
    with pytest.raises(InputError, match="`flwr supernode` failed"):
        made.link.register(made.nodes)


FLWR = """
if [ $1 = run ]; then
    echo 'Successfully started run 9'; echo 'Traceback:'; echo '{error}'; echo 'Exit Code: 201'
else
    echo '{{"success": true, "runs": [{{"status": "finished:failed", "status-details": "it failed"}}]}}'
fi
"""


@flower
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            "cfedavg.core.errors.Diverged: round 3: lower --eta-local",
            InputError,
            "^round 3: lower --eta-local$",
        ),
        ("cfedavg.core.errors.InputError: --eta is 7", InputError, "^--eta is 7$"),
        ("cfedavg.core.errors.NotFinite: the update", RunFailed, "finished:failed: it failed"),
        ("cfedavg.core.errors.annotations: forged", RunFailed, "finished:failed: it failed"),
        ("KeyError: 3", RunFailed, r"finished:failed: it failed \(see .*run0.log"),
    ],
)
def test_a_run_that_fails(
    error: str, kind: type[Exception], words: str, machine: Make, tmp_path: Path
) -> None:
    run = machine(flwr=FLWR.format(error=error)).run(tmp_path)
    assert run.id == 9
    with pytest.raises(kind, match=words):
        run.check()


@flower
def test_a_superlink_that_does_not_answer_once(machine: Make, tmp_path: Path) -> None:
    """The status is asked for again."""
    done = '{"success": true, "runs": [{"status": "finished:completed", "status-details": ""}]}'
    script = f"""
        if [ $1 = run ]; then echo 'Successfully started run 9'
        elif [ -e {tmp_path}/asked ]; then echo '{done}'
        else touch {tmp_path}/asked; echo '{{"success": false, "error-message": "busy"}}'; fi"""
    machine(flwr=script).run(tmp_path).check()


@flower
def test_a_run_that_does_not_start(machine: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the run did not start: no such app"):
        machine(flwr="echo no such app").run(tmp_path)


# The command


def test_app_toml_holds_the_whole_configuration() -> None:
    config = Config(clients=4, local_steps="3,4,5,6", compressor='topk(0.9) >> "x"', eta=1e-5)
    table = tomllib.loads(format_app(config, out="/a b/ü", resume=True, round_timeout=7.5))
    app = table["tool"]["flwr"]["app"]
    assert app["components"]["serverapp"] == "cfedavg.launch.app.server:app"
    assert app["components"]["clientapp"] == "cfedavg.launch.app.client:app"
    assert {"local-epochs", "dirichlet"} & set(app["config"]) == set()
    assert config_of(app["config"]) == config
    assert (app["config"]["out"], app["config"]["resume"], app["config"]["round-timeout"]) == (
        "/a b/ü",
        True,
        7.5,
    )


BAD = {
    "nodes": (["--nodes", "0"], "--nodes"),
    "quorum": (["--quorum", "1.5"], "--quorum"),
    "port": (["--port", "70000"], "--port"),
    "simulated": (["--drop-rate", "0.1"], "--drop-rate"),
    "compressor": (["--compressor", "topq(0.9)"], "--compressor"),
    "exclusive": (["--deadline", "3", "--local-steps", "2"], "--local-steps and --deadline exclude"),
    "list": (["--local-steps", "1,2,3"], "--local-steps must have one value for each of 4"),
    "clock": (["--deadline", "3", "--schedule", "corollary1", "--smoothness", "1"], "needs the same number"),
    "characters": (["--out", "a\x7fb"], "--out must be printable text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_options(
    name: str,
    cfedavg: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options, words = BAD[name]
    outcome = cfedavg("federate", "up", "--model", "linear", "--out", "run", *options)
    assert (outcome.code, "Traceback" in outcome.err) == (2, False)
    assert words in outcome.err
    assert not list(tmp_path.iterdir())


def test_without_flower(
    cfedavg: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cfedavg.launch.local_federation.shutil.which", lambda *_, **__: None)
    outcome = cfedavg("federate", "up", "--model", "linear", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert 'pip install "cfedavg[flower]"' in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run(cfedavg: Command, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(Config(clients=4, model="linear").to_toml())
    up = "federate", "up", "--out", tmp_path
    assert "holds a run already; set --resume" in cfedavg(*up).err
    assert "holds a simulation" in cfedavg(*up, "--resume").err
    (tmp_path / "federation.txt").touch()
    assert "holds the federation of an app; resume it with" in cfedavg(*up, "--resume").err
    (tmp_path / "federation").mkdir()
    assert "cannot resume: --nodes is 3, but the run" in cfedavg(*up, "--resume", "--nodes", 3).err
    assert "cannot resume: --eta is 2.0, but the run" in cfedavg(*up, "--resume", "--eta", 2).err
    (tmp_path / "config.toml").unlink()  # stopped before the first round
    assert "has begun; give its options again, without --resume" in cfedavg(*up, "--resume").err
    assert "--resume needs --out" in cfedavg("federate", "up", "--resume").err


def test_a_federation_that_is_done_is_not_started(
    tmp_path: Path, cfedavg: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started if its pictures are older than the last round, or if more rounds are wanted."""
    out = tmp_path / "out"
    (out / "federation").mkdir(parents=True)
    (out / "config.toml").write_text(DEFAULT.replace(rounds=2).to_toml())
    (out / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1}\n')
    (out / "report.html").touch()

    def begun(*_: Any, **__: Any) -> None:
        raise InputError("it starts")

    monkeypatch.setattr("cfedavg.launch.local_federation.LocalFederation", begun)
    up = ("federate", "up", "--out", str(out), "--resume")
    assert "all 2 rounds are done; set --rounds higher for more" in cfedavg(*up).out
    assert "it starts" in cfedavg(*up, "--rounds", "3").err
    assert "--rounds is 1, but the run in" in cfedavg(*up, "--rounds", "1").err
    os.utime(out / "report.html", (0, 0))
    assert "it starts" in cfedavg(*up).err


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped: continue with `cfedavg federate up"),
        (RunFailed("it broke (see log)"), 1, "it broke"),
    ],
)
def test_how_the_command_ends(
    raised: BaseException,
    code: int,
    words: str,
    cfedavg: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def up(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("cfedavg.launch.local_federation.train_federation", up)
    (tmp_path / "config.toml").touch()
    outcome = cfedavg("federate", "up", "--out", tmp_path)
    assert outcome.code == code
    assert words in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def test_rows_are_shown_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run does not show its old rows; a node that ends is reported once."""
    row: dict[str, Any] = dict.fromkeys(("snr_min", "delta_norm2", "error_norm2"))
    row |= {"uplink_bytes": 1000, "downlink_bytes": 2000, "lost": 0}
    lines = [format_row({"round": t, **row}) for t in range(4)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(lines[0])

    class Growing(AppRun):
        def __init__(self) -> None:
            self.looks = 0

        @property
        def followed(self) -> bool:
            self.looks += 1
            metrics.write_text("".join(lines[: 1 + self.looks]))
            return self.looks < 3

    class Gone(SuperNode):
        def __init__(self) -> None:
            self.name, self.number, self.log, self.process = "node7", 7, tmp_path / "log", None

    monkeypatch.setattr("cfedavg.launch.local_federation.POLL", 0.0)
    monkeypatch.setattr("cfedavg.callbacks.progress.PLAIN_EVERY", 0.0)
    with Console(width=200).capture() as captured, Display(captured._console, 4, "training") as display:
        fake: Any = SimpleNamespace(nodes=[Gone()], link=SimpleNamespace(running=False))
        _follow(Growing(), fake, tmp_path, Config(rounds=4), display)
    text = captured.get()
    assert "resuming after round 1 of 4" in text
    assert [line.split("  ")[:2] for line in text.splitlines() if line.startswith("round")] == [
        [f"round {t}/4", f"{3 * t} kB ({t} kB up)"] for t in (2, 3, 4)
    ]
    assert text.count("node7 has ended") == 1


# A real one

STAND_IN = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    (Path(context.node_config["state-dir"]) / "was-here").touch()
    said = ConfigRecord({"part": context.node_config["partition-id"]})
    return Message(RecordDict({"said": said}), reply_to=message)

@server.main()
def main(grid, context):
    ask = [Message(RecordDict({}), dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    replies = [reply for reply in grid.send_and_receive(ask, timeout=120) if reply.has_content()]
    parts = sorted(reply.content["said"]["part"] for reply in replies)
    Path(context.run_config["out"]).write_text(str(parts))
"""


@flower
@pytest.mark.slow
def test_a_real_federation_and_nothing_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes reply; one is stopped and started again, has the same id, and replies again."""
    components = {"serverapp": "stand_in:server", "clientapp": "stand_in:client"}
    monkeypatch.setattr("cfedavg.launch.local_federation.COMPONENTS", components)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(format_app(Config(), out=""))
    said: list[str] = []
    made = LocalFederation(tmp_path / "a federation", 2, more={"PYTHONPATH": str(tmp_path)}, say=said.append)
    with made as machine:
        machine.start()
        assert said[-1] == "nodes online: 2 of 2"
        for name in ("first", "second"):
            run = machine.run(tmp_path / "app", {"out": str(tmp_path / name)})
            assert run.wait(240).text == "finished:completed", run.log.read_text()
            assert (tmp_path / name).read_text() == "[0, 1]"
            before = machine.nodes[1].id
            machine.nodes[1].stop()
            machine.nodes[1].start()
            assert machine.nodes[1].id == before
        assert all((node.state / "was-here").exists() for node in machine.nodes)
        assert len(machine.processes.left()) >= 3
    assert not machine.processes.left()
    assert not any(service.running for service in (machine.link, *machine.nodes))


@flower
@pytest.mark.slow
def test_nothing_is_left_of_a_federation_whose_launcher_is_killed(tmp_path: Path) -> None:
    """The nodes' children end too, the port is free at once, and the run can be resumed."""
    out, ports = tmp_path / "out", Ports()
    port = ports.take()
    command = [Path(sys.executable).parent / "cfedavg", "federate", "up", "--out", out, "--port", str(port)]
    launcher = subprocess.Popen(
        [*command, "--nodes", "2", "--rounds", "1000", "--model", "linear"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    after = Processes(str(out / "federation"), os.environ)
    try:
        _until(lambda: read_rows(out / "metrics.jsonl") or launcher.poll() is not None)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        everyone = after.left() | set(map(int, children))
        assert len(everyone) >= 9  # SuperLink, two nodes, three SuperExecs, ServerApp, follower, watchdog
        launcher.kill()
        launcher.wait()
        _until(lambda: all(map(_is_gone, everyone)))
        assert not after.left()
        socket.create_server((HOST, port)).close()
        done = len(read_rows(out / "metrics.jsonl"))
        resumed = [*command, "--resume", "--rounds", str(done + 1)]
        subprocess.run(resumed, check=True, stdout=subprocess.DEVNULL, timeout=240)
        assert len(read_rows(out / "metrics.jsonl")) == done + 1
    finally:
        launcher.kill()
        launcher.wait()
        after.stop()
        ports.close()
