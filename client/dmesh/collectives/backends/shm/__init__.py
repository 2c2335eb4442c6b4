"""Shared-memory backend: collectives between ranks of one host, through memory that all of them have mapped.

| module | contents |
|---|---|
| `segment` | memory that a process shares, and its mapping by others |
| `registry` | memory of this client, divided into regions of groups, and mapped memory of others |
| `setup` | messages of a group's first call, by which its members find out whether they share memory |
| `endpoint` | this rank's endpoints in the memory of a group |
| `pool`, `lending` | arrays in shared memory, and memory that the ranks of a group have in common |

The headers in `client/native/core` describe the protocol.
"""

from __future__ import annotations
