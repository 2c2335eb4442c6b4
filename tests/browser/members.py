"""Members without programs, that say of themselves what they are told to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager

from tests.event_loops import entered
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.v1 import common_pb2, progress_pb2


@contextlib.asynccontextmanager
async def _members(
    address: str,
    token: str,
    count: int,
    report: progress_pb2.ProgressReport,
    machines: Sequence[tuple[str, str]],
) -> AsyncIterator[None]:
    clients = []
    for index in range(count):
        client = RawClient(address, index, cluster="made-up", size=count, token=token)
        clients.append(client)
        host, boot_id = machines[index] if machines else (f"host{index // 2}", "")
        process = common_pb2.Process(host=host, boot_id=boot_id, pid=100 + index, program="train.py")
        await client.coordination.Register(client.registration(process=process), timeout=PATIENCE)
        stream = await client.attach()
        await stream.send(heartbeat={"sequence": 1, "progress": 1, "report": report})
    yield
    for client in clients:
        await client.channel.close()


def keep_members(
    address: str,
    token: str,
    count: int,
    report: progress_pb2.ProgressReport,
    machines: Sequence[tuple[str, str]] = (),
) -> AbstractContextManager[None]:
    """Keeps members of a cluster, each of which has sent one report; on a thread of their own.

    Args:
        address: Of the server.
        token: For it.
        count: Number of members.
        report: What each of them reports.
        machines: Host name and boot id of each; without them, two members are on each host.
    """
    return entered(_members(address, token, count, report, machines))
