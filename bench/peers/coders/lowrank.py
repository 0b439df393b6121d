"""PyTorch's PowerSGD hook in a few gloo processes, on the updates that our `lowrank` compresses.

Both are given the same updates of each client and round, those of uncompressed FedAvg on the embedded MNIST
subset, and have error feedback. The hook sums the clients' products M Q over the processes and sends one pair
of factors back, so that its P is that of the mean; ours sends each client's own factors to the server. What
counts is the mean update that has been applied until round t, beside the mean update that there was:

    error_t = |sum_s (mean_i g_i,s - applied_s)| / |sum_s mean_i g_i,s|.

Bytes are those that a process hands to `all_reduce`, as float32, and the lengths of our messages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cfedavg import Config, Layout, decompress, encode, parse
from cfedavg.core.bases import Factors
from cfedavg.core.keys import Purpose, derive, normals, signed

ROOT = Path(__file__).parents[3]
CLIENTS, ROUNDS, MODEL = 4, 20, "lenet"
# Where the hook's iteration starts from: the last factors, new ones each round, or those of our `lowrank`.
STARTS = ("warm", "drawn", "ours")
RANKS = (2,)


class Bucket:
    """A vector as the hook knows DDP's buckets: one tensor for each parameter, views of one buffer."""

    def __init__(self, layout: Layout, vector: Tensor) -> None:
        parts = zip(layout.slices(), layout.shapes, strict=True)
        self.vector, self.tensors = vector, [vector[part].view(shape) for part, shape in parts]

    def buffer(self) -> Tensor:
        return self.vector

    def gradients(self) -> list[Tensor]:
        return self.tensors

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def make_state(rank: int, start: str, feedback: bool) -> power.PowerSGDState:
    """Return a state that compresses from the first step, and every matrix whose factors are shorter."""
    state = power.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1,
        warm_start=start != "drawn", use_error_feedback=feedback,
    )  # fmt: skip
    state.iter = 2
    return state


def draw_starts(layout: Layout, rank: int, key: int) -> Tensor:
    """Return the matrices Q_0 that `lowrank` draws from a key, one after another."""
    basis, word, sent, found = (
        Factors.of(layout, rank),
        derive(np.array([signed(key)]), Purpose.SELECT),
        0,
        [],
    )
    for (rows, _), r, count in zip(basis.shapes, basis.ranks(), basis.counts(), strict=True):
        if r:
            found.append(normals(word[:, None], np.arange(sent + rows * r, sent + count))[0])
        sent += count
    return torch.from_numpy(np.concatenate(found)).float()


def reduce_by_hook(state: power.PowerSGDState, layout: Layout, g: Tensor, start: Tensor | None) -> Tensor:
    """Return the mean update that the hook applies; `start` takes the place of the last factors Q."""
    if start is not None:
        basis = Factors.of(layout, state.matrix_approximation_rank)
        rows = sum(shape[0] * r for shape, r in zip(basis.shapes, basis.ranks(), strict=True))
        state.p_memory_dict[0], state.q_memory_dict[0] = torch.empty(rows), start.clone()
    found: Tensor = power.powerSGD_hook(state, Bucket(layout, g.clone())).wait()
    return found


def run_process(folder: Path, rank: int, start: str, feedback: bool) -> NoReturn:
    """Be one of the processes: reduce the updates of a client; process 0 writes what was applied."""
    client, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=client, world_size=n)
    layout = Layout.from_text((folder / "layout.json").read_text())
    updates = torch.from_numpy(np.load(folder / "updates.npy"))
    state, applied, seconds = make_state(rank, start, feedback), [], []
    for t, g in enumerate(updates[:, client]):
        given = draw_starts(layout, rank, t) if start == "ours" else None
        began = time.process_time()
        applied.append(reduce_by_hook(state, layout, g, given))
        seconds.append(time.process_time() - began)
    if client == 0:
        np.save(folder / "applied.npy", torch.stack(applied).numpy())
        (folder / "seconds.json").write_text(json.dumps(statistics.median(seconds)))
    dist.barrier()
    time.sleep(0.2)  # until the others have left the barrier
    os._exit(0)  # torch.distributed's threads may abort the interpreter's own end


def run_hook(
    layout: Layout, updates: Tensor, rank: int, start: str, feedback: bool = True
) -> tuple[Tensor, float]:
    """Return what the hook applied in each round, and the median seconds of a round in process 0.

    `updates` has shape (rounds, clients, d); each client has a process of its own.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "layout.json").write_text(layout.text)
        np.save(folder / "updates.npy", updates.numpy())
        n = updates.shape[1]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(n)}
        command = [
            sys.executable,
            "-m",
            "bench.peers.coders.lowrank",
            name,
            str(rank),
            start,
            str(int(feedback)),
        ]
        started = [subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(i)}) for i in range(n)]
        if any(process.wait(600) for process in started):
            raise SystemExit("a process of the hook failed")
        return torch.from_numpy(np.load(folder / "applied.npy")), float((folder / "seconds.json").read_text())


def run_ours(layout: Layout, updates: Tensor, text: str) -> tuple[Tensor, float, float]:
    """Return what ours applied, the mean bytes of a message and the median seconds of a client's round."""
    compressor, n = parse(text), updates.shape[1]
    residuals, applied, sizes, seconds = torch.zeros_like(updates[0]), [], [], []
    for t, g in enumerate(updates):
        p = g + residuals
        began = time.process_time()
        payload = compressor.compress(p, torch.full((n,), t), layout)
        sizes += [len(encode(each.numpy(), layout)) for each in payload.clients()]
        seconds.append((time.process_time() - began) / n)
        sent = decompress(payload)
        residuals = p - sent
        applied.append(sent.mean(0))
    return torch.stack(applied), statistics.fmean(sizes), statistics.median(seconds)


def train_updates() -> tuple[Layout, Tensor]:
    """Return the layout and the updates of each round and client of uncompressed FedAvg."""
    from cfedavg.data.tasks import build_task
    from cfedavg.optimise import SGD
    from cfedavg.simulate.local import after, batches, local_steps

    task = build_task(Config(clients=CLIENTS, classes_per_client=5, model=MODEL, rounds=1, local_epochs=1))
    named = dict(task.model.named_parameters())
    layout = Layout(tuple(named), tuple(tuple(p.shape) for p in named.values()), ("float32",) * len(named))
    x, rounds = parameters_to_vector(task.model.parameters()).detach().clone(), []
    for t in range(ROUNDS):
        updates = []
        for client, samples in enumerate(task.clients):
            vector_to_parameters(x.clone(), task.model.parameters())
            local_steps(task.model, task.loss, batches(samples, 64, 0, t, client), SGD(), 0.1, after(10))
            updates.append(parameters_to_vector(task.model.parameters()).detach() - x)
        rounds.append(torch.stack(updates))
        x = x + rounds[-1].mean(0)
    return layout, torch.stack(rounds)


def names(rank: int) -> list[str]:
    """Return the contenders of a rank: the hook with each start, ours in fp32 and in bf16."""
    return [*(f"hook, {start}" for start in STARTS), f"lowrank({rank})", f"lowrank({rank}) >> bf16"]


def compare(layout: Layout, updates: Tensor, rank: int, name: str) -> dict[str, Any]:
    """Return the line of a contender: bytes and milliseconds of a client and round, and the errors."""
    if name.startswith("hook, "):
        applied, seconds = run_hook(layout, updates, rank, name.removeprefix("hook, "))
        size = 4.0 * Factors.of(layout, rank).count(layout.d)
    else:
        applied, size, seconds = run_ours(layout, updates, name)
    truth = updates.mean(1).cumsum(0)
    errors = (truth - applied.cumsum(0)).norm(dim=1) / truth.norm(dim=1)
    return {
        "part": "lowrank", "rank": rank, "name": name, "clients": CLIENTS, "bytes": round(size),
        "ms": round(1e3 * seconds, 3), "errors": [round(float(error), 4) for error in errors],
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_process(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
