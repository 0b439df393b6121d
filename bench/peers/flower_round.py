"""A round of FedAvg in Flower's simulation engine (flwr with Ray), by its message API.

The same as in plain_round.py: model, initial weights, samples, their fixed order, local SGD, the uniform
mean, evaluation on the test set after each round (here in the server's process alone). --processes is the
number of Ray's actors. Flower's evaluation on the clients is switched off. Memory is the sum over all of
Ray's processes, its daemons included.

Ray binds to the machine's outside interface and probes a cloud's metadata address. So this starts only
where there is no interface but lo, in a network namespace of its own:

    unshare -r -n -p -f --kill-child --mount-proc .venv-peers/bin/python bench/peers/flower_round.py

(-p and what follows it may be left out; they end Ray's processes even if this program is killed.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import Settings, local_sgd, moved, now, report, right, settings, work
from common import Work as Task

sys.path.append(str(Path(__file__).resolve().parents[2]))
from scripts.isolated import QUIET, is_isolated, raise_loopback


def status(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def neighbours() -> Iterator[int]:
    """The other processes in this network namespace, but for this one's ancestors: Ray's, all of them."""
    mine = Path("/proc/self/ns/net").readlink()
    spared, pid = {os.getpid()}, os.getppid()
    while pid > 0:
        spared.add(pid)
        pid = int(status(pid)["PPid"])
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spared:
            with contextlib.suppress(OSError):
                if (entry / "ns/net").readlink() == mine:
                    yield int(entry.name)


def resident() -> int:
    """The sum of the peaks of this process's and its neighbours' resident memory."""
    total = 0
    for pid in [os.getpid(), *neighbours()]:
        with contextlib.suppress(OSError):
            total += 1024 * int(status(pid).get("VmHWM", "0 kB").split()[0])
    return total


def supervise(limit: float) -> int:
    """Runs this program once more, for so many seconds at most, and leaves no process behind."""
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's sockets need a short path
    # Ray's actors must find common.py, and whatever this process found.
    paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PEER_PLACE": place, "FLWR_HOME": place, "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | QUIET | own)
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"ended at the limit of {limit:.0f} s", file=sys.stderr)
        return 1
    finally:
        child.kill()
        child.wait()
        for _ in range(100):
            left = list(neighbours())
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        shutil.rmtree(place, ignore_errors=True)


def train(given: Settings, task: Task, after: Callable[[], None]) -> None:
    """All rounds; `after` is called with the model of each round, and first with that of the start."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def local(message: Message, context: Context) -> Message:
        torch.set_num_threads(given.threads)
        mine = work(given)  # kept by each of Ray's actors
        model = mine.model.to(given.device)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        samples = moved(mine.clients[int(context.node_config["partition-id"])], given.device)
        local_sgd(model, samples, given.epochs, given.batch)
        metrics = MetricRecord({"num-examples": len(samples[1])})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
            task.model.load_state_dict(arrays.to_torch_state_dict())
            after()
            return MetricRecord({})

        m = given.clients
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=m, min_available_nodes=m)
        arrays = ArrayRecord(task.model.state_dict())
        strategy.start(grid, arrays, num_rounds=1 + given.rounds, timeout=given.limit, evaluate_fn=evaluate)

    gpus = 1 if given.device.startswith("cuda") else 0
    run_simulation(
        server,
        client,
        num_supernodes=given.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": gpus / given.processes},
            "init_args": {
                "num_cpus": given.processes,
                "num_gpus": gpus,
                "include_dashboard": False,
                "log_to_driver": False,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": os.environ["PEER_PLACE"],
            },
        },
    )


def main() -> None:
    given = settings(__doc__)
    if not is_isolated():
        raise SystemExit(f"there are interfaces beside lo: Ray is not started here\n{__doc__}")
    raise_loopback()
    if "PEER_PLACE" not in os.environ:
        raise SystemExit(supervise(given.limit))
    torch.set_num_threads(given.threads)
    task = work(given)
    task.model.to(given.device)
    test = moved(task.test, given.device)
    stamps: list[float] = []
    accuracy: list[float] = []

    def after() -> None:
        accuracy.append(right(task.model, test) / test[1].numel())
        stamps.append(now(given.device))
        if len(stamps) == 2 + given.rounds:
            import flwr

            # The first was the model of the start, the second that of the warm-up.
            steps, peak = task.steps(given.epochs), resident()
            report(f"flwr {flwr.__version__}", given, steps, stamps[1:], accuracy[2:], peak)

    train(given, task, after)
    if len(stamps) != 2 + given.rounds:
        raise SystemExit("Flower ended early")


if __name__ == "__main__":
    main()
