"""Collectives of all clients or of a group, on NumPy arrays that travel from peer to peer.

```python
total = dmesh.collectives.all_reduce(gradients)  # of all clients
row = mesh.group("batch")  # the clients along a mesh dimension
parts = dmesh.collectives.all_gather(x, group=row)
```

`dmesh.collectives.api` has the rules for all of them: dtypes, `out=`, time-outs, asynchronous calls, errors.
"""

from __future__ import annotations

from dmesh.collectives.api import all_reduce, barrier, exscan, reduce, reduce_scatter, scan
from dmesh.collectives.bucketing import PlannedAllReduceMany, all_reduce_many, plan_all_reduce_many
from dmesh.collectives.communicator import new_group, split, world
from dmesh.collectives.data_movement import (
    all_gather,
    all_to_all,
    broadcast,
    gather,
    permute,
    scatter,
)
from dmesh.collectives.envelope import ANY_SOURCE, ANY_TAG, NULL_PEER, Status
from dmesh.collectives.group import Group
from dmesh.collectives.objects import (
    all_gather_object,
    all_to_all_object,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from dmesh.collectives.operators import Op
from dmesh.collectives.persistent import Plan, plan, plan_all_reduce
from dmesh.collectives.point_to_point import iprobe, irecv, isend, probe, recv, send, sendrecv
from dmesh.collectives.recovery import agree, reset, shrink
from dmesh.collectives.shared_results import (
    PlannedAllGather,
    PlannedBroadcast,
    PlannedSharedAllReduce,
    plan_all_gather,
    plan_broadcast,
    plan_shared_all_reduce,
)


def __dir__() -> list[str]:
    return sorted([*__all__, "backends"])


__all__ = [
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "all_to_all_object",
    "ANY_SOURCE",
    "ANY_TAG",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exscan",
    "gather",
    "gather_object",
    "Group",
    "iprobe",
    "irecv",
    "isend",
    "new_group",
    "NULL_PEER",
    "Op",
    "permute",
    "Plan",
    "plan",
    "plan_all_gather",
    "plan_all_reduce",
    "plan_all_reduce_many",
    "plan_broadcast",
    "plan_shared_all_reduce",
    "PlannedAllGather",
    "PlannedAllReduceMany",
    "PlannedBroadcast",
    "PlannedSharedAllReduce",
    "probe",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "reset",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "shrink",
    "split",
    "Status",
    "world",
]
