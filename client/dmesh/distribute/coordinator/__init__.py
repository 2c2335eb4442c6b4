"""Functions that one client sends to others, under the names of `tf.distribute.coordinator`.

```python
import dmesh
from dmesh.distribute import coordinator


def square(number):
    return number * number


dmesh.initialize_accelerator_system()
if dmesh.client_id() == 0:
    with coordinator.ClusterCoordinator() as dispatcher:
        squares = [dispatcher.schedule(square, args=(number,)) for number in range(10)]
        print(dispatcher.fetch(squares))
else:
    coordinator.run_worker()
dmesh.shutdown_accelerator_system()
```
"""

# - `cluster_coordinator`: schedules functions on workers, and collects their results.
# - `channel`: messages between the coordinator and the workers.
# - `dispatch`: assignment of functions to workers. Pure decisions: no threads, clocks or messages.
# - `remote_values`: results that are not there yet, and iterators that each worker has for itself.
# - `messages`: functions, arguments, results and errors as bytes.
# - `worker`: runs the functions.
# - `server`: a worker under the name of `tf.distribute.Server`.
#
# Messages are keys of the coordination service. All of them begin with `dmesh/coordinator/`, and last as long
# as the process that has set them:
#
# - `state/host`: the coordinator's client id.
# - `state/made`, `state/client`: how many coordinators there have been, and the latest one's client id; these
#   two stay, as does
# - `state/closed`: number of the latest one that was closed.
# - `from/WORKER/INCARNATION/ready`: the worker can run functions.
# - `from/WORKER/INCARNATION/result`: the result of the latest one.
# - `to/WORKER/INCARNATION/host`: the coordinator's client id and number; deleted when it is gone.
# - `to/WORKER/INCARNATION/call`: the function to run.
# - `to/WORKER/INCARNATION/end`: number of the coordinator, which has no more functions.

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from dmesh.distribute.coordinator.cluster_coordinator import ClusterCoordinator
    from dmesh.distribute.coordinator.remote_values import PerWorkerDataset, PerWorkerValue, RemoteValue
    from dmesh.distribute.coordinator.worker import experimental_get_current_worker_index, run_worker

__getattr__ = lazy_getattr(
    __name__,
    {
        "cluster_coordinator": ("ClusterCoordinator",),
        "remote_values": ("PerWorkerDataset", "PerWorkerValue", "RemoteValue"),
        "worker": ("experimental_get_current_worker_index", "run_worker"),
    },
)

__all__ = [
    "ClusterCoordinator",
    "experimental_get_current_worker_index",
    "PerWorkerDataset",
    "PerWorkerValue",
    "RemoteValue",
    "run_worker",
]
