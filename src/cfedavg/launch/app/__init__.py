"""A Flower app that trains what a Config names, as `cfedavg run` does, with a node for each client.

`client` and `server` are its two halves. Its run configuration has the fields of Config with dashes, and a
few of the federation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from cfedavg.core.config import Config, refuse_code
from cfedavg.flower.round_policy import RoundPolicy

# Besides those of Config: where the server writes, and the policy of its rounds.
POLICY = ("quorum", "min-nodes", "over-selection")
MORE = ("out", "resume", "max-norm", "from-backup", "round-timeout", *POLICY)

# A variable of the environment. A run config comes over the network, so what it names is imported only
# where the owner of the process has set this; `cfedavg federate up` sets it for what its user typed.
TRUST = "CFEDAVG_TRUST"

# With few nodes each needs several classes, or nobody has some class. A round of real messages takes so long
# that more local steps cost little.
DEFAULT = Config(clients=4, classes_per_client=5, local_steps="25")


def config_of(run_config: Mapping[str, Any]) -> Config:
    """Return the configuration of a run; InputError names the key that is wrong."""
    fields = {name.replace("-", "_"): value for name, value in run_config.items() if name not in MORE}
    if not os.environ.get(TRUST):
        refuse_code(fields, "the run config", f"set {TRUST}=1 on this machine if you trust who starts runs")
    return Config.from_dict(fields, "the run config", trust=True)


def policy_of(config: Config, run_config: Mapping[str, Any]) -> RoundPolicy:
    """Return the policy of a run's rounds. Without `min-nodes`, a round waits for all clients."""
    given = {name.replace("-", "_"): run_config[name] for name in POLICY if name in run_config}
    least = int(run_config.get("clients", RoundPolicy.min_nodes))
    return RoundPolicy(**{"participation": config.participation, "min_nodes": least, **given})


def run_config_of(config: Config) -> dict[str, Any]:
    """Return the run configuration of a Config, without the fields that are None."""
    found = {item.name.replace("_", "-"): getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: value for name, value in found.items() if value is not None}
