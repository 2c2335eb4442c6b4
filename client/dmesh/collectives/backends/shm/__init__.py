"""Shared-memory backend: collectives between ranks of one host, through memory that all of them have mapped.

`setup` maps the memory of a group's members in its first call, and opens endpoints there; `arrays` has arrays
in shared memory, and memory that the ranks of a group have in common. The headers in `client/native/core`
describe the protocol.
"""
