"""Membership, sessions and barriers over a real connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from tests.server.raw_client import PATIENCE, PATIENT, RawClient, Stream, refusal

from dmesh.v1 import common_pb2, coordination_pb2
from dmesh_server.core.model import Limits

Make = Callable[..., RawClient]
Kind = common_pb2.ErrorKind
Code = grpc.StatusCode


def cancel(client: RawClient, name: str, instance: int = -1) -> coordination_pb2.CancelBarrierRequest:
    return coordination_pb2.CancelBarrierRequest(
        caller=client.caller, request_id=client.request_id(), name=name, instance=instance
    )


async def state(client: RawClient, known_epoch: int = 0) -> coordination_pb2.GetClusterStateResponse:
    request = coordination_pb2.GetClusterStateRequest(caller=client.caller, known_epoch=known_epoch)
    return await client.coordination.GetClusterState(request, timeout=PATIENCE)


async def test_register_tells_the_times_and_the_secret(make_client: Make, served) -> None:
    first = await make_client(0).register()
    second = await make_client(1).register()
    assert first.server_incarnation == served.runtime.server_incarnation
    assert first.cluster_incarnation == second.cluster_incarnation != 0
    assert len(first.peer_secret) == 32
    assert first.peer_secret == second.peer_secret
    assert (first.heartbeat_interval_ms, first.lease_ms, first.suspicion_ms) == (3000, 600_000, 100)
    assert second.epoch > first.epoch


async def test_register_again_is_the_same(make_client: Make) -> None:
    client = make_client(0)
    request = client.registration()
    first = await client.coordination.Register(request)
    assert await client.coordination.Register(request) == first
    assert (await client.register()).epoch == first.epoch


async def test_taken_task_slot_names_its_holder(make_client: Make) -> None:
    await make_client(0).register()
    code, error = await refusal(make_client(0).register)
    assert (code, error.kind) == (Code.ALREADY_EXISTS, Kind.ERROR_KIND_TASK_TAKEN)
    assert "host0" in error.message
    assert error.members[0].process.pid == 100


async def test_other_job_list_is_refused(make_client: Make) -> None:
    await make_client(0).register()
    code, error = await refusal(make_client(1, size=3).register)
    assert (code, error.kind) == (Code.FAILED_PRECONDITION, Kind.ERROR_KIND_SPEC_MISMATCH)


async def test_unknown_task_slot_is_refused(make_client: Make) -> None:
    code, error = await refusal(make_client(7).register)
    assert (code, error.kind) == (Code.NOT_FOUND, Kind.ERROR_KIND_UNKNOWN_TASK)


async def test_call_without_caller_is_refused(make_client: Make) -> None:
    client = make_client(0)
    for call in (
        client.coordination.Register(coordination_pb2.RegisterRequest()),
        client.coordination.Leave(coordination_pb2.LeaveRequest()),
        client.coordination.ReportError(coordination_pb2.ReportErrorRequest()),
        client.coordination.CancelBarrier(coordination_pb2.CancelBarrierRequest()),
        client.coordination.GetClusterState(coordination_pb2.GetClusterStateRequest()),
    ):
        code, error = await refusal(lambda call=call: call)
        assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)
        assert "caller" in error.message


async def test_cluster_state(make_client: Make, served) -> None:
    client = make_client(0)
    await client.join()
    found = await state(client)
    assert found.server_incarnation == served.runtime.server_incarnation
    assert [job.name for job in found.jobs] == ["worker"]
    [member] = found.members
    assert member.state == common_pb2.MEMBER_STATE_CONNECTED
    assert member.process.host == "host0"
    assert member.devices[0].type == "CPU"
    assert list(member.peer_addresses) == ["127.0.0.1:9"]
    assert [task.index for task in found.vacant] == [1]
    assert await state(make_client(None)), "an observer may read"


async def test_cluster_state_leaves_out_members_that_are_known(make_client: Make) -> None:
    first, second = make_client(0), make_client(1)
    await first.register()
    epoch = (await state(first)).epoch
    known = await state(first, known_epoch=epoch)
    assert (len(known.members), known.epoch) == (0, epoch)
    await second.register()
    changed = await state(first, known_epoch=epoch)
    assert [member.task.index for member in changed.members] == [0, 1]
    assert not changed.vacant


async def test_cluster_state_shows_barriers_under_way(make_client: Make) -> None:
    client = make_client(0)
    stream = await client.join()
    await stream.enter("b", timeout_ms=60_000)
    async with asyncio.timeout(PATIENCE):
        while not (found := await state(client)).barriers:
            await asyncio.sleep(0.01)
    [barrier] = found.barriers
    assert (barrier.name, barrier.instance) == ("b", 0)
    assert [task.index for task in barrier.arrived] == [0]
    assert [task.index for task in barrier.missing] == [1]
    assert 0 < barrier.remaining_ms <= 60_000


async def test_heartbeat_is_answered(make_client: Make) -> None:
    stream = await make_client(0).join()
    for sequence in (1, 2):
        await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=sequence))
        assert (await stream.read()).heartbeat_ack.sequence == sequence


async def test_session_needs_a_registration(make_client: Make) -> None:
    stream = Stream(client := make_client(0))
    await stream.send(attach=coordination_pb2.Attach(caller=client.caller))
    code, error = await refusal(stream.call.read)
    assert (code, error.kind) == (Code.FAILED_PRECONDITION, Kind.ERROR_KIND_NOT_REGISTERED)


@pytest.mark.parametrize(
    "message",
    [
        coordination_pb2.SessionRequest(),
        coordination_pb2.SessionRequest(heartbeat=coordination_pb2.Heartbeat(sequence=1)),
        coordination_pb2.SessionRequest(attach=coordination_pb2.Attach()),
    ],
)
async def test_session_begins_with_attach(
    make_client: Make, message: coordination_pb2.SessionRequest
) -> None:
    stream = Stream(make_client(0))
    await stream.call.write(message)
    code, error = await refusal(stream.call.read)
    assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)


async def test_session_without_a_message_is_refused(make_client: Make) -> None:
    stream = Stream(make_client(0))
    await stream.call.done_writing()
    assert (await refusal(stream.call.read))[0] is Code.INVALID_ARGUMENT


async def test_attach_comes_only_once(make_client: Make) -> None:
    stream = await (client := make_client(0)).join()
    await stream.send(attach=coordination_pb2.Attach(caller=client.caller))
    code, error = await refusal(stream.call.read)
    assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)


async def test_barrier_releases_everybody(make_client: Make) -> None:
    streams = [await make_client(index).join() for index in range(2)]
    for instance in range(3):
        for stream in streams:
            await stream.enter("b", instance=instance)
        for stream in streams:
            result = await stream.result()
            assert (result.name, result.instance, result.HasField("error")) == ("b", instance, False)


async def test_barrier_timeout_names_the_missing(make_client: Make) -> None:
    stream = await make_client(0).join()
    await stream.enter("b", timeout_ms=50)
    error = (await stream.result()).error
    assert error.kind == Kind.ERROR_KIND_BARRIER_TIMEOUT
    assert [member.task.index for member in error.members] == [1]
    assert error.members[0].incarnation == 0


async def test_malformed_barrier_is_refused_and_the_session_lives(make_client: Make) -> None:
    stream = await make_client(0).join()
    await stream.enter("b", timeout_ms=-1)
    result = await stream.result()
    assert (result.name, result.error.kind) == ("b", Kind.ERROR_KIND_INVALID_ARGUMENT)
    await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    await stream.read_kind("heartbeat_ack")


async def test_cancelled_barrier(make_client: Make) -> None:
    clients = [make_client(index) for index in range(2)]
    streams = [await client.join() for client in clients]
    await streams[0].enter("b")
    async with asyncio.timeout(PATIENCE):
        while not (await state(clients[0])).barriers:
            await asyncio.sleep(0.01)
    request = cancel(clients[1], "b")
    await clients[1].coordination.CancelBarrier(request)
    await clients[1].coordination.CancelBarrier(request)
    assert (await streams[0].result()).error.kind == Kind.ERROR_KIND_BARRIER_CANCELLED


async def test_leave_is_told_to_the_others(make_client: Make) -> None:
    clients = [make_client(index) for index in range(2)]
    streams = [await client.join() for client in clients]
    request = coordination_pb2.LeaveRequest(caller=clients[1].caller, request_id="bye")
    await clients[1].coordination.Leave(request)
    await clients[1].coordination.Leave(request)
    [member] = (await streams[0].read_kind("membership_change")).membership_change.departed
    assert (member.task.index, member.state) == (1, common_pb2.MEMBER_STATE_LEFT)
    code, error = await refusal(make_client(1).register)
    assert (code, error.kind) == (Code.FAILED_PRECONDITION, Kind.ERROR_KIND_CLUSTER_ENDING)


async def test_presented_barriers_release_those_who_were_not_told(make_client: Make, served) -> None:
    one, other = make_client(0), make_client(1)
    await one.join()
    stream = await other.join()
    await stream.enter("b", 0)
    request = coordination_pb2.PresentBarriersRequest(
        caller=one.caller, passed=[coordination_pb2.PassedBarrier(name="b", instance=0)]
    )
    response = await one.coordination.PresentBarriers(request, timeout=PATIENCE)
    assert response.server_incarnation == served.runtime.server_incarnation
    result = await stream.result()
    assert (result.instance, result.HasField("error")) == (0, False)


async def test_a_server_that_was_restarted_asks_for_the_barriers_first(make_client: Make, served) -> None:
    client = make_client(0)
    await client.join()
    request = coordination_pb2.LeaveRequest(
        caller=client.caller, request_id="leave", server_incarnation=served.runtime.server_incarnation + 1
    )
    response = await client.coordination.Leave(request, timeout=PATIENCE)
    assert response.present_to == served.runtime.server_incarnation
    assert [member.state for member in (await state(client)).members] == [common_pb2.MEMBER_STATE_CONNECTED]
    request.server_incarnation = response.present_to
    assert not (await client.coordination.Leave(request, timeout=PATIENCE)).present_to
    observer = make_client(None)
    assert [member.state for member in (await state(observer)).members] == [common_pb2.MEMBER_STATE_LEFT]


async def test_barriers_that_an_older_client_presents_as_it_attaches_are_taken(make_client: Make) -> None:
    one, other = make_client(0), make_client(1)
    await one.register()
    stream = await other.join()
    await stream.enter("b", 0)
    passed = [coordination_pb2.PassedBarrier(name="b", instance=0)]
    await Stream(one).send(attach=coordination_pb2.Attach(caller=one.caller, passed=passed))
    assert (await stream.result()).instance == 0


async def test_reported_error_reaches_the_others_and_ends_the_session(make_client: Make) -> None:
    clients = [make_client(index) for index in range(2)]
    streams = [await client.join() for client in clients]
    request = coordination_pb2.ReportErrorRequest(
        caller=clients[1].caller, request_id="oops", message="ValueError: bad"
    )
    await clients[1].coordination.ReportError(request)
    await clients[1].coordination.ReportError(request)
    [member] = (await streams[0].read_kind("membership_change")).membership_change.departed
    assert (member.task.index, member.state) == (1, common_pb2.MEMBER_STATE_FAILED)
    assert "ValueError: bad" in member.reason
    end = (await streams[1].read_kind("session_end")).session_end
    assert end.error.kind == Kind.ERROR_KIND_FENCED
    await streams[1].ended()


async def test_hung_up_client_is_lost_after_the_grace(make_client: Make) -> None:
    streams = [await make_client(index).join() for index in range(2)]
    await streams[0].enter("b")
    streams[1].hang_up()
    result = (await streams[0].read_kind("barrier_result")).barrier_result
    assert result.error.kind == Kind.ERROR_KIND_BARRIER_FAILED
    [member] = result.error.members
    assert (member.task.index, member.state) == (1, common_pb2.MEMBER_STATE_LOST)


@pytest.mark.parametrize("limits", [replace(PATIENT, suspicion=600.0)])
async def test_session_may_come_back_within_the_grace(make_client: Make) -> None:
    clients = [make_client(index) for index in range(2)]
    streams = [await client.join() for client in clients]
    streams[1].hang_up()
    streams[1] = await clients[1].attach()
    for stream in streams:
        await stream.enter("b")
    for stream in streams:
        assert not (await stream.result()).HasField("error")


async def test_newer_session_replaces_the_older(make_client: Make) -> None:
    clients = [make_client(index) for index in range(2)]
    streams = [await client.join() for client in clients]
    newer = await clients[1].attach()
    streams[1].hang_up()
    for stream in (streams[0], newer):
        await stream.enter("b")
    assert not (await newer.result()).HasField("error")


@pytest.mark.parametrize("limits", [Limits(lease=0.4, heartbeat_interval=0.1)])
async def test_silent_client_is_blocked_when_its_lease_ends(make_client: Make) -> None:
    streams = [await make_client(index).join() for index in range(2)]

    async def beat() -> None:
        while True:
            await streams[0].send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(beat())
    liveness = {}
    while liveness.get(1) != common_pb2.LIVENESS_BLOCKED:  # on a busy machine, the other may be, too
        change = (await streams[0].read_kind("liveness_change")).liveness_change
        liveness |= {member.task.index: member.liveness for member in change.members}
    assert "heartbeat" in change.members[-1].reason
    await streams[1].send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    while liveness[1] != common_pb2.LIVENESS_LIVE:
        change = (await streams[0].read_kind("liveness_change")).liveness_change
        liveness |= {member.task.index: member.liveness for member in change.members}
    beating.cancel()


VICTIM = """
import asyncio, sys
from tests.server.raw_client import RawClient

async def main():
    client = RawClient(sys.argv[1], 1)
    stream = await client.join()
    print("joined", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_killed_process_is_noticed_long_before_its_lease_ends(make_client: Make, served) -> None:
    stream = await make_client(0).join()
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VICTIM, served.address,
        stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    try:
        assert victim.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert await victim.stdout.readline() == b"joined\n"
        victim.kill()
        [member] = (await stream.read_kind("membership_change")).membership_change.departed
        assert (member.task.index, member.state) == (1, common_pb2.MEMBER_STATE_LOST)
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()


async def test_shutdown_ends_sessions_and_refuses_calls(make_client: Make, served) -> None:
    client = make_client(0)
    stream = await client.join()
    await served.runtime.shutdown()
    end = (await stream.read_kind("session_end")).session_end
    assert end.error.kind == Kind.ERROR_KIND_SHUTTING_DOWN
    await stream.ended()
    code, error = await refusal(client.register)
    assert (code, error.kind) == (Code.UNAVAILABLE, Kind.ERROR_KIND_SHUTTING_DOWN)


async def test_session_that_does_not_read_is_dropped_and_others_are_not(make_client: Make) -> None:
    # A small window, so that what the client does not read stays with the server.
    windows = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
    lazy = await make_client(0, options=windows).join()
    diligent = await make_client(1).join()

    # The answers to these are long, they themselves are short, so that none of them gets stuck on its way.
    for _ in range(3000):
        await lazy.enter("b", timeout_ms=-1)
    [member] = (await diligent.read_kind("membership_change")).membership_change.departed
    assert (member.task.index, member.state) == (0, common_pb2.MEMBER_STATE_LOST)

    async def read_all() -> None:
        while True:
            await lazy.read()

    code, error = await refusal(read_all)
    assert (code, error.kind) == (Code.RESOURCE_EXHAUSTED, Kind.ERROR_KIND_LIMIT_EXCEEDED)


async def test_overlong_barrier_name_ends_the_session(make_client: Make) -> None:
    stream = await make_client(0).join()
    await stream.enter("x" * 300)
    assert (await stream.result()).error.kind == Kind.ERROR_KIND_INVALID_ARGUMENT
    await stream.enter("x" * 5000)
    assert (await refusal(stream.call.read))[0] is Code.INVALID_ARGUMENT
