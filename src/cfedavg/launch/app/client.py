"""The ClientApp: it trains on the node's part of the data, for K local steps or until the deadline."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from cfedavg.compress import parse
from cfedavg.core.errors import InputError
from cfedavg.data.tasks import build_task
from cfedavg.feedback import FEEDBACKS
from cfedavg.flower.mod import LENGTH, STEPS, compressed
from cfedavg.launch.app import config_of
from cfedavg.launch.app.plan import make_plan
from cfedavg.simulate.local import after, batches, clock, local_steps, reproducible, seed_generators

CPU = torch.device("cpu")


def compress_as_configured(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Apply the mod `compressed`; refuse a request with a class that the run configuration does not name."""
    config = config_of(context.run_config)
    own = [type(part) for part in (*parse(config.compressor).stages, FEEDBACKS.parse(config.feedback))]
    return compressed(message, context, call_next, own=own)


app = ClientApp(mods=[compress_as_configured])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the local steps (Algorithm 1, lines 5 to 9) on part `partition-id` of the data."""
    config = config_of(context.run_config)
    task, client = build_task(config), _read_part(context, config.clients)
    plan = make_plan(config, task)
    t = int(str(message.content.config_records["config"]["server-round"])) - 1  # Flower counts from 1
    task.model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    enough = after(plan.steps.at(t, client)) if config.deadline is None else clock(config.deadline)
    with reproducible(CPU):
        seed_generators(CPU, config.seed, t, client)
        work = local_steps(
            task.model,
            task.loss,
            batches(task.clients[client], config.batch_size, config.seed, t, client),
            plan.local_optimiser,
            plan.rates.eta_local(t),
            enough,
        )
    metrics = MetricRecord(
        {"train_loss": float(work.loss), STEPS: work.K, "num-examples": len(task.clients[client])}
    )
    if plan.rates.update == "fednova" and work.K:
        metrics[LENGTH] = float(plan.divisor(t, work.K) or work.K)
    arrays = ArrayRecord(task.model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _read_part(context: Context, clients: int) -> int:
    found = context.node_config.get("partition-id")
    if not isinstance(found, int) or not 0 <= found < clients:
        raise InputError(
            f"--node-config: `partition-id` must be a whole number from 0 to {clients - 1}, got {found!r}"
        )
    return found
