"""Transports: how bytes travel between the clients of a cluster.

`base` is the contract. Two implementations are shipped: `tcp` between processes and hosts, and `local`, in
which the ranks are threads of one process, for tests. Both match frames to receives with the same `mailbox`,
so what holds for one holds for the other; a transport over shared memory can do the same.
"""

from __future__ import annotations
