"""A real federation: error feedback that stays right when replies are lost, clients die and servers restart.

`protocol` states the rules. `client` and `server` hold them as two state machines without any I/O. Stores,
Flower and the fault test drive the same two.
"""
