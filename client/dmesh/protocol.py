"""The version of the protocol in `protos/dmesh/v1` that this distribution speaks, on both sides.

Fields and messages are only ever added within `dmesh.v1`; the version tells which of them the other side
knows:

1. Sessions carry barriers; keys and values have calls of their own.
2. Sessions carry the calls of the key-value store; liveness, settings of the cluster, passed barriers.
"""

from __future__ import annotations

VERSION = 2
"""What this side speaks."""
OLDEST_CLIENT = 1
"""The oldest version of clients that a server of `VERSION` serves."""
