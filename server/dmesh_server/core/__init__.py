"""The cluster as a state machine, without IO: events in, effects out.

`Core.apply(event, now)` changes the state and returns the effects to carry out. This package imports nothing
but the standard library's data types: no clock, no socket, no disk, no randomness. The runtime supplies all
of these.
"""
