"""Running statistics of batch norms: bf16 where a direction's compressor rounds, counters as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cfedavg import Config, Layout, Task, parse
from cfedavg.core.arrays import round_to_bf16, to_bf16
from cfedavg.core.payload import Floats, Payload
from cfedavg.simulate.engines import ReferenceEngine, choose_engine
from cfedavg.simulate.engines.traffic import BufferChannel
from cfedavg.simulate.plan import Plan
from cfedavg.wire import encode
from tests.conftest import blobs

# As of two batch norms: means, a counter, variances, another counter.
LAYOUT = Layout(
    ("mean", "count", "variance", "other"), ((3,), (), (3,), ()), ("float32", "int64", "float32", "int64")
)
B = torch.tensor([1.001, -2.003, 1 / 3, 1001.0, 0.1, 0.7, 5e-3, 16_777_215.0])
COUNTERS = torch.tensor([False, False, False, True, False, False, False, True])


def message(values: Tensor, kind: str) -> bytes:
    """The message of these values, all of them."""
    n = len(values)
    data = to_bf16(values.float()) if kind == "bf16" else values
    payload = Payload(n, torch.tensor([0, n]), None, Floats(data, kind)).numpy()
    return encode(payload, Layout.flat(n))


@pytest.mark.parametrize("text", ["none", "topk(0.9)", "rd(0.5)", "fp32"])
def test_where_nothing_is_rounded_they_travel_as_they_are(text: str) -> None:
    channel = BufferChannel(LAYOUT, parse(text))
    assert channel.transmit(B) is B
    assert channel.bytes(B) == len(message(B, "fp32"))


@pytest.mark.parametrize("text", ["topk(0.9) >> bf16", "topk(0.97, least=9) >> int3(256)", "sign", "qsgd(4)"])
def test_where_values_are_rounded_they_are_bf16_and_counters_exact(text: str) -> None:
    channel = BufferChannel(LAYOUT, parse(text))
    found = channel.transmit(B)
    assert torch.equal(found[COUNTERS], B[COUNTERS])
    assert torch.equal(found[~COUNTERS], round_to_bf16(B[~COUNTERS]))
    assert not torch.equal(found, B)
    assert torch.equal(channel.transmit(found), found)
    assert torch.equal(channel.transmit(torch.stack([B, 2 * B]))[1], channel.transmit(2 * B))
    wanted = len(message(found[~COUNTERS], "bf16")) + len(message(found[COUNTERS], "fp32"))
    assert channel.bytes(found) == wanted


@pytest.mark.parametrize("text", ["none", "sign"])
def test_a_model_without_statistics_sends_none(text: str) -> None:
    channel, nothing = BufferChannel(Layout.flat(0), parse(text)), torch.empty(0)
    assert channel.transmit(nothing) is nothing
    assert channel.bytes(nothing) == 0


@pytest.mark.parametrize(("dtype", "kind"), [("int64", "fp32"), ("float32", "bf16")])
def test_counters_alone_and_values_alone_are_one_message(dtype: str, kind: str) -> None:
    """Nothing is sent of the kind that is not there."""
    channel = BufferChannel(Layout(("a",), ((3,),), (dtype,)), parse("sign"))
    b = torch.tensor([1.0, 2.0, 3.0])
    assert channel.bytes(b) == len(message(b, kind))


def normed() -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return Task(model, blobs(4).clients, test=blobs(4).test)


DIRECTIONS = [("topk(0.8)", "topk(0.8) >> bf16"), ("topk(0.8) >> bf16", "topk(0.8)"), ("sign", "sign")]


@pytest.mark.parametrize("engine", ["reference", "sequential", "batched"])
@pytest.mark.parametrize(("up", "down"), DIRECTIONS)
def test_each_direction_counts_its_own(engine: str, up: str, down: str) -> None:
    """Beside what the model takes: so many bytes a client, of the buffers as that direction sends them."""
    options: dict[str, Any] = {"local_steps": "2", "batch_size": 5, "device": "cpu", "clients": 4}
    config = Config(engine=engine, compressor=up, compressor_down=down, **options)
    plan = Plan(config, normed())
    server = choose_engine(config, plan, normed())
    state = server.start()
    lengths = []
    for _ in range(2):
        after, finish = server.round(state)
        lengths.append((finish(), state))
        state = after
    server.close()
    assert server.vectors.buffer_layout.sizes == (16, 16, 1)
    assert on_grid(state.b[:32]) == parse(down).rounds_values
    assert float(state.b[32]) == 4.0  # steps
    row, before = lengths[1]
    assert before.downloads is not None
    counts = before.downloads.count(1, range(4), before.w, plan.downlink(server.layout), lambda count: count)
    model = sum(count().bytes for count in counts.values())
    kinds = {True: [("bf16", 32), ("fp32", 1)], False: [("fp32", 33)]}[parse(down).rounds_values]
    beside = sum(len(message(before.b[-n:] if n == 1 else before.b[:n], kind)) for kind, n in kinds)
    assert row["downlink_bytes"] == model + 4 * beside


def on_grid(b: Tensor) -> bool:
    return not bool((b.numpy().view(np.uint32) & 0xFFFF).any())


@pytest.mark.parametrize("engine", ["reference", "sequential", "batched"])
@pytest.mark.parametrize(("up", "down"), DIRECTIONS)
def test_replies_count_what_their_direction_sends(engine: str, up: str, down: str, tmp_path: Path) -> None:
    """Beside the messages, which are kept: the buffers after the local steps."""
    config = Config(engine=engine, compressor=up, compressor_down=down, local_steps="2", batch_size=5,
                    device="cpu", clients=4, precision="float64")  # fmt: skip
    plan = Plan(config, normed())
    oracle = ReferenceEngine(plan, normed(), torch.device("cpu"))
    start, wanted = oracle.start(), 0
    for client in range(4):
        b = oracle._client(start, client).b
        if parse(up).rounds_values:
            wanted += len(message(b[:32], "bf16")) + len(message(b[32:], "fp64"))
        else:
            wanted += len(message(b, "fp64"))
    server = choose_engine(config, plan, normed(), tmp_path)
    row = server.round(server.start())[1]()
    server.close()
    kept = sum(file.stat().st_size for file in tmp_path.glob("*.cfa"))
    assert row["uplink_bytes"] == kept + wanted
