"""Digests of what a light client sends and keeps, which are the same on every machine.

`python -m tests.light` prints them. It needs Flower and NumPy alone.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message

from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats
from cfedavg.flower.replies import OURS
from cfedavg.wire import WireError, decode
from cfedavg.wire.frame import CHECKSUM, SIZE
from tests.golden_cases import cases, message, whole_float_cases
from tests.grid import Adding, Arrays, Federation, LocalNode, arrays_of, reply_with

MODEL: Arrays = {
    "weight": np.zeros((30, 40), np.float32), "bias": np.zeros(30, np.float32), "n": np.array([3]),
}  # fmt: skip
RUNS: tuple[dict[str, Any], ...] = (
    {"compressor": "topk(0.9) >> int3(64)", "compressor_down": "none"},
    {"compressor": "topk(0.9, per_tensor=true) >> bf16", "compressor_down": "topk(0.9) >> bf16"},
    {"compressor": "rd(0.9) >> qsgd(16)", "compressor_down": "topk(0.9) >> sign", "feedback": "ef21"},
)


class Learning(Adding):
    """A client app that adds random numbers to the model, in some rows more than in others."""

    def train(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        server_round = message.content.config_records["config"]["server-round"]
        random = np.random.default_rng([partition, int(str(server_round))])
        (found,) = message.content.array_records.values()
        arrays = arrays_of(found)
        for name, array in arrays.items():
            if array.dtype == np.float32:
                scale = np.exp(random.standard_normal(array.shape[-1:]))
                arrays[name] = (array + scale * random.standard_normal(array.shape)).astype(np.float32)
        return reply_with(arrays, {**self.metrics, "partition": partition}, message)


def digest(options: dict[str, Any]) -> str:
    """Return a hash of all replies and of the files of nodes and server after 4 rounds.

    The first node's replies of rounds 2 and 3 get lost.
    """
    found, count = hashlib.sha256(), itertools.count()

    def lose_some(node: LocalNode, request: Message, reply: Message) -> Message | None:
        assert not reply.has_error(), reply.error.reason
        found.update(repr(sorted(reply.content[OURS].items())).encode())
        return None if node.id == 100 and next(count) in (1, 2) else reply

    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), Learning().app, 2, MODEL)
        federation.grid.on_reply = lose_some
        federation.start(4, **options)
        files = [path for path in sorted(Path(folder).rglob("*.safetensors")) if path.parent.name != "state"]
        assert len(files) >= 3  # of two nodes, and the model
        for path in files:
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def digest_messages() -> str:
    """Return a hash of the messages of all golden cases, and of what their decoder says to damaged ones."""
    found, random = hashlib.sha256(), np.random.default_rng(0)
    versions = [(case, False) for case in cases()] + [(case, True) for case in whole_float_cases()]
    for (name, layout, payload), code_floats in versions:
        data = message(payload, layout, code_floats)
        found.update(data)
        for _ in range(4 if "-listed-" in name else 0):
            damaged = np.frombuffer(data[:-4], np.uint8).copy()
            at = random.integers(SIZE, len(damaged), 3)
            damaged[at] = random.integers(0, 256, 3)
            body = damaged.tobytes()
            found.update(describe(body + CHECKSUM.pack(zlib.crc32(body)), layout))
    return found.hexdigest()


def describe(data: bytes, layout: Layout) -> bytes:
    """Return the bytes of the payload of a message, or the error of its decoder."""
    try:
        payload = decode(data, layout=layout)
    except WireError as error:
        return str(error).encode()
    values = payload.values
    arrays = [values.data] if isinstance(values, Floats) else [values.levels, values.scales]
    return b"".join(np.asarray(array).tobytes() for array in (payload.indices, *arrays))


def fix_chance(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make names and times of federations the same in every process; `change` is called like `setattr`."""
    change(secrets, "token_hex", lambda n=None: "0" * 32)
    change(secrets, "randbits", lambda k: 1)
    change(time, "time", lambda: 1.8e9)


def digests() -> list[str]:
    """Return all digests."""
    return [digest_messages(), *map(digest, RUNS)]


if __name__ == "__main__":
    fix_chance()
    print(*digests())
