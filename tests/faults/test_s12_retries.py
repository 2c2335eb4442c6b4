"""Scenario 12: a call whose answer was lost is made again with the same id: one answer, one effect."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import LONG_LEASE, results
from tests.server.raw_client import PATIENCE, RawClient, refusal

from dmesh.testing import FaultProxy
from dmesh.v1 import coordination_pb2 as coordination
from dmesh.v1 import key_value_pb2 as key_value

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def mutations(client: RawClient) -> dict[str, tuple]:
    """Every call that changes something, as (stub, request)."""
    caller, kv = client.caller, client.key_value
    return {
        "set": (kv.Set, key_value.SetRequest(caller=caller, request_id="set", key="k", value=b"1")),
        "overwrite": (
            kv.Set,
            key_value.SetRequest(caller=caller, request_id="over", key="k", value=b"2", allow_overwrite=True),
        ),
        "increment": (
            kv.Increment,
            key_value.IncrementRequest(caller=caller, request_id="inc", key="n", amount=5),
        ),
        "compare and set": (
            kv.CompareAndSet,
            key_value.CompareAndSetRequest(
                caller=caller, request_id="cas", key="k", expected=b"2", value=b"3"
            ),
        ),
        "refused compare and set": (
            kv.CompareAndSet,
            key_value.CompareAndSetRequest(
                caller=caller, request_id="cas2", key="k", expected=b"2", value=b"4"
            ),
        ),
        "delete": (kv.Delete, key_value.DeleteRequest(caller=caller, request_id="del", key="k")),
    }


async def revision(client: RawClient) -> int:
    request = key_value.ListRequest(caller=client.caller, prefix="")
    return (await client.key_value.List(request, timeout=PATIENCE, wait_for_ready=True)).revision


@pytest.mark.parametrize("restart", [False, True], ids=["same-server", "killed-and-restarted"])
async def test_lost_answers_of_calls(restart, make_server):
    """Each is made again twice, by another connection; also after a kill -9 of the server in between."""
    server = make_server(*LONG_LEASE).start()
    with FaultProxy(server.address) as proxy:
        client = RawClient(proxy.address, 0)
        direct = RawClient(server.address, 0, incarnation=client.caller.incarnation)
        request = client.registration(request_id="register")
        lost = proxy.drop("to_client")
        doomed = client.coordination.Register(request, timeout=PATIENCE)
        registered = await direct.coordination.Register(request, timeout=PATIENCE)  # whichever came first
        doomed.cancel()
        lost.heal()
        again = await direct.coordination.Register(request, timeout=PATIENCE)
        assert (again.epoch, again.cluster_incarnation) == (registered.epoch, registered.cluster_incarnation)
        for name, (_, request) in mutations(client).items():
            before = await revision(client)  # it is connected, and what it asks will arrive
            with proxy.drop("to_client"):
                call = mutations(client)[name][0](request, timeout=PATIENCE)
                while await revision(direct) == before and "refused" not in name:
                    pass  # its effect is there, its answer is not
                call.cancel()
            if restart:
                server.restart()
            method = mutations(direct)[name][0]
            first = await method(request, timeout=PATIENCE, wait_for_ready=True)
            second = await method(request, timeout=PATIENCE)
            assert first == second, name
            assert await revision(direct) == before + ("refused" not in name), name
        await client.channel.close()
        await direct.channel.close()


async def test_the_same_id_for_something_else_is_no_retry(make_server):
    """Who uses an id again is told, or gets the first answer; there is no second effect in either case."""
    server = make_server(*LONG_LEASE).start()
    client = RawClient(server.address, 0)
    await client.register()
    method, request = mutations(client)["increment"]
    first = await method(request, timeout=PATIENCE)
    request.amount = 100
    try:
        assert await method(request, timeout=PATIENCE) == first
    except Exception:  # noqa: BLE001 -- a refusal is as good
        await refusal(lambda: method(request, timeout=PATIENCE))
    got = await client.key_value.Get(key_value.GetRequest(caller=client.caller, key="n"), timeout=PATIENCE)
    assert got.kv.value == b"5"
    await client.channel.close()


async def test_lost_answer_of_a_call_on_the_session(make_server):
    """A call that is sent again on the next session has its first answer."""
    server = make_server(*LONG_LEASE).start()
    client = RawClient(server.address, 0)
    stream = await client.join()
    call = coordination.KeyValueCall(
        id=1, increment=key_value.IncrementRequest(request_id="once", key="n", amount=1)
    )
    await stream.send(key_value_call=call)
    first = (await stream.read_kind("key_value_reply")).key_value_reply
    for _ in range(3):
        stream.hang_up()
        server.restart()
        stream = await client.attach()
        await stream.send(key_value_call=call)
        assert (await stream.read_kind("key_value_reply")).key_value_reply == first
    await client.channel.close()


async def test_lost_result_of_a_barrier(make_server):
    """Who enters an instance again that is over gets its result; it counts once."""
    server = make_server(*LONG_LEASE).start()
    clients = [RawClient(server.address, index) for index in range(2)]
    streams = [await client.join() for client in clients]
    for instance in range(3):
        for position in (0, 1):
            await streams[position].enter("b", instance)
        outcomes = [await stream.result() for stream in streams]
        streams[0].hang_up()
        streams[0] = await clients[0].attach()
        await streams[0].enter("b", instance)
        assert await streams[0].result() == outcomes[0]
        assert {outcome.instance for outcome in outcomes} == {instance}
    await streams[0].enter("b", 3)
    await streams[0].enter("b", 3)  # an arrival that was sent twice is one
    await streams[1].enter("b", 3)
    assert (await streams[1].result()).instance == 3
    for client in clients:
        await client.channel.close()


async def test_leaving_twice(make_server):
    server = make_server(*LONG_LEASE).start()
    one, other = RawClient(server.address, 0), RawClient(server.address, 1)
    await one.register()
    await other.register()
    request = coordination.LeaveRequest(caller=one.caller, request_id="leave")
    for _ in range(3):
        await one.coordination.Leave(request, timeout=PATIENCE)
    state = await other.coordination.GetClusterState(
        coordination.GetClusterStateRequest(caller=other.caller), timeout=PATIENCE
    )
    assert state.epoch == 3  # two came, one left, once
    await one.channel.close()
    await other.channel.close()


def test_the_sdk_counts_once_over_a_bad_network(make_server, make_cluster, chance, figures):
    """Increments through connections that are cut all the time: the sum is the number of calls."""
    server = make_server(*LONG_LEASE).start()
    with FaultProxy(server.address) as proxy:
        clients = make_cluster(4, proxy.address)
        calls = 150
        counting = [
            client.submit(f"[agent.key_value_increment('n') for _ in range({calls})][-1]")
            for client in clients
        ]
        resets = 0
        while not all(future.done() for future in counting):
            time.sleep(chance.uniform(0.05, 0.5))  # of traffic
            with proxy.drop(chance.choice(["to_client", "both"])):
                time.sleep(chance.uniform(0, 0.1))  # calls that get no answer
                proxy.reset()
            resets += 1
            if resets % 5 == 0:
                server.restart()
        results(counting)
        proxy.heal()
        assert clients[0].do("agent.key_value_get('n', 60)") == str(4 * calls)
        figures.add("cut connections", resets, "")
        sums = [future.result().value for future in counting]
        assert max(sums) == 4 * calls
