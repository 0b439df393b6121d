"""The candidates: the changes of a configuration that the tuner tries, drawn in an order that a key fixes.

A dimension is something to choose, such as the compressor of one direction. It has slots, each with the
changes of one choice. In each block of as many candidates as there are slots, every slot comes once, in
random order: 24 candidates try every choice, and a longer search adds candidates to those of a shorter one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from cfedavg.core.config import BOTH_WAYS, Config
from cfedavg.core.errors import InputError, list_names
from cfedavg.core.keys import Purpose, key, permutation

Changes = dict[str, Any]

# From few bytes a round to many: 0.3%, 1%, 3%, 10% and 30% of the numbers in 3 bits, and all in 4 bits.
COMPRESSORS = (
    "topk(0.997) >> int3(256)", "topk(0.99) >> int3(256)", BOTH_WAYS, "topk(0.9) >> int3(256)",
    "topk(0.7) >> int3(256)", "int4(256)",
)  # fmt: skip
STEPS = (0.5, 1, 2, 4, 8)  # times the local steps of the configuration
EPOCHS = (1, 2, 4)  # times its local epochs
RATES = (0.1, 0.3, 1, 3, 10)  # times its local rate
SERVERS = ("sgd",) * 6 + ("momentum(0.9)", "adam")  # the first is tried most often
TUNED = ("compressor", "compressor_down", "local_steps", "local_epochs", "eta_local", "server_optimiser")
_TRIES = 1000  # draws in search of candidates that differ from all before


@dataclass(frozen=True)
class Candidate:
    """A configuration that the tuner tries: a name, and the changes to the user's configuration."""

    name: str
    changes: Changes = field(default_factory=dict)

    def apply(self, config: Config) -> Config:
        """Return the configuration with the candidate's changes."""
        return config.replace(**self.changes)

    def __str__(self) -> str:
        """Return the changes in words.

        >>> str(Candidate("c01", {"local_steps": "40", "eta_local": 0.3})), str(Candidate("default"))
        ('local_steps 40, eta_local 0.3', 'no change')
        """
        return ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "no change"


def check_kept(keep: Collection[str]) -> None:
    """Raise InputError unless `keep` names fields that the tuner may change."""
    if isinstance(keep, str) or not all(name in TUNED for name in keep):
        wrong = keep if isinstance(keep, str) else next(name for name in keep if name not in TUNED)
        raise InputError(f"`keep` must list some of {', '.join(TUNED)}, got {wrong!r:.80}")


def list_dimensions(config: Config, keep: Collection[str]) -> dict[str, tuple[Changes, ...]]:
    """Return the slots of each dimension that is to be tuned; a field in `keep` stays as it is."""
    found: dict[str, tuple[Changes, ...]] = {}
    for name in ("compressor", "compressor_down"):
        others = [text for text in COMPRESSORS if text != getattr(config, name)]
        # Half of the candidates keep the compressor, so that some candidates change the other fields alone.
        found[name] = ({},) * len(others) + tuple({name: text} for text in others)
    if config.local_epochs is not None:
        found["local_epochs"] = _scale("local_epochs", config.local_epochs, EPOCHS)
    elif (config.local_steps or "").isdigit():
        found["local_steps"] = _scale("local_steps", int(str(config.local_steps)), STEPS)
    if config.schedule.startswith(("constant", "decaying")):
        found["eta_local"] = tuple(_rate(config.eta_local, factor) for factor in RATES)
        if config.server_optimiser == "sgd" and config.eta is None:
            found["server_optimiser"] = tuple(
                {} if text == "sgd" else {"server_optimiser": text} for text in SERVERS
            )
    found = {name: slots for name, slots in found.items() if name not in keep}
    if not found:
        raise InputError(f"`keep` must leave a field to tune, got {list_names(sorted(keep))}")
    return found


def _scale(name: str, usual: int, factors: Collection[float]) -> tuple[Changes, ...]:
    """Return a slot for each number of steps or epochs, `usual` times a factor, each number once."""
    numbers = dict.fromkeys(max(1, round(usual * factor)) for factor in factors)
    value = str if name == "local_steps" else int
    return tuple({} if number == usual else {name: value(number)} for number in numbers)


def _rate(usual: float, factor: float) -> Changes:
    return {} if factor == 1 else {"eta_local": float(f"{usual * factor:.3g}")}


def draw_candidates(dimensions: dict[str, tuple[Changes, ...]], seed: int) -> Iterator[Candidate]:
    """Yield the default, and then candidates that differ from it and from each other.

    >>> [str(each) for each in draw_candidates({"eta_local": ({}, {"eta_local": 1.0})}, seed=0)]
    ['no change', 'eta_local 1.0']
    """
    seen: list[Changes] = [{}]
    yield Candidate("default")
    for number in range(_TRIES):
        changes: Changes = {}
        for i, slots in enumerate(dimensions.values()):
            block, place = divmod(number, len(slots))
            changes |= slots[permutation(key(seed, block, i, Purpose.CANDIDATE), len(slots))[place]]
        if changes not in seen:
            seen.append(changes)
            yield Candidate(f"c{len(seen) - 1:02d}", changes)


def list_neighbours(config: Config, changes: Changes, keep: Collection[str]) -> list[tuple[Changes, float]]:
    """Return the changes that differ in one field, each with about how much longer it takes.

    A number is halved or doubled; the local work does not exceed that of any drawn candidate. A compressor
    becomes the next one that sends less or more.

    >>> keep = ("compressor", "compressor_down", "local_steps", "server_optimiser")
    >>> list_neighbours(Config(), {"eta_local": 0.2}, keep)
    [({}, 1.0), ({'eta_local': 0.4}, 1.0)]
    """
    current, dimensions = config.replace(**changes), list_dimensions(config, keep)
    found: list[tuple[str, Any, float]] = []
    for name, most, kind in (("local_steps", STEPS[-1], str), ("local_epochs", EPOCHS[-1], int)):
        if name in dimensions:
            now, limit = int(getattr(current, name)), int(most * int(getattr(config, name)))
            found += [(name, kind(min(2 * now, limit)), 2.0), (name, kind(max(1, now // 2)), 1.0)]
    if "eta_local" in dimensions:
        found += [("eta_local", float(f"{current.eta_local * f:.3g}"), 1.0) for f in (0.5, 2)]
    for name in ("compressor_down", "compressor"):
        if name in dimensions:
            found += [(name, text, cost) for text, cost in _next_compressors(getattr(current, name))]
    everything = [(_change(config, changes, name, value), cost) for name, value, cost in found]
    return [(each, cost) for each, cost in everything if each != changes]


def _next_compressors(text: str) -> list[tuple[str, float]]:
    """Return the compressors that send a little less and a little more, with the factor of the rounds."""
    if text not in COMPRESSORS:
        return [(BOTH_WAYS, 1.0)]
    at = COMPRESSORS.index(text)
    return [(each, 2.0) for each in COMPRESSORS[max(0, at - 1) : at]] + [
        (each, 1.0) for each in COMPRESSORS[at + 1 : at + 2]
    ]


def _change(config: Config, changes: Changes, name: str, value: Any) -> Changes:
    """Return the changes with another value of a field, which is left out if it is that of `config`."""
    others = {each: old for each, old in changes.items() if each != name}
    return others if value == getattr(config, name) else others | {name: value}
