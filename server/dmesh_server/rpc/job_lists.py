"""The job lists that clients register with: read once, and asked for once.

All clients of a cluster bring the same list. With ten thousand of them it has 140 KB, which would have to be
sent, parsed and compared ten thousand times: so clients send a digest, and the list only if they are asked.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from dmesh import protocol
from dmesh.v1 import common_pb2
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Job
from dmesh_server.rpc.convert import invalid

_MOST = 8
"""Lists that are remembered."""

_MOST_ASKED = 64
"""Lists that are asked for at a time."""


class JobLists:
    """Reads job lists, and remembers the last ones."""

    def __init__(self, patience: float = 1.0) -> None:
        """Make a reader that remembers nothing.

        Args:
            patience: Seconds for which others wait for the list of the one who was asked for it.
        """
        self._patience = patience
        self._known: OrderedDict[bytes, tuple[list[bytes], tuple[Job, ...]]] = OrderedDict()
        self._asked: dict[bytes, asyncio.Future[None]] = {}

    async def read(self, messages: Sequence[common_pb2.Job], digest: bytes) -> tuple[Job, ...]:
        """Read a job list, or find the one with a digest.

        Raises:
            CoreError: JOB_LIST_UNKNOWN: the caller is to send the list. INVALID_ARGUMENT.
        """
        if messages or not digest:
            return self._learn(messages)
        if len(digest) != 32:
            raise invalid(f"the digest of the job list has {len(digest)} bytes; a SHA-256 has 32")
        while (found := self._known.get(digest)) is None:
            asked = self._asked.get(digest)
            if asked is None:
                self._ask(digest)
                raise CoreError(ErrorKind.JOB_LIST_UNKNOWN, "the server does not know this job list: send it")
            await asyncio.shield(asked)
        self._known.move_to_end(digest)
        return found[1]

    def _learn(self, messages: Sequence[common_pb2.Job]) -> tuple[Job, ...]:
        encoded = [message.SerializeToString() for message in messages]
        for known, jobs in self._known.values():
            if known == encoded:
                return jobs
        jobs = tuple(Job(message.name, tuple(message.addresses)) for message in messages)
        digest = protocol.jobs_digest((job.name, job.addresses) for job in jobs)
        self._known[digest] = encoded, jobs
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        self._settle(digest)
        return jobs

    def _ask(self, digest: bytes) -> None:
        """Note that one caller is asked, so that a thousand others that bring the same digest are not."""
        if len(self._asked) < _MOST_ASKED:
            loop = asyncio.get_running_loop()
            self._asked[digest] = loop.create_future()
            loop.call_later(self._patience, self._settle, digest)

    def _settle(self, digest: bytes) -> None:
        asked = self._asked.pop(digest, None)
        if asked is not None and not asked.done():
            asked.set_result(None)
