"""The compressed broadcast: by hand, the laws of both directions, and copies that are equal bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cfedavg import Config, Layout, decompress, parse, run
from cfedavg.channel import Downlink, make_downlink
from cfedavg.core.arrays import round_to_bf16
from cfedavg.core.errors import Diverged
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record
from cfedavg.simulate.downloads import Downloads
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.engines.traffic import dense_bytes
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.wire import decode, encode
from tests.algorithm.test_algorithm import engine, states, virtual
from tests.conftest import blobs, quadratic

D = 12
COMPRESSORS = ["topk(0.8)", "topk(0.8) >> int3(4)", "rd(0.6) >> bf16", "rd(0.6)", "qsgd(4)", "sign", "bf16"]


# --- by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_two_broadcasts_by_hand(array: Any) -> None:
    """Two of four: of x - w = (1, -4, 0, 3), -4 and 3; of (3, 1, 0, -1), 3 and the 1 of the lower index."""
    downlink = Downlink(parse("topk(0.5)"), Layout.flat(4))
    w = downlink.make(array([1.0, 2.0, 3.0, 4.0]))
    payload, w_next = downlink.send(array([2.0, -2.0, 3.0, 7.0]), w, key=0)
    assert payload.indices.tolist() == [1, 3]
    assert payload.values.data.tolist() == [-4, 3]
    assert w_next.tolist() == [1, -2, 3, 7]
    payload, w_next = downlink.send(array([4.0, -1.0, 3.0, 6.0]), w_next, key=0)
    assert payload.indices.tolist() == [0, 1]
    assert payload.values.data.tolist() == [3, 1]
    assert w_next.tolist() == [4, -1, 3, 7]
    assert w.tolist() == [1, 2, 3, 4]


def test_what_the_grid_cuts_off_is_sent_later() -> None:
    """Next to 1, bf16 has steps of 2^-7: a change by 2^-9 waits in x - w until it is large enough."""
    downlink = Downlink(parse("bf16"), Layout.flat(1))
    w = downlink.make(np.array([1 + 2**-9], np.float32))
    found = []
    for n in (2, 3, 5):
        x = np.array([1 + n * 2**-9], np.float32)
        _, w = downlink.send(x, w, key=0)
        found.append((float(w[0]), float((x - w)[0])))
    assert found == [(1, 2**-8), (1 + 2**-7, -(2**-9)), (1 + 2**-7, 2**-9)]


def test_only_none_broadcasts_the_model_itself() -> None:
    layout = Layout.flat(D)
    assert make_downlink(parse("none"), layout) is None
    for text in [*COMPRESSORS, "fp32", "topk(0)"]:
        assert make_downlink(parse(text), layout) == Downlink(parse(text), layout)


# --- copies -------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, min_value=-(2.0**99), max_value=2.0**99) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, -1e-40, 1.0, -1.0]
)
trajectories = st.lists(arrays(np.float32, D, elements=floats), min_size=2, max_size=6)


def sent(payload: Payload, *, code_floats: bool = False) -> Payload:
    """The payload, after it has travelled as bytes."""
    message = encode(payload.numpy(), Layout.flat(D), code_floats=code_floats)
    return decode(message, layout=Layout.flat(D))


@settings(max_examples=60)
@given(st.sampled_from(COMPRESSORS), trajectories, st.sampled_from([np.float32, np.float64]), st.data())
def test_every_way_to_the_copy_gives_the_same_bits(
    text: str, xs: list[np.ndarray], dtype: Any, data: st.DataObject
) -> None:
    """The chain of messages, the values that changed since any version, and the whole model."""
    downlink = Downlink(parse(text), Layout.flat(D))
    copies, chains = [downlink.make(xs[0].astype(dtype))], list[Payload]()
    known = Downloads.none(copies[0])
    for t, x in enumerate(xs[1:]):
        payload, w_next = downlink.send(x.astype(dtype), copies[-1], key=t, t=t)
        known = known.after(t, copies[-1], w_next, 0, [], most=0)
        copies.append(w_next)
        chains.append(payload)
    w, held = copies[-1], data.draw(st.integers(0, len(chains)))
    mine = copies[held]
    for payload in chains[held:]:
        mine = downlink.receive(mine, sent(payload))
    at = np.flatnonzero(known.changed > held)
    changed = downlink.unpack(copies[held], sent(downlink.pack(w, at), code_floats=True))
    whole = downlink.unpack(0 * w, sent(downlink.pack(w), code_floats=True))
    assert mine.tobytes() == changed.tobytes() == whole.tobytes() == w.tobytes()
    assert w.dtype == dtype


@settings(max_examples=40)
@given(st.sampled_from(COMPRESSORS), trajectories, st.sampled_from([np.float32, np.float64]))
def test_numpy_and_torch_keep_the_same_copy(text: str, xs: list[np.ndarray], dtype: Any) -> None:
    """On the grid of bf16 where values are rounded, and nowhere else."""
    downlink = Downlink(parse(text), Layout.flat(D))
    mine = downlink.make(xs[0].astype(dtype))
    theirs = downlink.make(torch.from_numpy(xs[0].astype(dtype)))
    for t, x in enumerate(xs):
        _, mine = downlink.send(x.astype(dtype), mine, key=t, t=t)
        _, theirs = downlink.send(torch.from_numpy(x.astype(dtype)), theirs, key=t, t=t)
        assert mine.tobytes() == theirs.numpy().tobytes()
        if downlink.rounds_values:
            assert not (mine.astype(np.float32).view(np.uint32) & 0xFFFF).any()
            assert np.array_equal(mine.astype(np.float32), mine)


def test_whole_copies_take_two_bytes_a_number_on_the_grid() -> None:
    w = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    lengths = {}
    for text in ("topk(0.9)", "topk(0.9) >> bf16"):
        downlink = Downlink(parse(text), Layout.flat(1000))
        lengths[text] = len(encode(downlink.pack(downlink.make(w)), downlink.layout))
    assert lengths["topk(0.9) >> bf16"] < 80 + 2 * 1000 < 80 + 4 * 1000 == lengths["topk(0.9)"]


# --- laws ---------------------------------------------------------------------------------------------


def update_at(config: Config, state: State) -> torch.Tensor:
    """The mean update that clients compute at w, uncompressed."""
    plain = config.replace(compressor="none", compressor_down="none", feedback="none", eta=1.0)
    w = state.broadcast
    return engine(plain, blobs()).round(State(state.t, w, state.b))[0].x - w


@pytest.mark.parametrize("up", ["topk(0.9)", "topk(0.8) >> int3(16)"])
@pytest.mark.parametrize("down", ["topk(0.9)", "rd(0.7)", "topk(0.8) >> int3(16)", "sign"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_iterative_step_lemma_with_both_directions(up: str, down: str, participation: float) -> None:
    """x + eta mean(e) moves as with uncompressed updates, which are computed at w."""
    config = Config(rounds=4, local_steps="3", eta=0.7, compressor=up, compressor_down=down, clients=6,
                    precision="float64", participation=participation)  # fmt: skip
    n = round(participation * 6)
    for now, following in pairwise(states(config, blobs())):
        expected = virtual(now, 0.7, n) + 0.7 * update_at(config, now)
        torch.testing.assert_close(virtual(following, 0.7, n), expected, rtol=1e-9, atol=1e-13)
        assert not torch.equal(now.broadcast, now.x) or now.t == 0


@pytest.mark.parametrize("down", ["topk(0.9)", "rd(0.7)", "topk(0.8) >> int3(16)", "qsgd(4)"])
def test_the_copy_takes_what_is_broadcast_and_nothing_else(down: str) -> None:
    """w_next = w + C(x_next - w), on the grid of bf16 where C rounds: x - w is what is still to be sent."""
    config = Config(rounds=4, local_steps="3", compressor_down=down, precision="float64", clients=6)
    plan, compressor = Plan(config, blobs()), parse(down)
    for now, following in pairwise(states(config, blobs())):
        p = following.x - now.w
        payload = compressor.compress(p, plan.broadcast_key(now.t), Layout.of(blobs().model), now.t)
        w_next = now.w + decompress(payload)[0].double()
        assert torch.equal(following.w, round_to_bf16(w_next) if compressor.rounds_values else w_next)
        assert 0 < (following.x - following.w).norm() < p.norm()


# --- runs ---------------------------------------------------------------------------------------------

OF_A_COPY = {
    "first_download_bytes", "downlink_messages", "whole_downloads", "copy_gap_norm2", "server_test_loss",
    "server_test_accuracy",
}  # fmt: skip


def test_columns_of_a_compressed_broadcast() -> None:
    config = Config(rounds=3, local_steps="3", compressor="topk(0.8)", engine="reference",
                    compressor_down="topk(0.9) >> int3(16)")  # fmt: skip
    result = run(config, blobs())
    last = states(config.replace(clients=6), blobs())[-1]
    assert result.final["copy_gap_norm2"] == pytest.approx(float((last.x - last.w).square().sum()))
    assert flat(result.model).equal(last.w)
    assert flat(result.server_model).equal(last.x)
    assert result.final["test_loss"] != result.final["server_test_loss"]
    for row in result.rows:
        assert row.keys() >= OF_A_COPY
        assert row["total_bytes"] == row["uplink_bytes"] + row["downlink_bytes"]
    assert [row["downlink_messages"] for row in result.rows] == [0, 6, 6]
    assert [row["whole_downloads"] for row in result.rows] == [6, 0, 0]
    assert [row["first_download_bytes"] > 0 for row in result.rows] == [True, False, False]


def test_none_keeps_no_copy() -> None:
    """Every client downloads the model whole in every round, and x is the only model."""
    config = Config(rounds=2, local_steps="3", compressor="topk(0.8)", engine="reference",
                    compressor_down="none")  # fmt: skip
    result, layout = run(config, blobs()), Layout.of(blobs().model)
    assert all(not row.keys() & OF_A_COPY for row in result.rows)
    whole = dense_bytes(flat(result.model), layout)
    assert [row["downlink_bytes"] for row in result.rows] == [6 * whole] * 2
    assert all(row["total_bytes"] == row["uplink_bytes"] + row["downlink_bytes"] for row in result.rows)
    last = states(config.replace(clients=6), blobs())[-1]
    assert (last.w, last.downloads) == (None, None)
    assert flat(result.model).equal(last.x)
    assert flat(result.server_model).equal(last.x)


def test_the_clients_model_is_evaluated_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks other than 0 return what they evaluated last."""
    real, whose = ReferenceEngine.evaluate, list[str]()

    def evaluate(self: ReferenceEngine, state: State) -> Record:
        whose.append("server" if state.w is None else "clients")
        return real(self, state)

    monkeypatch.setattr(ReferenceEngine, "evaluate", evaluate)
    run(Config(rounds=2, local_steps="1", engine="reference"), blobs())
    assert whose == ["server", "clients"] * 2


def test_a_test_loss_of_the_servers_model_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(self: ReferenceEngine, state: State) -> Record:
        return {"test_loss": math.inf if state.w is None else 1.0}

    monkeypatch.setattr(ReferenceEngine, "evaluate", evaluate)
    with pytest.raises(Diverged, match="round 1: the test loss"):
        run(Config(rounds=1, local_steps="1", engine="reference"), blobs())


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", ["reference", "sequential", "batched"])
def test_a_broadcast_that_is_not_finite_ends_the_run(name: str) -> None:
    """x goes from -2e38 by 0 to 2e38 while nothing is sent: all are float32, the last difference is not."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return -(model.x * batch).sum()  # type: ignore[operator]

    task = replace(quadratic(torch.ones(1, 1)), loss=loss)
    torch.nn.init.constant_(task.model.x, -2e38)  # type: ignore[arg-type]
    config = Config(rounds=2, engine=name, local_steps="1", eta_local=2e38, compressor="none", eta=1.0,
                    compressor_down="rd(0.999)")  # fmt: skip
    with pytest.raises(Diverged, match=r"round 2: the broadcast \(.*\) is NaN or infinite for client 0"):
        run(config, task)
