"""The run configuration of the app: the fields of Config with dashes, and a few of the federation's own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from cfedavg.config import Config, refuse_code

# Besides those of Config: where the server writes, and how it waits.
MORE = ("out", "resume", "round-timeout", "quorum", "min-nodes", "over-selection", "max-norm", "from-backup")

# A variable of the environment. A run config comes over the network, so what it names is imported only where
# the owner of the process has set this; `cfedavg federate up` does for what its user typed.
TRUST = "CFEDAVG_TRUST"

# Of a few nodes each needs several classes, or some class is nobody's; and a round of real messages takes
# so long that more local steps cost little.
DEFAULT = Config(clients=4, classes_per_client=5, local_steps="25")


def config_of(run_config: Mapping[str, Any]) -> Config:
    """The configuration of a run; InputError says which key is not in order."""
    fields = {name.replace("-", "_"): value for name, value in run_config.items() if name not in MORE}
    if not os.environ.get(TRUST):
        refuse_code(fields, "the run config", f"set {TRUST}=1 on this machine if you trust who starts runs")
    return Config.from_dict(fields, "the run config", trust=True)


def run_config_of(config: Config) -> dict[str, Any]:
    """The other way round; what is None is left out."""
    found = {item.name.replace("_", "-"): getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: value for name, value in found.items() if value is not None}
