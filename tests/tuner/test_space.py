"""The candidates: drawn by a key, each once, the default first, without the fields that the user keeps."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg import Config, InputError
from cfedavg.core.config import BOTH_WAYS
from cfedavg.tuner.space import (
    COMPRESSORS,
    TUNED,
    Candidate,
    check_kept,
    draw_candidates,
    list_dimensions,
    list_neighbours,
)


def drawn(config: Config, number: int = 25, keep: tuple[str, ...] = ()) -> list[Candidate]:
    return list(islice(draw_candidates(list_dimensions(config, keep), config.seed), number))


def test_the_default_comes_first_and_no_candidate_comes_twice() -> None:
    first, *others = drawn(Config())
    assert (first.name, first.changes) == ("default", {})
    assert len({str(each) for each in others}) == len(others) == 24
    assert [each.name for each in others] == [f"c{i:02d}" for i in range(1, 25)]


def test_a_longer_search_adds_to_a_shorter_one() -> None:
    assert drawn(Config(seed=3), 40)[:13] == drawn(Config(seed=3), 13)
    assert drawn(Config(seed=3)) != drawn(Config(seed=4))


def test_24_candidates_try_every_choice() -> None:
    config = Config()
    dimensions = list_dimensions(config, ())
    for name, slots in dimensions.items():
        tried = [
            {key: each.changes.get(key) for key in each.changes if key == name} for each in drawn(config)
        ]
        assert all(slot in tried for slot in slots), name


@given(st.integers(0, 10**6), st.sets(st.sampled_from(["compressor", "eta_local", "server_optimiser"])))
def test_kept_fields_stay(seed: int, keep: set[str]) -> None:
    config = Config(seed=seed, local_epochs=2, compressor="topk(0.95) >> int4(256)", eta_local=0.05)
    for candidate in drawn(config, 20, tuple(keep)):
        changed = candidate.apply(config)
        assert changed.local_steps is None
        assert all(getattr(changed, name) == getattr(config, name) for name in keep)
        assert candidate.changes.keys() <= set(TUNED) - keep


def test_what_is_not_tuned() -> None:
    """Rates that a schedule sets, local work that differs between clients, a server that the user chose."""
    names = {
        "corollary": Config(schedule="corollary2", smoothness=1.0),
        "range": Config(local_steps="5..50"),
        "deadline": Config(deadline=1.0, steps_per_second="10"),
        "server": Config(server_optimiser="adam"),
        "eta": Config(eta=0.5),
    }
    found = {name: list_dimensions(config, ()).keys() for name, config in names.items()}
    assert found["corollary"] == {"compressor", "compressor_down", "local_steps"}
    assert found["range"] == found["deadline"] == {*TUNED} - {"local_steps", "local_epochs"}
    assert found["server"] == found["eta"] == {*TUNED} - {"local_epochs", "server_optimiser"}


def test_numbers_follow_from_those_of_the_configuration() -> None:
    slots = list_dimensions(Config(local_steps=1, eta_local=0.02), ())
    assert {each.get("local_steps", "1") for each in slots["local_steps"]} == {"1", "2", "4", "8"}
    assert [each.get("eta_local", 0.02) for each in slots["eta_local"]] == [0.002, 0.006, 0.02, 0.06, 0.2]
    assert slots["compressor"].count({}) == len(COMPRESSORS) - 1


@pytest.mark.parametrize("keep", ["compressor", ["rounds"], ["eta_local", "eta"]])
def test_fields_that_cannot_be_kept(keep: object) -> None:
    with pytest.raises(InputError, match=r"`keep` must list some of compressor, .*, got '"):
        check_kept(keep)  # type: ignore[arg-type]


def test_something_must_be_left_to_tune() -> None:
    with pytest.raises(InputError, match="`keep` must leave a field to tune"):
        list_dimensions(Config(), TUNED)


@given(st.integers(0, 10**6), st.integers(0, 24), st.sets(st.sampled_from(["compressor", "eta_local"])))
def test_a_neighbour_differs_in_one_field(seed: int, place: int, keep: set[str]) -> None:
    config = Config(seed=seed)
    candidate = drawn(config, keep=tuple(keep))[-1 - place % 20]
    mine = candidate.apply(config)
    neighbours = list_neighbours(config, candidate.changes, keep)
    assert neighbours
    for changes, cost in neighbours:
        other = config.replace(**changes)
        differs = [name for name in TUNED if getattr(other, name) != getattr(mine, name)]
        assert len(differs) == 1
        assert differs[0] not in keep
        assert cost in (1.0, 2.0)
        assert all(getattr(config, name) != value for name, value in changes.items())


def test_neighbours_of_ones_own_compressor() -> None:
    found = list_neighbours(Config(compressor="sign"), {}, ("compressor_down", "eta_local", "local_steps"))
    assert found == [({"compressor": BOTH_WAYS}, 1.0)]
    last = list_neighbours(
        Config(compressor="int4(256)"), {}, ("compressor_down", "eta_local", "local_steps")
    )
    assert last == [({"compressor": COMPRESSORS[-2]}, 2.0)]
