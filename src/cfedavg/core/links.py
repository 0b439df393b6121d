"""Links: the speeds of the clients' connections, as a text such as `70% 4g; 30% up=5Mbit, down=20Mbit`.

A text holds one or more classes of clients, separated by `;`. A class is a profile, settings, or a profile
with settings that replace the profile's: `3g, rtt=100ms`. Before it may stand the share or the number of its
clients, `30%` or `5x`. One class may have neither: it takes all other clients.

The settings are the rates `up` and `down`, the round-trip time `rtt`, and `wait`, the seconds of a round that
depend neither on the client's link nor on its local steps: polling, starting processes. A value is a number
with its unit, or a range `1Mbit..20Mbit`, drawn once for each client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from cfedavg.core.errors import InputError
from cfedavg.core.parts import Range
from cfedavg.core.units import TIMES, parse_quantity

# Measured links; docs/links.md cites the measurements.
PROFILES = {
    "nb-iot": "up=25kbit, down=20kbit, rtt=840ms",
    "3g": "up=1.6Mbit, down=5.9Mbit, rtt=63.5ms",
    "4g": "up=13.6Mbit, down=14.7Mbit, rtt=53.1ms",
    "dsl": "up=1Mbit, down=8.4Mbit, rtt=44ms",
    "datacentre": "up=740Mbit, down=740Mbit, rtt=0.26ms",
}

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # in bit/s
_TIMES = {name: TIMES[name] for name in ("us", "ms", "s", "min")}  # in seconds
_UNITS = {"up": _RATES, "down": _RATES, "rtt": _TIMES, "wait": _TIMES}
_RULES = {
    id(_RATES): "a rate above 0 such as 5Mbit, or a range 1Mbit..20Mbit (bit, kbit, Mbit or Gbit)",
    id(_TIMES): "a time such as 40ms, or a range 20ms..80ms (us, ms, s or min)",
}
# Options of older versions: the setting that replaces each, its unit, and the factor; latency was one way.
_OLD = {"uplink": ("up", "bit", 1), "downlink": ("down", "bit", 1), "latency": ("rtt", "s", 2)}
_PER_SECOND = re.compile(r"/s$", re.IGNORECASE)
_SHARE = re.compile(r"([0-9.]+)\s*%\s*|([0-9]+)\s*x\s+")
_LONGEST = 100_000  # characters of a text


@dataclass(frozen=True)
class LinkClass:
    """A class of clients: the range of each setting, and which clients it takes.

    It takes a share of the clients, or a number of them; all other clients if both are None.
    """

    settings: Mapping[str, Range]
    share: float | None = None
    count: int | None = None


def parse_links(text: str, field: str = "link") -> list[LinkClass]:
    """Return the classes of clients in a text; `field` names the text in an error.

    >>> [(each.share, each.settings["up"].high) for each in parse_links("25% 3g; up=2kbit..1Gbit")]
    [(0.25, 1600000.0), (None, 1000000000.0)]
    """
    if len(text) > _LONGEST:
        _refuse(field, f"the text must have at most {_LONGEST:,} characters, got {len(text):,}")
    classes = [_parse_class(part.strip(), field) for part in text.split(";")]
    shares = [each.share for each in classes if each.share is not None]
    counts = [each.count for each in classes if each.count is not None]
    others = len(classes) - len(shares) - len(counts)
    if shares and counts:
        _refuse(field, f"classes must all have shares (30%) or all numbers (5x), got {text!r:.200}")
    if others > 1:
        _refuse(field, f"only one class may lack its share (30%) or number (5x), got {text!r:.200}")
    total = 100 * math.fsum(shares)
    if total > 100 + 1e-9 or (shares and not others and total < 100 - 1e-9):
        rule = "at most 100%" if others else "100%"
        _refuse(field, f"the shares must add up to {rule}, got {total:g}%")
    return classes


def count_clients(classes: list[LinkClass], clients: int, field: str = "link") -> list[int]:
    """Return how many of the clients each class takes; the rounding of shares favours the largest remainders.

    >>> count_clients(parse_links("30% 3g; 4g"), 5)
    [2, 3]
    """
    others = [each.share is None and each.count is None for each in classes]
    if any(each.count is not None for each in classes):
        taken = [each.count or 0 for each in classes]
        left = clients - sum(taken)
        if left < 0 or (left and not any(others)):
            _refuse(field, f"the numbers of clients must add up to {clients}, got {sum(taken)}")
        return [left if other else count for other, count in zip(others, taken, strict=True)]
    rest = 1 - math.fsum(each.share or 0.0 for each in classes)
    exact = [(rest if each.share is None else each.share) * clients for each in classes]
    taken = [math.floor(each + 1e-9) for each in exact]
    by_remainder = sorted(range(len(classes)), key=lambda i: (taken[i] - exact[i], i))
    for i in by_remainder[: clients - sum(taken)]:
        taken[i] += 1
    return taken


def renew_links(table: Mapping[str, Any]) -> str:
    """Return the text of a link for the options `uplink`, `downlink` and `latency` of older versions.

    `table` holds options by name. The text is empty if it has none of the three.

    >>> renew_links({"uplink": "1e5..1e6", "latency": 0.05})
    'up=100000.0bit..1000000.0bit, rtt=0.1s'
    """
    old = [
        (setting, unit, scale, Range.parse(str(table[name]), name))
        for name, (setting, unit, scale) in _OLD.items()
        if table.get(name) is not None
    ]
    clients = {len(values.each) for *_, values in old if values.each}
    if len(clients) > 1:
        raise InputError("`uplink`, `downlink` and `latency` must have as many values")

    def settings(client: int) -> str:
        texts = []
        for setting, unit, scale, values in old:
            ends = values.each[client : client + 1] or dict.fromkeys((values.low, values.high))
            texts.append(f"{setting}={'..'.join(f'{scale * end!r}{unit}' for end in ends)}")
        return ", ".join(texts)

    return "; ".join(f"1x {settings(i)}" for i in range(max(clients))) if clients else settings(0)


def _parse_class(text: str, field: str) -> LinkClass:
    if not text:
        _refuse(field, "a class must be a profile or settings such as up=5Mbit, got nothing")
    match = _SHARE.match(text)
    share, count = (match[1], match[2]) if match else (None, None)
    words = [word.strip() for word in text[match.end() if match else 0 :].split(",")]
    settings = dict[str, Range]()
    if "=" not in words[0]:
        name = words.pop(0)
        if name.lower() not in PROFILES:
            known = ", ".join(PROFILES)
            _refuse(field, f"there are the profiles {known}, and settings such as up=5Mbit, got {name!r:.80}")
        settings = dict(_set(word, field) for word in PROFILES[name.lower()].split(","))
    given = [_set(word, field) for word in words]
    if len(dict(given)) < len(given):
        _refuse(field, f"a class must have each setting once, got {text!r:.200}")
    return LinkClass(
        settings | dict(given),
        None if share is None else _share(share, field),
        None if count is None else int(count),
    )


def _share(text: str, field: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 100:
        _refuse(field, f"a share must be above 0% and at most 100%, got {text}%")
    return share / 100


def _set(word: str, field: str) -> tuple[str, Range]:
    """Return the name and the range of a setting such as `up=5Mbit..20Mbit`."""
    name, _, text = (part.strip() for part in word.partition("="))
    if name not in _UNITS:
        _refuse(field, f"a setting must be {', '.join(_UNITS)}, such as up=5Mbit, got {word.strip()!r:.80}")
    values = [parse_quantity(_PER_SECOND.sub("", each.strip()), _UNITS[name]) for each in text.split("..")]
    low, high = values[0], values[-1]
    if len(values) > 2 or not low <= high or (_UNITS[name] is _RATES and low <= 0):
        _refuse(field, f"{name} must be {_RULES[id(_UNITS[name])]}, got {text!r:.80}")
    return name, Range(low, high)


def _refuse(field: str, sentence: str) -> NoReturn:
    raise InputError(f"`{field}`: {sentence}")
