"""The version of the protocol in `protos/dmesh/v1` that this distribution speaks, on both sides.

Fields and messages are only ever added within `dmesh.v1`; the version tells which of them the other side
knows:

1. Sessions carry barriers; keys and values have calls of their own.
2. Sessions carry the calls of the key-value store; liveness, settings of the cluster, passed barriers.
3. Calls of sessions name reply slots. Passed barriers are presented in calls of their own.
4. Callers show the credential with which they registered: knowing an incarnation proves nothing.
5. Sessions have TCP connections of their own, which a call of gRPC opens and keeps (KeepSession).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

VERSION = 5
"""Version of the protocol that this side speaks."""
OLDEST_CLIENT = 1
"""The oldest version of clients that a server of `VERSION` serves."""
CREDENTIALS_SINCE = 4
"""The first version whose clients must register with a credential."""
RESERVED_PREFIX = "dmesh/"
"""Begins the names of the SDK's own barriers and keys, which no script may use."""


def jobs_digest(jobs: Iterable[tuple[str, Sequence[str]]]) -> bytes:
    """Returns what stands for a job list in `RegisterRequest.jobs_digest`, 32 bytes.

    Args:
        jobs: Each job's name and addresses, in the order in which they are sent.
    """
    digest = hashlib.sha256()
    for name, addresses in jobs:
        texts = [text.encode() for text in (name, *addresses)]
        sizes = [len(text).to_bytes(4, "big") for text in texts]
        count = len(addresses).to_bytes(4, "big")
        rest = b"".join(part for pair in zip(sizes[1:], texts[1:], strict=True) for part in pair)
        digest.update(sizes[0] + texts[0] + count + rest)
    return digest.digest()
