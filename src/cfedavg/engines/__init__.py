"""Engines: who runs the clients' local work. All of them turn a State into the next one."""

from cfedavg.engines.base import Engine, choose_device
from cfedavg.engines.reference import ReferenceEngine

__all__ = ["Engine", "ReferenceEngine", "choose_device"]
