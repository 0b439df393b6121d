"""Optimisers: what a client does with a gradient, and what the server does with the mean update."""

from cfedavg.optimise.server import SERVER_OPTIMISERS, ServerOptimiser

__all__ = ["SERVER_OPTIMISERS", "ServerOptimiser"]
