"""Ranks that torchrun starts get their options and data each for itself: whether these are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cfedavg.core.config import Config, toml_value
from cfedavg.core.errors import InputError
from cfedavg.simulate.engines.base import choose_device
from cfedavg.simulate.engines.ranks import Ranks
from cfedavg.simulate.local import Vectors
from cfedavg.task import Task, fingerprint_content


def facts(config: Config, task: Task) -> dict[str, str]:
    """What must be the same on every rank, by name.

    Machines may keep their data in different folders and compute on different GPUs, but not some on a GPU
    and some not. Trainable parameters may differ: all ranks start from those of rank 0.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config) if f.name != "data_dir"}
    device = choose_device(config.device)
    values["device"] = device.type + (":N" if device.index is not None else "")
    sizes = [len(samples) for samples in task.clients]
    return {f"`{name}`": "none" if value is None else toml_value(value) for name, value in values.items()} | {
        "the number of clients": str(len(sizes)),
        "the number of samples": str(sum(sizes)),
        "the number of test samples": "none" if task.test is None else str(len(task.test)),
        "the hash of layout and frozen values": f"{Vectors(task.model).identity():08x}",
        "the hash of the data": fingerprint_content(task),
    }


def check_same(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Raise the same InputError on every rank if a rank has another value than rank 0 somewhere."""
    everyone: list[Mapping[str, str]] = ranks.share(ranks.gather(dict(mine)))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            values = ", ".join(
                f"{name} is {other.get(name, 'missing')} instead of {first.get(name, 'missing')}"
                for name in differing
            )
            raise InputError(f"rank {rank} differs from rank 0: {values}; start all ranks alike")
