"""Scenario 38: hundreds of changes have no answer when the connection breaks, 20 times: each counts once."""

from __future__ import annotations

import asyncio

import pytest
from tests.faults.processes import results
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.testing import FaultProxy
from dmesh.v1 import key_value_pb2

BREAKS = 20
EACH = 100
"""Increments, and as many compare-and-sets, that are unanswered when the connection breaks."""

CHANGES = f"""
def change(number):
    sums, created = [], []
    def increment():
        sums.append(agent.key_value_increment('n'))
    def create(index):
        created.append(bool(agent.key_value_compare_and_set(f'{{number}}/{{index}}', None, 'v')))
    threads = [threading.Thread(target=increment) for _ in range({EACH})]
    threads += [threading.Thread(target=create, args=(index,)) for index in range({EACH})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sorted(sums), created]
"""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.mark.parametrize("restart", [False, True], ids=["same-server", "killed-and-restarted"])
async def test_changes_without_an_answer_are_made_once(restart, make_server, make_cluster, figures):
    """The server makes all changes, the client receives no answer, and sends all of them again."""
    server = make_server().start()
    observer = RawClient(server.address, None, cluster="default")
    with FaultProxy(server.address) as proxy:
        (client,) = make_cluster(1, proxy.address)
        client.do(CHANGES)
        for number in range(BREAKS):
            with proxy.drop("to_client"):
                changes = client.submit(f"change({number})", thread=True)
                await revision(observer, (number + 1) * 2 * EACH)
                if restart and number % 4 == 3:
                    server.restart()
                proxy.reset()
            sums, created = results([changes])[0].value
            assert created == [True] * EACH, f"break {number}: a change that was made reports failure"
            assert sums == list(range(number * EACH + 1, (number + 1) * EACH + 1)), f"break {number}"
        assert client.do("agent.key_value_get('n', 60)") == str(BREAKS * EACH)
        figures.add("changes without an answer", BREAKS * 2 * EACH, "")
    await observer.channel.close()


async def revision(observer: RawClient, expected: int) -> None:
    """Waits until so many changes were made, and no more."""
    request = key_value_pb2.ListRequest(caller=observer.caller, keys_only=True)
    async with asyncio.timeout(PATIENCE):
        while True:
            listed = await observer.key_value.List(request, timeout=PATIENCE, wait_for_ready=True)
            assert listed.revision <= expected, "a change was made twice"
            if listed.revision == expected:
                return
            await asyncio.sleep(0.01)
