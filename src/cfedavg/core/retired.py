"""Options of version 0.5 that have other names now: what to write instead, and how old files are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RETIRED = {"error_feedback": "feedback", "momentum": "local_optimiser", "weight_decay": "local_optimiser"}


def replacement(name: str, table: Mapping[str, Any]) -> str:
    """Return what to write for an option of before, with the values of its table.

    >>> replacement("momentum", {"momentum": 0.9, "weight_decay": 1e-4})
    'local_optimiser = "sgd(momentum=0.9, weight_decay=0.0001)"'
    """
    return f'{RETIRED[name]} = "{_parts(table)[RETIRED[name]]}"'


def renew(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a file by their names of now; those of a file of now as they are.

    >>> renew({"rounds": 5, "error_feedback": False, "momentum": 0.0})
    {'rounds': 5, 'local_optimiser': 'sgd', 'server_optimiser': 'sgd', 'feedback': 'none'}
    >>> renew({"dataset": "mnist", "compressor": "rd(0.9)"})  # when the whole model was broadcast
    {'dataset': 'mnist', 'compressor': 'rd(0.9)', 'compressor_down': 'none'}

    Settings that name no data set are not those of a run: they stay as they are.
    """
    found = {name: value for name, value in table.items() if name not in RETIRED}
    if {"dataset", "compressor"} <= table.keys():
        found.setdefault("compressor_down", "none")
    return found | _parts(table) if RETIRED.keys() & table.keys() else found


def _parts(table: Mapping[str, Any]) -> dict[str, str]:
    given = [f"{name}={table[name]}" for name in ("momentum", "weight_decay") if table.get(name)]
    return {
        "local_optimiser": f"sgd({', '.join(given)})" if given else "sgd",
        "server_optimiser": "sgd",
        "feedback": "ef" if table.get("error_feedback", True) else "none",
    }
