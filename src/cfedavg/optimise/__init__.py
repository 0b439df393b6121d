"""Optimisers: a client's step from a gradient, and the server's step from the mean update."""

from cfedavg.optimise.server import SERVER_OPTIMISERS, ServerOptimiser

__all__ = ["SERVER_OPTIMISERS", "ServerOptimiser"]
