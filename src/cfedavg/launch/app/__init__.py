"""A Flower app with one node for each client, which trains as `cfedavg run` does with the same Config.

The module `client` holds the ClientApp, the module `server` the ServerApp. The app's run configuration has
the fields of Config, spelled with dashes, and the keys in `MORE`, which only a federation has.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from cfedavg.core.config import Config, refuse_code
from cfedavg.flower.options import RoundPolicy

# Keys of a run configuration that are not fields of Config.
POLICY = ("quorum", "min-nodes", "over-selection")
MORE = ("out", "resume", "max-norm", "from-backup", "round-timeout", *POLICY)

# An environment variable. A run configuration comes over the network, so a class that it names is imported
# only if the owner of the process has set this variable. `cfedavg federate up` sets it for typed classes.
TRUST = "CFEDAVG_TRUST"

# With few clients, each client needs several classes: else some classes are in no client's data. Messages
# take most of a round's time, so more local steps cost little.
DEFAULT = Config(clients=4, classes_per_client=5, local_steps="25")


def config_of(run_config: Mapping[str, Any]) -> Config:
    """Return the Config that a Flower run configuration describes; an InputError names a wrong key."""
    fields = {name.replace("-", "_"): value for name, value in run_config.items() if name not in MORE}
    if not os.environ.get(TRUST):
        refuse_code(fields, "the run config", f"set {TRUST}=1 on this machine if you trust who starts runs")
    return Config.from_dict(fields, "the run config", trust=True)


def policy_of(config: Config, run_config: Mapping[str, Any]) -> RoundPolicy:
    """Return the round policy of a run configuration; without `min-nodes`, a round waits for all clients."""
    given = {name.replace("-", "_"): run_config[name] for name in POLICY if name in run_config}
    least = int(run_config.get("clients", RoundPolicy.min_nodes))
    return RoundPolicy(**{"participation": config.participation, "min_nodes": least, **given})


def run_config_of(config: Config) -> dict[str, Any]:
    """Return a Config as a Flower run configuration, without the fields that are None."""
    found = {item.name.replace("_", "-"): getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: value for name, value in found.items() if value is not None}
