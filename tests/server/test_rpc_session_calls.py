"""Key-value calls that come through a session: the same answers, in any order, bounded in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.server.raw_client import PATIENCE, RawClient, Stream, refusal

from dmesh import protocol
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import key_value_pb2 as kv
from dmesh_server.core.replies import REPLY_SLOTS

Make = Callable[..., RawClient]


async def ask(stream: Stream, call_id: int, **request: object) -> None:
    await stream.send(key_value_call=pb.KeyValueCall(id=call_id, **request))  # type: ignore[arg-type]


async def reply(stream: Stream) -> pb.KeyValueReply:
    return (await stream.read_kind("key_value_reply")).key_value_reply


async def answer(stream: Stream, call_id: int, **request: object) -> pb.KeyValueReply:
    await ask(stream, call_id, **request)
    received = await reply(stream)
    assert received.id == call_id
    return received


async def test_every_kind_of_call(make_client: Make) -> None:
    stream = await make_client().join()
    said = await answer(stream, 1, set=kv.SetRequest(request_id="a", key="k", value=b"v"))
    assert said.set.revision == 1
    assert (await answer(stream, 2, get=kv.GetRequest(key="k"))).get.kv.value == b"v"
    said = await answer(stream, 3, get_many=kv.GetManyRequest(keys=["k", "none"]))
    assert [one.key for one in said.get_many.kvs] == ["k"]
    said = await answer(stream, 4, list=kv.ListRequest(prefix=""))
    assert [one.value for one in said.list.kvs] == [b"v"]
    said = await answer(stream, 5, increment=kv.IncrementRequest(request_id="b", key="n", amount=5))
    assert said.increment.value == 5
    swap = kv.CompareAndSetRequest(request_id="c", key="k", expected=b"v", value=b"w")
    assert (await answer(stream, 6, compare_and_set=swap)).compare_and_set.succeeded
    said = await answer(stream, 7, delete=kv.DeleteRequest(request_id="d", key="", is_prefix=True))
    assert said.delete.deleted == 2


async def test_a_refusal_answers_the_call_and_the_session_lives(make_client: Make) -> None:
    stream = await make_client().join()
    said = await answer(stream, 9, get=kv.GetRequest(key="none"))
    assert said.error.kind == common_pb2.ERROR_KIND_KEY_NOT_FOUND
    said = await answer(stream, 10, get=kv.GetRequest(key="none", timeout_ms=-7))
    assert said.error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT
    said = await answer(stream, 11, set=kv.SetRequest(request_id="", key="k"))
    assert said.error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT


async def test_a_repeated_request_has_one_effect_also_on_another_session(make_client: Make) -> None:
    client = make_client()
    stream = await client.join()
    add = kv.IncrementRequest(request_id="once", key="n", amount=1)
    assert (await answer(stream, 1, increment=add)).increment.value == 1
    stream.hang_up()
    stream = await client.attach()
    assert (await answer(stream, 1, increment=add)).increment.value == 1


async def test_a_blocked_call_holds_up_no_other(make_client: Make) -> None:
    one, other = make_client(0), make_client(1)
    stream = await one.join()
    setter = await other.join()
    await ask(stream, 1, get=kv.GetRequest(key="late", timeout_ms=-1))
    assert (await answer(stream, 2, list=kv.ListRequest())).id == 2
    await answer(setter, 1, set=kv.SetRequest(request_id="a", key="late", value=b"!"))
    late = await reply(stream)
    assert (late.id, late.get.kv.value) == (1, b"!")


async def test_an_abandoned_call_is_not_answered(make_client: Make, served) -> None:
    stream = await make_client().join()
    await ask(stream, 1, get=kv.GetRequest(key="late", timeout_ms=-1))
    await stream.send(abandon_call=pb.AbandonCall(id=1))
    await stream.send(abandon_call=pb.AbandonCall(id=77))
    said = await answer(stream, 2, set=kv.SetRequest(request_id="a", key="late", value=b"!"))
    assert said.HasField("set"), "the call that was abandoned would have been answered before"
    assert not served.runtime._pending


async def test_a_session_that_ends_leaves_no_call_behind(make_client: Make, served) -> None:
    stream = await make_client().join()
    await ask(stream, 1, get=kv.GetRequest(key="never", timeout_ms=-1))
    await answer(stream, 2, list=kv.ListRequest())
    assert served.runtime._pending
    stream.hang_up()
    async with asyncio.timeout(PATIENCE):
        while served.runtime._pending:
            await asyncio.sleep(0.01)


async def test_too_many_unanswered_calls_are_refused(make_client: Make) -> None:
    stream = await make_client().join()
    for number in range(REPLY_SLOTS + 1):
        await ask(stream, number, get=kv.GetRequest(key="never", timeout_ms=-1))
    said = await reply(stream)
    assert (said.id, said.error.kind) == (REPLY_SLOTS, common_pb2.ERROR_KIND_LIMIT_EXCEEDED)
    await stream.send(abandon_call=pb.AbandonCall(id=0))
    assert (await answer(stream, 1000, list=kv.ListRequest())).HasField("list")


async def test_an_id_that_is_not_free_and_a_call_without_request_end_the_session(make_client: Make) -> None:
    stream = await make_client(0).join()
    await ask(stream, 1, get=kv.GetRequest(key="never", timeout_ms=-1))
    await ask(stream, 1, get=kv.GetRequest(key="never", timeout_ms=-1))
    _, error = await refusal(stream.result)
    assert error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT
    stream = await make_client(1).join()
    await ask(stream, 1)
    _, error = await refusal(stream.result)
    assert error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT


async def test_two_unanswered_calls_in_one_reply_slot_end_the_session(make_client: Make) -> None:
    stream = await make_client().join()
    for number in (1, 2):
        get = kv.GetRequest(key="never", timeout_ms=-1)
        await stream.send(key_value_call=pb.KeyValueCall(id=number, reply_slot=7, get=get))
    _, error = await refusal(stream.result)
    assert error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT
    assert "reply slot 7" in error.message


async def test_a_reply_slot_is_free_again_after_the_answer_and_when_its_call_is_given_up(
    make_client: Make,
) -> None:
    client = make_client()
    stream = await client.join()
    never = kv.GetRequest(key="never", timeout_ms=-1)
    await stream.send(key_value_call=pb.KeyValueCall(id=1, reply_slot=1, get=never))
    await stream.send(abandon_call=pb.AbandonCall(id=1))
    for number in range(2, 5):
        increment = kv.IncrementRequest(request_id=f"r{number}", key="n", amount=1)
        call = pb.KeyValueCall(id=number, reply_slot=1, increment=increment)
        await stream.send(key_value_call=call)
        assert (await reply(stream)).increment.value == number - 1
    again = await client.attach()
    await again.send(key_value_call=call)
    assert (await reply(again)).increment.value == 3


async def test_large_answers_that_nobody_reads_stop_the_reading(make_client: Make, served) -> None:
    """The client asks for far more than the send queue may hold; it gets all of it once it reads."""
    stream = await make_client(0).join()
    for number in range(30):
        await answer(
            stream, number, set=kv.SetRequest(request_id=f"s{number}", key=f"k{number}", value=bytes(1 << 20))
        )
    asked = 20  # of 30 MiB each
    for number in range(asked):
        await ask(stream, 1000 + number, list=kv.ListRequest())
    session = next(iter(served.runtime._sessions.values()))
    other = await make_client(1).join()
    assert (await answer(other, 1, get=kv.GetRequest(key="none"))).HasField("error")
    for number in range(asked):
        assert session.send_queue.size < 64 << 20
        assert (await reply(stream)).id == 1000 + number


@pytest.mark.parametrize("version", [0, 1, protocol.VERSION])
async def test_known_versions_are_served(make_client: Make, version: int) -> None:
    client = make_client()
    request = client.registration(protocol_version=version)
    answer = await client.coordination.Register(request, timeout=PATIENCE)
    assert answer.HasField("settings")


@pytest.mark.parametrize("version", [protocol.VERSION + 1, -1])
async def test_another_version_is_refused_with_both_named(make_client: Make, version: int) -> None:
    client = make_client()
    request = client.registration(protocol_version=version)
    _, error = await refusal(lambda: client.coordination.Register(request, timeout=PATIENCE))
    assert error.kind == common_pb2.ERROR_KIND_VERSION_MISMATCH
    assert f"version {version}" in error.message
    assert f"{protocol.OLDEST_CLIENT} to {protocol.VERSION}" in error.message
