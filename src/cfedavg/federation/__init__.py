"""A real federation: error feedback that stays right when replies are lost, clients die and servers restart.

`protocol` holds two state machines without any I/O; files and the fault test drive the same two.
"""
