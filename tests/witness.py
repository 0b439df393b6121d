"""The packaged client app between two mods that keep what it computed and what it sent.

It runs in the processes of a real federation. What was computed counts once the state with it is stored,
which is when the mod has returned.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from cfedavg.core.files import replace_file, write_atomic
from cfedavg.flower.mod import compressed
from cfedavg.flower.replies import read_reply
from cfedavg.flower.requests import read_order
from cfedavg.launch.app import client


def _folder(context: Context) -> Path:
    folder = Path(str(context.node_config["state-dir"])).parent / "witness"
    folder.mkdir(exist_ok=True)
    return folder


def outside(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Keep what is sent, by round."""
    order = read_order(message)
    reply = call_next(message, context)
    if order is not None and not reply.has_error():
        folder = _folder(context)
        write_atomic(folder / f"{order.t}.message", read_reply(reply.content).message)
        if (computed := folder / "computed.npy").exists():
            computed.rename(folder / f"{order.t}.npy")
    return reply


def inside(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Keep what was computed."""
    before = _vector(message)
    _dawdle(_folder(context) / "slow")
    reply = call_next(message, context)
    if not reply.has_error():
        with replace_file(_folder(context) / "computed.npy") as temporary, temporary.open("wb") as file:
            np.save(file, _vector(reply) - before)  # the node may be killed at any moment
    return reply


def _dawdle(while_there_is: Path, most: float = 120.0) -> None:
    """Wait while the file exists."""
    end = time.monotonic() + most
    while while_there_is.exists() and time.monotonic() < end:
        time.sleep(0.2)


def _vector(message: Message) -> np.ndarray:
    (record,) = message.content.array_records.values()
    return np.concatenate([array.numpy().reshape(-1) for array in record.values()])


app = ClientApp(mods=[outside, compressed, inside])
app.train()(client.train)
