"""Members without programs, that say of themselves what they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from tests.e2e.clients import DEADLINE
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.v1 import common_pb2, progress_pb2


@contextlib.contextmanager
def keep_members(address: str, token: str, count: int, report: progress_pb2.ProgressReport) -> Iterator[None]:
    """Keeps members of a cluster, each of which has sent one report; on a thread of their own."""
    ready, over = Future[None](), threading.Event()

    async def run() -> None:
        clients = []
        for index in range(count):
            client = RawClient(address, index, cluster="made-up", size=count, token=token)
            clients.append(client)
            process = common_pb2.Process(host=f"host{index // 2}", pid=100 + index, program="train.py")
            await client.coordination.Register(client.registration(process=process), timeout=PATIENCE)
            stream = await client.attach()
            await stream.send(heartbeat={"sequence": 1, "progress": 1, "report": report})
        ready.set_result(None)
        await asyncio.to_thread(over.wait)
        for client in clients:
            await client.channel.close()

    def tell() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        ready.result(DEADLINE)
        yield
    finally:
        over.set()
        thread.join(DEADLINE)
