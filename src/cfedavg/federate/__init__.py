"""A real federation: error feedback that stays right when replies are lost, clients die and servers restart.

`protocol` states the rules; `client` and `server` are two state machines without any I/O. The stores, Flower
and the fault tests drive the same two machines.
"""
