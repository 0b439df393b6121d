"""Engines: who runs the clients' local work. All of them turn a State into the next one."""

from cfedavg.simulate.engines.agreement import check_same, facts
from cfedavg.simulate.engines.base import Engine, choose_device
from cfedavg.simulate.engines.blocks import BlockEngine
from cfedavg.simulate.engines.choice import choose_engine
from cfedavg.simulate.engines.ranks import RankLost, Ranks
from cfedavg.simulate.engines.reference import ReferenceEngine

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
