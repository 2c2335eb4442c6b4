"""Clusters, clocks and faulty networks for the tests of programs that use dmesh, and of dmesh itself.

- `FakeCluster` runs a program as all clients of a cluster, in threads: no ports, no set-up, milliseconds.
- `FaultProxy` stands between clients and the coordination server (or any other) and delays, drops,
  throttles, resets or refuses.
- `ManualClock` stands still until the test moves it.
- `dmesh.testing.stores` tests stores of the coordination server, in a class to derive from. It needs the
  server's code, so it is imported by itself.
- `dmesh.testing.resolvers` has the same for cluster resolvers, `dmesh.testing.backends` for backends of
  collectives.

```python
from dmesh.testing import FakeCluster

def test_everybody_gets_the_sum():
    with FakeCluster(4) as cluster:
        assert cluster.run(lambda: int(dmesh.collectives.all_reduce(np.array(dmesh.client_id())))) == [6] * 4
```
"""

from __future__ import annotations

from dmesh.testing.clock import ManualClock
from dmesh.testing.fake_cluster import FakeCluster, RankHangsError, RankKilledError
from dmesh.testing.fault_proxy import Direction, Fault, FaultProxy

__all__ = [
    "Direction",
    "FakeCluster",
    "Fault",
    "FaultProxy",
    "ManualClock",
    "RankHangsError",
    "RankKilledError",
]
