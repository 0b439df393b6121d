"""Checks of what a session keeps in the server's state besides the model and the marks of clients.

Each raises ValueError or KeyError unless a session can have stored it: a checksum is no proof of that.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from cfedavg.federation import checks
from cfedavg.federation.store import Served
from cfedavg.flower.form import Form
from cfedavg.flower.rows import note_of
from cfedavg.folder import checksum_of
from cfedavg.metrics import Record, is_number

NODE_NUMBERS = 2**32  # what is sent says whose it is in 64 bits; no federation has as many nodes


def check_facts(served: Served, options: Collection[str]) -> None:
    """Check the types and ranges of all facts; `options` are the names of those that stay."""
    facts, t = served.facts, served.server.t
    checks.text("form", facts["form"])
    before = checks.table("options", facts["options"])
    if missing := [name for name in options if name not in before]:
        raise KeyError(missing[0])
    for name in ("norms", "steps", "samples"):
        for value in checks.listed(name, facts[name]):
            _check_norm(f"one of its {name}", value)
    checks.table("inner", facts.get("inner", {}))
    for name, value in checks.table("rows", facts["rows"]).items():
        checks.whole(f"the checksum of {name}", value, 0, 2**32)
    _check_last(facts.get("last"), t)
    _check_clients(served, t)


def check_whole(whole: torch.Tensor, form: Form) -> None:
    """Check the part of the model that travels whole."""
    data = checks.vector("whole", whole, torch.uint8, form.whole_bytes).numpy().tobytes()
    if not form.is_finite(data):
        raise ValueError("what travels whole holds NaN or Inf")


def _check_last(last: Any, t: int) -> None:
    """Check the rows of the last round: there are none before the first has ended."""
    if (last is None) != (t == 0):
        raise ValueError(f"the rows of the last round must be there after a round, and t is {t}")
    if last is None:
        return
    rows = [checks.table("last", last)["row"], *checks.listed("nodes", last["nodes"])]
    for row in rows:
        checks.whole("the round of a row", checks.table("a row", row)["round"], t - 1, t)
    checksum_of(rows)  # ValueError for NaN, which no row can hold


def _check_clients(served: Served, t: int) -> None:
    """Check what is noted of each client, and that no two have the same number."""
    lent = checks.table("numbers", served.facts["numbers"])
    numbers = [checks.whole("a node's number", number, 0, NODE_NUMBERS) for number in lent.values()]
    for known in served.clients.values():
        checks.listed("a client's note", known.note, 3)
        note = note_of(known)
        numbers.append(checks.whole("a client's number", note.number, 0, NODE_NUMBERS))
        checks.whole("a client's last round", note.heard, 0, t)
        if note.residual2 is not None:
            _check_norm("a client's residual", note.residual2)
    if len(set(numbers)) < len(numbers):
        raise ValueError("two clients have the same number")


def _check_norm(name: str, value: Any) -> None:
    if value is None or not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of 0 or more, got {value!r:.40}")


def row_checksums(rows: dict[str, list[Record]], before: dict[str, int] | None = None) -> dict[str, int]:
    """Return the checksum of each file after these rows, which follow those of the checksums `before`."""
    return {name: checksum_of(each, (before or {}).get(name, 0)) for name, each in rows.items()}
