"""What the peers' drivers share: options, the task, processes, evaluation, and the JSON they print."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg import Config
from cfedavg.data.tasks import build_task

EVALUATION_BATCH, RATE = 512, 0.1
CHARACTERS, LENGTH = 90, 80  # of the sequences for the LSTM
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """The round to do, and by how many processes."""

    model: str
    clients: int
    samples: int | None
    epochs: int
    rounds: int
    device: str
    processes: int
    threads: int
    seed: int
    data_dir: str | None
    limit: float

    @property
    def rank(self) -> int:
        return int(os.environ.get("PEER_RANK", 0))

    @property
    def batch(self) -> int:
        return 64 if self.model == "cnn" else 10


def settings(text: str | None) -> Settings:
    """The command line as settings."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["cnn", "lstm"], default="cnn", help="lstm: on random characters")
    parser.add_argument("--clients", type=int, default=100, help="m")
    parser.add_argument("--samples", type=int, help="of each client; without it, all that it is dealt")
    parser.add_argument("--epochs", type=int, default=10, help="local epochs")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; one more, before them, warms up")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="that share the clients and the device")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", help="MNIST as parquet files; without it, the embedded subset")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which everything is ended")
    found = Settings(**vars(parser.parse_args()))
    if min(found.clients, found.epochs, found.rounds, found.processes, found.threads) < 1:
        parser.error("all counts must be at least 1")
    if found.processes > found.clients:
        parser.error("--processes: there are fewer clients")
    return found


@dataclass(frozen=True)
class Work:
    """The model as it starts, each client's samples, the test set and the batch size."""

    model: nn.Module
    clients: list[Batch]
    test: Batch
    batch: int

    def steps(self, epochs: int) -> int:
        """Local steps of all clients in a round; the short last batch of an epoch counts."""
        return epochs * sum(-(-len(labels) // self.batch) for _, labels in self.clients)


class CharacterLSTM(nn.Module):
    """Two LSTM layers of 256 over an embedding of 8 that predict every next character of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """The logits, (sequences, characters, length)."""
        y: Tensor = self.head(self.lstm(self.embedding(characters))[0])
        return y.transpose(1, 2)


def characters(given: Settings) -> Work:
    """Random sequences for the LSTM: 100 for each client, if `--samples` does not say otherwise."""
    generator = torch.Generator().manual_seed(given.seed)
    torch.manual_seed(given.seed)
    text = torch.randint(
        CHARACTERS, (given.clients + 1, given.samples or 100, LENGTH + 1), generator=generator
    )
    *clients, test = [(each[:, :-1], each[:, 1:]) for each in text]
    return Work(CharacterLSTM(), clients, test, given.batch)


@cache
def work(given: Settings) -> Work:
    """The task as cfedavg builds it (partition, standardised images, initial weights), on the CPU."""
    if given.model == "lstm":
        return characters(given)
    config = Config(
        dataset="mnist" if given.data_dir else "embedded",
        data_dir=given.data_dir,
        clients=given.clients,
        iid=True,
        model="cnn",
        seed=given.seed,
    )
    task = build_task(config)
    fewest = min(len(client) for client in task.clients)
    if given.samples is not None and not 1 <= given.samples <= fewest:
        raise SystemExit(f"--samples is {given.samples}: each of {given.clients} clients holds only {fewest}")
    held = [client.batch(np.arange(given.samples or len(client))) for client in task.clients]
    return Work(task.model, held, task.test.batch(np.arange(len(task.test))), given.batch)


def moved(batch: Batch, device: str) -> Batch:
    """The batch on the device."""
    return batch[0].to(device), batch[1].to(device)


def local_sgd(model: nn.Module, client: Batch, epochs: int, batch: int) -> None:
    """Epochs of plain SGD in a fixed order, the last batch short."""
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for _ in range(epochs):
        for inputs, labels in zip(client[0].split(batch), client[1].split(batch), strict=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()


@torch.no_grad()
def right(model: nn.Module, test: Batch) -> int:
    """How many samples the model gets right."""
    model.eval()
    batches = zip(test[0].split(EVALUATION_BATCH), test[1].split(EVALUATION_BATCH), strict=True)
    return int(sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in batches))


def now(device: str) -> float:
    """The clock, once the device has done what it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(given: Settings) -> None:
    """Starts this program once for each process and ends with them; returns in each of those.

    Each knows its place by PEER_RANK and PEER_PORT, and by the two variables that pfl reads.
    """
    torch.set_num_threads(given.threads)
    if given.processes == 1 or "PEER_RANK" in os.environ:
        signal.alarm(math.ceil(given.limit))  # ends this process, even where nobody waits for it
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = os.environ | {
        "PEER_PORT": str(port),
        "PFL_WORKER_ADDRESSES": ",".join([f"127.0.0.1:{port}"] * given.processes),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(given.threads),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=base | {"PEER_RANK": str(rank), "PFL_WORKER_RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(given.processes)
    ]
    raise SystemExit(_wait(started, given.limit))


def _wait(started: list[subprocess.Popen[bytes]], limit: float) -> int:
    """0 once all have ended well; with the first failure or at the time limit the others are killed."""
    end = time.monotonic() + limit
    try:
        while True:
            codes = [process.poll() for process in started]
            if all(code == 0 for code in codes):
                return 0
            if any(codes) or time.monotonic() > end:
                print(f"given up: exit statuses {codes}, limit {limit:.0f} s", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()


def join(given: Settings) -> None:
    """Joins the processes that `spread` started, by gloo: NCCL refuses several processes on one GPU."""
    if given.processes > 1:
        where = f"tcp://127.0.0.1:{os.environ['PEER_PORT']}"
        size = given.processes
        torch.distributed.init_process_group("gloo", init_method=where, rank=given.rank, world_size=size)


def leave() -> NoReturn:
    """End this process at once: torch.distributed's threads may abort the interpreter's own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def memory(given: Settings) -> int:
    """Peak memory of all processes: allocated on the GPU, or resident in RAM."""
    if given.device.startswith("cuda"):
        mine = torch.cuda.max_memory_allocated()
    else:
        mine = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = torch.tensor([mine], dtype=torch.int64)
    if given.processes > 1:
        torch.distributed.all_reduce(total)
    return int(total)


def report(
    who: str, given: Settings, steps: int, stamps: list[float], accuracy: list[float], peak: int
) -> None:
    """The line of JSON. The stamps are the ends of all rounds; the first ended the warm-up."""
    seconds = [after - before for before, after in pairwise(stamps)]
    line = {
        "who": who,
        "processes": given.processes,
        "threads": given.threads,
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
        "model": given.model,
        "clients": given.clients,
        "steps_per_round": steps,
        "seconds_per_round": [round(each, 4) for each in seconds],
        "steps_per_second": round(steps / statistics.median(seconds), 1),
        "test_accuracy": [round(each, 4) for each in accuracy],
        "peak_memory_bytes": peak,
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)
