"""A federation of NNCodec's own Flower client and strategy, both directions compressed, and ours beside it.

`NNClient` and `NNCFedAvg` are those of the package, driven as `example/nnc_fl.py` of its repository does, but
without Ray and without a network: each round calls the `fit` of one client after another, then the strategy's
`aggregate_fit` and `evaluate`. Task, first weights, batches and local steps are ours on both sides, bit for
bit. Bytes are those of the coded messages: NNCodec's bitstreams without Flower's framing, ours with header
and checksum. In the first round NNCodec's strategy sends the whole model as float32, ours as a coded message.
"""

from __future__ import annotations

import contextlib
import copy
import io
import time
from argparse import Namespace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from bench.peers.coders import nnc
from flwr.common import FitIns, FitRes, ndarrays_to_parameters
from nncodec import fl

from cfedavg import Config, run
from cfedavg.data.tasks import build_task
from cfedavg.optimise import SGD
from cfedavg.simulate.local import after, batches, evaluate, local_steps
from cfedavg.task import Task

CLIENTS, BATCH, RATE = 10, 64, 0.1
SEEDS = (0, 1, 2)
# The first three are those of `example/nnc_fl.py`, of nncodec.fl, and of the EuCNC 2025 paper in its README.
# The last has a step 4 times as large as the first, 1/64, and no sparsity beside that of the quantiser.
SPARSE = {"struct_spars_factor": 0.9, "tca": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "qp -32": {"qp": -32},
    "qp -26, 60% sparse, TCA": {"qp": -26, "sparsity": 0.6, **SPARSE},
    "qp -18, 80% sparse, TCA": {"qp": -18, "sparsity": 0.8, **SPARSE},
    "qp -24": {"qp": -24},
}  # fmt: skip
DEFAULT = "topk(0.97, least=10000) >> int3(256)"


class Plan(NamedTuple):
    """The federations of a model: ours by the compressor of both directions, NNCodec's by its settings."""

    rounds: int
    steps: int
    classes: int  # of a client
    names: tuple[str, ...]


PLANS = {
    "cnn": Plan(15, 8, 5, (
        DEFAULT, "topk(0.98) >> int3(256)", "topk(0.99) >> int3(256)", "qp -24", "qp -26, 60% sparse, TCA",
    )),
    "lenet": Plan(40, 16, 2, (
        DEFAULT, "topk(0.95) >> int3(256)", "qp -24", "qp -32", "qp -26, 60% sparse, TCA",
        "qp -18, 80% sparse, TCA",
    )),
}  # fmt: skip


def make_config(model: str, seed: int, compressor: str = DEFAULT) -> Config:
    """Return the configuration of a federation; error feedback is on."""
    plan = PLANS[model]
    return Config(
        clients=CLIENTS, classes_per_client=plan.classes, model=model, local_steps=str(plan.steps),
        batch_size=BATCH, eta_local=RATE, rounds=plan.rounds, seed=seed, device="cpu", compressor=compressor,
        compressor_down=compressor,
    )  # fmt: skip


def compare(model: str, name: str, seed: int) -> dict[str, Any]:
    """Return the line of a federation: accuracies, bytes of all clients by round, and of first downloads."""
    who, measure = ("NNCodec", run_nncodec) if name in SETTINGS else ("ours", run_ours)
    began = time.process_time()
    found = measure(make_config(model, seed, DEFAULT if name in SETTINGS else name), name)
    line = {"part": "federation", "model": model, "name": name, "who": who, "seed": seed}
    return {**line, **found, "seconds": round(time.process_time() - began, 1)}


def run_ours(config: Config, _: str) -> dict[str, Any]:
    """Run a federation by cfedavg."""
    rows = run(config, build_task(config), progress=False, draw=False).rows
    return {
        "accuracy": [round(row["test_accuracy"], 4) for row in rows],
        "up": [row["uplink_bytes"] for row in rows],
        "down": [row["downlink_bytes"] for row in rows],
        "first": sum(row.get("first_download_bytes", 0) for row in rows) or rows[0]["downlink_bytes"],
    }  # fmt: skip


def make_arguments(name: str, folder: str) -> Namespace:
    """Return the arguments of `example/nnc_fl.py`, with `--compress_upstream --compress_downstream
    --compress_differences --err_accumulation`."""
    given = {"sparsity": 0.0, "struct_spars_factor": 0.0, "tca": False} | SETTINGS[name]
    return Namespace(
        **given, diff_qp=given["qp"], qp_density=2, nonweight_qp=-75, opt_qp=False, use_dq=False,
        bitdepth=None, lsa=False, bnf=False, row_skipping=False, param_opt=True, approx_method="uniform",
        results=folder, model="model", job_id="", wandb=False, verbose=False, lr=RATE, weight_decay=0.0,
        compress_upstream=True, compress_downstream=True, compress_differences=True, err_accumulation=True,
    )  # fmt: skip


def run_nncodec(config: Config, name: str) -> dict[str, Any]:
    """Run a federation by NNCodec's client and strategy."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return federate(build_task(config), config, make_arguments(name, folder))


def federate(task: Task, config: Config, arguments: Namespace) -> dict[str, Any]:
    """Run the rounds; return accuracies and bytes."""
    state = task.model.state_dict()
    info = {"parameter_index": {name: i for i, name in enumerate(state)}}
    found: list[float] = []

    def measure(_: int, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        task.model.load_state_dict(weights)
        record = evaluate(task.model, task, torch.device("cpu"), torch.float32)
        found.append(round(float(record["test_accuracy"]), 4))
        return {"loss": float(record["test_loss"])}

    def train(model: torch.nn.Module, *, trainloader: Any, round: int, **_: Any) -> dict[str, float]:
        client, samples = trainloader.client, trainloader.samples
        for p in model.parameters():  # NNClient keeps views of the weights before training, copies on a GPU
            p.data = p.data.clone()
        drawn = batches(samples, BATCH, config.seed, round, client)
        local_steps(model, task.loss, drawn, SGD(), RATE, after(int(config.local_steps)))
        return {}

    weights = [tensor.numpy().copy() for tensor in state.values()]
    strategy = fl.NNCFedAvg(
        min_fit_clients=CLIENTS, min_available_clients=CLIENTS, evaluate_fn=measure, accept_failures=False,
        fit_metrics_aggregation_fn=None, initial_parameters=None, model_arch=copy_model(task), mdl_info=info,
        args=arguments, encode_fn=fl.encode, decode_fn=nnc.nnc.decompress,
    )  # fmt: skip
    parameters, up, down = ndarrays_to_parameters(weights), [], []
    for t in range(config.rounds):
        down.append(CLIENTS * (length(parameters) if t else sum(each.nbytes for each in weights)))
        replies = [fit(task, client, parameters, info, arguments, train) for client in range(CLIENTS)]
        up.append(sum(length(reply.parameters) for reply in replies))
        parameters, _ = strategy.aggregate_fit(t + 1, [(None, reply) for reply in replies], [])
        strategy.evaluate(t + 1, parameters)
    return {"accuracy": found, "up": up, "down": down, "first": down[0]}


def fit(
    task: Task, client: int, parameters: Any, info: dict[str, Any], arguments: Namespace, train: Any
) -> FitRes:
    """Run a round of a client. As in Ray, each round makes the client anew; its state is on the disk."""
    made = fl.NNClient(
        None, trainloader=Loader(task, client), valloader=None, id=client + 1, criterion=None,
        device=torch.device("cpu"), c_model=copy_model(task), args=arguments, mdl_info=info,
        encode_fn=fl.encode, decode_fn=nnc.nnc.decompress, train_fn=train,
    )  # fmt: skip
    reply: FitRes = made.to_client().fit(FitIns(parameters, {}))
    return reply


class Loader:
    """What NNClient knows of the data: a length, which weighs the client."""

    def __init__(self, task: Task, client: int) -> None:
        self.client, self.samples = client, task.clients[client]

    def __len__(self) -> int:
        return len(self.samples)


def copy_model(task: Task) -> torch.nn.Module:
    return copy.deepcopy(task.model)


def length(parameters: Any) -> int:
    """Return the bytes of a bitstream in Flower's parameters, without NumPy's header."""
    (tensor,) = parameters.tensors
    return len(tensor) - tensor.index(b"\n") - 1
