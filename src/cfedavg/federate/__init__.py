"""Federations of real nodes: error feedback stays right if replies get lost, clients die or servers restart.

`protocol` states the rules. `client` and `server` are two state machines without any I/O. The stores, Flower
and the fault tests all use these two machines.
"""
