"""Links: the grammar of a link, its errors, and which client gets which."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.links import PROFILES, count_clients, parse_links
from cfedavg.simulate.links import assign_classes, draw_speeds


def test_a_link_for_all_clients() -> None:
    speeds = draw_speeds(Config(link="up=110Mbit, down=500Mbit/s, rtt=40ms"), 2)
    assert (speeds.up, speeds.down) == ([110e6] * 2, [500e6] * 2)
    assert (speeds.rtt, speeds.wait) == ([0.04] * 2, [0.0] * 2)
    assert speeds.seconds(0, 10, 110_000_000 // 8, 0) == 1.04


def test_settings_replace_those_of_a_profile() -> None:
    (one,) = parse_links("4G, rtt=1.5min")
    assert (one.settings["up"].low, one.settings["rtt"].low) == (13.6e6, 90.0)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_whole(name: str) -> None:
    (one,) = parse_links(name)
    assert one.settings.keys() == {"up", "down", "rtt"}


def test_numbers_go_in_order_and_shares_are_drawn() -> None:
    speeds = draw_speeds(Config(link="2x up=1bit; up=2bit; 1x up=3bit"), 5)
    assert speeds.up == [1.0, 1.0, 2.0, 2.0, 3.0]
    mixed = Config(link="40% up=1bit; up=2bit")
    drawn = {seed: tuple(draw_speeds(mixed.replace(seed=seed), 10).up) for seed in range(9)}
    assert all(Counter(up) == {1.0: 4, 2.0: 6} for up in drawn.values())
    assert len(set(drawn.values())) > 5
    assert drawn[3] == tuple(draw_speeds(mixed.replace(seed=3), 10).up)


def test_a_range_is_drawn_once_for_each_client() -> None:
    up = draw_speeds(Config(link="up=1kbit..2kbit"), 50).up
    assert len(set(up)) == 50
    assert all(1000 <= each <= 2000 for each in up)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(0, 300))
def test_shares_are_rounded_to_whole_clients(parts: list[int], clients: int) -> None:
    text = "; ".join(f"{100 * part / sum(parts)!r}% 4g" for part in parts)
    counts = count_clients(parse_links(text), clients)
    assert sum(counts) == clients
    assert all(abs(n - clients * part / sum(parts)) < 1 for n, part in zip(counts, parts, strict=True))
    assert len(assign_classes(Config(link=text), clients)) == clients


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a class must be a profile or settings"),
        ("5g", "there are the profiles nb-iot, 3g, 4g, dsl, datacentre, and settings"),
        ("4g, speed=1s", "a setting must be up, down, rtt, wait"),
        ("up=5", "up must be a rate above 0 such as 5Mbit"),
        ("up=0bit", "up must be a rate above 0"),
        ("down=-1Mbit", "down must be a rate above 0"),
        ("up=2Mbit..1Mbit", "up must be a rate above 0"),
        ("up=1Mbit..2Mbit..3Mbit", "up must be a rate above 0"),
        ("up=1e999bit", "up must be a rate above 0"),
        ("rtt=5Mbit", "rtt must be a time such as 40ms"),
        ("rtt=1.2.3ms", "rtt must be a time such as 40ms"),
        ("up=1bit, up=2bit", "a class must have each setting once"),
        ("4g; dsl", "only one class may lack its share"),
        ("30% 4g; 2x dsl", "classes must all have shares"),
        ("30% 4g; 30% dsl", "the shares must add up to 100%, got 60%"),
        ("80% 4g; 30% dsl; 3g", "the shares must add up to at most 100%, got 110%"),
        ("0% 4g; dsl", "a share must be above 0%"),
        ("1..2% 4g; dsl", "a share must be above 0%"),
        ("4g;" * 50_000, "the text must have at most 100,000 characters"),
    ],
)
def test_bad_links(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=r"^`link`: ") as error:
        Config(link=text)
    assert sentence in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", ["2x 4g; 3x dsl", "6x 4g", "5x 4g; dsl"])
def test_numbers_must_fit_the_clients(text: str) -> None:
    with pytest.raises(InputError, match="`link`: the numbers of clients must add up to 4, got"):
        draw_speeds(Config(link=text), 4)
