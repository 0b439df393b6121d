"""The server's durable state: to and from what the store writes, and fields that no server wrote."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam
from hypothesis import given
from hypothesis import strategies as st

from cfedavg import InputError
from cfedavg.algorithm import ServerMemory
from cfedavg.federate.protocol import Stamp, make_mark
from cfedavg.federate.server import Server, ServerState
from cfedavg.federate.stores import ServerStore
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import (
    FederationState,
    FixedOptions,
    Note,
    RoundRows,
    StrategyMemory,
)
from cfedavg.flower.options import Claims
from tests.grid import MODEL, Adding, Federation

OLD = Path(__file__).parents[1] / "golden" / "federation"  # two rounds of FedAdam
OLD_MODEL = {**MODEL, "bn.running_mean": np.ones(2, np.float32)}
FORM = Form.of(OLD_MODEL)


def loaded(folder: Path) -> ServerState:
    name = (folder / "federation.txt").read_text()
    served = ServerStore(folder / "state", name, FORM.layout).load()
    assert served is not None
    return served


def same(one: ServerState, other: ServerState) -> bool:
    """Bit for bit, and the facts in the same order."""
    return (
        replace(one.server, x=None) == replace(other.server, x=None)
        and json.dumps(dict(one.clients)) == json.dumps(dict(other.clients))
        and json.dumps(one.facts) == json.dumps(other.facts)
        and in_bytes(one) == in_bytes(other)
    )


def in_bytes(served: ServerState) -> dict[str, Any]:
    tensors = {**served.extra, "x": served.server.x}
    return {name: (each.dtype, each.tobytes()) for name, each in tensors.items()}


# A state of before


def with_options(served: ServerState) -> ServerState:
    """An old state, with its options by their names of now."""
    options = asdict(FixedOptions("FedAdam", "topk(0.7)", "none", "ef", "sum", "sgd", 0))
    return replace(served, facts={**served.facts, "options": options})


def test_an_old_state_is_read_and_written_as_it_is() -> None:
    served = loaded(OLD)
    assert served.facts["options"]["error_feedback"] is True
    state = FederationState.from_stored(served)
    assert same(state.to_stored(), with_options(served))
    assert state.claims == Claims([4.0] * 6, [10.0] * 6)
    assert len(state.norms) == 6
    assert list(state.lent.values()) == [3]
    assert [known.note[:2] for known in state.clients.values()] == [(1, 1), (0, 1), (2, 1)]
    state.check(FORM, None, ServerMemory())
    assert state.inner is not None
    assert state.inner.codes.keys() == {"current_arrays", "m_t", "v_t"}
    assert len(state.inner.arrays) == 9
    assert state.last is not None
    assert (state.last.row["round"], len(state.last.nodes)) == (1, 4)


@pytest.mark.usefixtures("without_waiting")
def test_an_old_federation_goes_on(tmp_path: Path) -> None:
    """With what the wrapped strategy remembered."""
    it = Federation(tmp_path, Adding(metrics={"num-examples": 10, "local-steps": 4}).app, 4, OLD_MODEL)
    shutil.copytree(OLD, it.out)
    strategy = FedAdam(fraction_evaluate=0.0)
    it.start(2, strategy, resume=True)
    assert same(loaded(it.out), with_options(loaded(OLD)))
    moments = FederationState.from_stored(loaded(OLD)).inner
    assert moments is not None
    assert strategy.m_t["w"].tobytes() == moments.arrays["m_t/0"].tobytes()
    it.start(3, FedAdam(fraction_evaluate=0.0), resume=True)
    assert it.outcomes == [{"late": 1, "replied": 3}] * 2 + [{"replied": 4}]
    assert {row["node"]: row["number"] for row in it.of_nodes} == {f"node{i}": i for i in range(4)}


# To and fro


OPTIONS = FixedOptions(None, "topk(0.9)", "none", "ef", "sum", "adam", 3)
norms = st.lists(st.floats(0, 1e300))
names = st.text(max_size=8)
sums = st.dictionaries(names, st.integers(0, 2**32 - 1))
vectors = st.lists(st.floats(width=32), max_size=4).map(np.float32)
memories = st.builds(
    StrategyMemory, st.dictionaries(names, vectors), st.dictionaries(names, st.none() | st.integers() | names)
)


def at_first(**more: Any) -> FederationState:
    given: dict[str, Any] = {
        "server": Server(np.arange(17, dtype=np.float32)),
        "form": "f",
        "options": OPTIONS,
        "uncompressed": b"",
        "checksums": {},
    }
    return FederationState(**given | more)


def stored_and_read(state: FederationState) -> FederationState:
    """Through JSON, as the store does."""
    stored = state.to_stored()
    served = ServerState(stored.server, stored.clients, stored.extra, json.loads(json.dumps(stored.facts)))
    clients = {who: known._replace(note=list(known.note)) for who, known in stored.clients.items()}
    return FederationState.from_stored(replace(served, clients=type(stored.clients)(clients)))


@given(st.binary(), norms, norms, norms, st.none() | memories, sums)
def test_any_state_comes_back_as_it_was(
    uncompressed: bytes,
    sizes: list[float],
    steps: list[float],
    samples: list[float],
    memory: StrategyMemory | None,
    checksums: dict[str, int],
) -> None:
    claims = Claims(steps, samples)
    state = at_first(
        uncompressed=uncompressed,
        norms=sizes,
        claims=claims,
        inner=memory,
        checksums=checksums,
        lent={"b": 7},
    )
    mark = make_mark(Stamp(1, 1), 5, b"message")
    ended = ServerState(state.server).end_round({"a": mark}, np.ones(17), {"a": Note(2, 0, 0.5)})
    later = replace(
        state,
        server=ended.server,
        clients=ended.clients,
        last=RoundRows({"round": 0, "loss": 0.5}, [{"round": 0}]),
    )
    for each in (state, later):
        found = stored_and_read(each)
        assert same(found.to_stored(), each.to_stored())
        for item in fields(FederationState):
            if item.name not in ("server", "inner"):  # tensors: `same` compares them
                assert getattr(found, item.name) == getattr(each, item.name), item.name
    assert later.clients["a"].note == Note(2, 0, 0.5)
    assert later.server.applied == {"a": mark}
    assert (later.server.t, state.server.t) == (1, 0)


# Fields that no server wrote


FORGED: dict[str, dict[str, Any]] = {
    "a fact too many": {"facts": {"more": 1}},
    "a tensor too many": {"extra": {"more": np.ones(3)}},
    "nothing whole": {"extra": {"whole": None}},
    "other numbers whole": {"extra": {"whole": np.ones(3)}},
    "tensors of no strategy": {"extra": {"inner/m": np.ones(3)}},
    "a strategy that remembers a list": {"facts": {"inner": []}},
    "rows before the first round": {"facts": {"last": {"row": {"round": 0}, "nodes": []}}},
    "a number for two": {"facts": {"numbers": {"a": 1, "b": 1}}},
    "a negative checksum": {"facts": {"rows": {"metrics.jsonl": -1}}},
}
OPTION = {
    "inner": [3, True, []],
    "compressor": [None, 3],
    "update": [None, {}],
    "feedback": [None, 1, True],
    "server_optimiser": [None, 0.1, []],
    "seed": [None, -1, 2**63, 1.5, True],
    "more": [1],
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_fields(name: str) -> None:
    stored = at_first().to_stored()
    facts = stored.facts | FORGED[name].get("facts", {})
    extra = {k: v for k, v in (stored.extra | FORGED[name].get("extra", {})).items() if v is not None}
    with pytest.raises((ValueError, KeyError)) as caught:
        FederationState.from_stored(replace(stored, facts=facts, extra=extra))
    assert not isinstance(caught.value, InputError)  # the store says in which file


@pytest.mark.parametrize("missing", [*at_first().to_stored().facts])
def test_missing_fields(missing: str) -> None:
    stored = at_first().to_stored()
    facts = {name: value for name, value in stored.facts.items() if name != missing}
    with pytest.raises(KeyError, match=missing):
        FederationState.from_stored(replace(stored, facts=facts))


@pytest.mark.parametrize(("name", "value"), [(name, each) for name in OPTION for each in OPTION[name]])
def test_forged_options(name: str, value: Any) -> None:
    stored = at_first().to_stored()
    options = asdict(OPTIONS) | {name: value}
    with pytest.raises(ValueError, match=name):
        FederationState.from_stored(replace(stored, facts=stored.facts | {"options": options}))


def test_uncompressed_arrays_are_of_the_model() -> None:
    at_first(uncompressed=bytes(8)).check(FORM, None, ServerMemory())
    with pytest.raises(ValueError, match="must have 8 bytes, got 7"):
        at_first(uncompressed=bytes(7)).check(FORM, None, ServerMemory())
    with pytest.raises(ValueError, match="NaN or Inf"):
        at_first(uncompressed=b"\xff" * 8).check(FORM, None, ServerMemory())
