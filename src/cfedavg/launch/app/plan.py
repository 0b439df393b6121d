"""The plan of a federation, which both of its apps and the command make of the same Config."""

from __future__ import annotations

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.simulate.plan import Plan
from cfedavg.task import Task


def make_plan(config: Config, task: Task) -> Plan:
    """Return the plan of a federation; raise InputError if a client would have to send a second message."""
    plan = Plan(config, task)
    if plan.local_optimiser.needs_correction:
        raise InputError(
            "`local_optimiser` must need no control variates in a federation, whose clients send one message "
            f"a round, got {plan.local_optimiser}; simulate it, or take prox(0.01) >> sgd"
        )
    return plan
