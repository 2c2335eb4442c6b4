"""Collectives: NumPy arrays that all clients, or a group of them, combine and exchange, peer to peer.

```python
total = dmesh.collectives.all_reduce(gradients)                   # of all clients
rows = dmesh.collectives.all_gather(x, group=mesh.group("batch"))  # of those along a mesh dimension
```

`dmesh.collectives.api` says what holds for all of them: dtypes, `out=`, time-outs, asynchronous calls,
errors.
"""

from __future__ import annotations

from dmesh.collectives.api import all_reduce, barrier, reduce, reduce_scatter
from dmesh.collectives.bucketing import all_reduce_many
from dmesh.collectives.communicator import new_group, world
from dmesh.collectives.data_movement import (
    all_gather,
    all_to_all,
    broadcast,
    gather,
    permute,
    recv,
    scatter,
    send,
)
from dmesh.collectives.group import Group
from dmesh.collectives.persistent import (
    PlannedAllGather,
    PlannedAllReduce,
    PlannedBroadcast,
    PlannedSharedAllReduce,
    plan_all_gather,
    plan_all_reduce,
    plan_broadcast,
    plan_shared_all_reduce,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "Group",
    "new_group",
    "permute",
    "plan_all_gather",
    "plan_all_reduce",
    "plan_broadcast",
    "plan_shared_all_reduce",
    "PlannedAllGather",
    "PlannedAllReduce",
    "PlannedBroadcast",
    "PlannedSharedAllReduce",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "world",
]
