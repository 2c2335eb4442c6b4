"""Whatever bytes a client sends, it gets a proper refusal, and the server lives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from tests.server.raw_client import PATIENT

from dmesh.telemetry.provider import Provider
from dmesh.v1 import common_pb2, coordination_pb2, coordination_pb2_grpc, key_value_pb2
from dmesh_server.embedded import EmbeddedServer, start
from dmesh_server.rpc.errors import ERROR_METADATA

SERVICES = [
    coordination_pb2.DESCRIPTOR.services_by_name["CoordinationService"],
    key_value_pb2.DESCRIPTOR.services_by_name["KeyValueService"],
]
METHODS = [method for service in SERVICES for method in service.methods]
SESSION = next(method for method in METHODS if method.name == "Session")
UNARY = [method for method in METHODS if method.name not in ("KeepSession", "Session", "Watch")]
DEADLINE = 60.0

numbers = itertools.count()

texts = st.one_of(
    st.sampled_from(
        ["", "c", "worker", "k", "r", "../../etc/passwd", "\x00", "a\r\nb", "<b>", "e" * 5000, "🙂"]
    ),
    st.text(max_size=20),
)
contexts = st.dictionaries(
    st.one_of(st.sampled_from(["traceparent", "tracestate", "baggage"]), texts),
    st.one_of(st.just(f"00-{'a' * 32}-{'b' * 16}-01"), texts),
    max_size=3,
)
"""Of traces: the only maps that there are."""
integers = st.one_of(st.sampled_from([0, 1, -1, 2, 2**31 - 1, -(2**31)]), st.integers(-(2**63), 2**63 - 1))


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return texts
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=50)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.integers(-(2**31), 2**31 - 1)
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_SINT32:
            return integers.map(lambda n: max(-(2**31), min(n, 2**31 - 1)))
        case FieldDescriptor.TYPE_UINT32:
            return st.sampled_from([0, 1, 2, 2**32 - 1])
        case FieldDescriptor.TYPE_FIXED64 | FieldDescriptor.TYPE_UINT64:
            return st.sampled_from([0, 1, 2, 2**64 - 1])
        case _:
            return integers


def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Generates messages of a type: any field set or not, to anything."""

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if not draw(st.booleans()):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                getattr(message, field.name).update(draw(contexts))
                continue
            value = messages(field.message_type) if field.message_type is not None else scalar(field)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(value, max_size=3)))
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(value))
            else:
                setattr(message, field.name, draw(value))
        return message

    return build()


@pytest.fixture(scope="module", params=["plain", "traced"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    traces = None if request.param == "plain" else Provider(TracerProvider(), own=False)
    server = start("127.0.0.1:0", PATIENT, traces=traces)
    yield server
    server.stop(0.0)


@pytest.fixture(scope="module")
def channel(server: EmbeddedServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def outcome(responses: Callable[[], object]) -> tuple[grpc.StatusCode, common_pb2.Error]:
    """Makes a call; returns its status and the error beside it."""
    try:
        responses()
    except grpc.RpcError as error:
        metadata = dict(error.trailing_metadata())
        return error.code(), common_pb2.Error.FromString(metadata.get(ERROR_METADATA, b""))
    return grpc.StatusCode.OK, common_pb2.Error()


def check(responses: Callable[[], object]) -> None:
    """Checks that a call succeeds, or is refused with an error that is the client's own fault."""
    code, error = outcome(responses)
    if code is not grpc.StatusCode.OK:
        assert error.kind not in (common_pb2.ERROR_KIND_UNSPECIFIED, common_pb2.ERROR_KIND_INTERNAL), code
        assert error.message


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def join(channel: grpc.Channel) -> common_pb2.Caller:
    """Registers somebody new, which shows that the server still does its work."""
    caller = common_pb2.Caller(cluster=f"alive{next(numbers)}", task=common_pb2.Task(job="w"), incarnation=1)
    request = coordination_pb2.RegisterRequest(
        caller=caller, request_id="r", jobs=[common_pb2.Job(name="w", addresses=["h:1"])]
    )
    coordination_pb2_grpc.CoordinationServiceStub(channel).Register(request, timeout=DEADLINE)
    return caller


@settings(max_examples=150)
@given(data=st.data())
def test_any_message_is_answered(channel: grpc.Channel, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(UNARY), label="method")
    message = data.draw(messages(method.input_type), label="message")
    if isinstance(message, key_value_pb2.GetRequest):
        message.timeout_ms = min(message.timeout_ms, 0)
    elif isinstance(message, coordination_pb2.GetClusterStateRequest) and message.wait_ms >= -1:
        message.wait_ms = 0  # it would wait for another epoch
    if "caller" in method.input_type.fields_by_name and data.draw(st.booleans(), label="joined"):
        message.caller.CopyFrom(join(channel))
    check(lambda: channel.unary_unary(path_of(method))(message.SerializeToString(), timeout=DEADLINE))


@settings(max_examples=100)
@given(method=st.sampled_from(METHODS), data=st.binary(max_size=200))
def test_any_bytes_are_answered(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> None:
    responses = channel.stream_stream(path_of(method))(iter([data]), timeout=DEADLINE)
    check(lambda: next(responses, None))
    responses.cancel()


@settings(max_examples=50)
@given(sent=st.lists(messages(coordination_pb2.SessionRequest.DESCRIPTOR), max_size=5), attach=st.booleans())
def test_any_session_is_answered(channel: grpc.Channel, sent: list[Message], attach: bool) -> None:
    if attach:
        kind = coordination_pb2.Attach(caller=join(channel))
        sent = [coordination_pb2.SessionRequest(attach=kind), *sent]
    requests = iter([message.SerializeToString() for message in sent])
    check(lambda: list(channel.stream_stream(path_of(SESSION))(requests, timeout=DEADLINE)))


@pytest.mark.parametrize("path", ["", "/", "//", "/dmesh.v1.CoordinationService/", "/%2e%2e/x", "/x/y/z"])
def test_unknown_paths(channel: grpc.Channel, path: str) -> None:
    code, _ = outcome(lambda: channel.unary_unary(path)(b"", timeout=DEADLINE))
    assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1 << 20, grpc.StatusCode.INVALID_ARGUMENT), (2 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
def test_huge_strings(channel: grpc.Channel, size: int, expected: grpc.StatusCode) -> None:
    caller = common_pb2.Caller(cluster="x" * size, task=common_pb2.Task(job="w"), incarnation=1)
    request = coordination_pb2.RegisterRequest(caller=caller, request_id="r")
    stub = coordination_pb2_grpc.CoordinationServiceStub(channel)
    code, error = outcome(lambda: stub.Register(request, timeout=DEADLINE))
    assert code is expected
    assert len(error.message) < 2000
    join(channel)
