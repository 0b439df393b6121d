"""Engines: who runs the clients' local work. All of them turn a State into the next one."""

from cfedavg.engines.agreement import check_same, facts
from cfedavg.engines.base import Engine, choose_device
from cfedavg.engines.blocks import BlockEngine
from cfedavg.engines.choice import choose_engine
from cfedavg.engines.ranks import RankLost, Ranks
from cfedavg.engines.reference import ReferenceEngine

__all__ = [
    "BlockEngine",
    "Engine",
    "RankLost",
    "Ranks",
    "ReferenceEngine",
    "check_same",
    "choose_device",
    "choose_engine",
    "facts",
]
