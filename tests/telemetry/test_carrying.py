"""What travels with calls to say where they belong: nothing of it can break a call, on either side."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import TracerProvider

from dmesh.telemetry.carrying import MOST_BYTES, incoming, outgoing
from dmesh.telemetry.provider import Provider

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
WANTED = ("traceparent", "tracestate", "baggage")

names = st.one_of(
    st.sampled_from([*WANTED, "Traceparent", "authorization", "grpc-x", "x-bin"]), st.text(max_size=40)
)
values = st.one_of(st.just(PARENT), st.text(max_size=60), st.integers(0, 9000).map("x".__mul__))


@given(st.dictionaries(names, values, max_size=8))
@example({"baggage": "x" * 5000, "traceparent": PARENT})
def test_whatever_goes_out_is_metadata_that_grpc_takes(fields: dict[str, str]) -> None:
    found = outgoing(fields)
    assert sum(len(name) + len(value) for name, value in found) <= MOST_BYTES
    assert len(dict(found)) == len(found)
    for name, value in found:
        assert name == name.lower()
        assert name != "authorization"
        assert not name.startswith("grpc-")
        assert not name.endswith("-bin")
        assert value.isascii()
        assert value.isprintable()
    assert incoming(found, [name for name, _ in found]) == dict(found)
    if fields.get("traceparent") == PARENT and "Traceparent" not in fields:
        assert dict(found)["traceparent"] == PARENT


@given(st.lists(st.tuples(names, st.one_of(values, st.binary(max_size=20))), max_size=8))
def test_whatever_comes_in_is_a_context_or_none(fields: list[tuple[str, str | bytes]]) -> None:
    found = incoming(fields, WANTED)
    assert found.keys() <= set(WANTED)
    assert sum(len(name) + len(value) for name, value in found.items()) <= MOST_BYTES
    context = Provider(TracerProvider(), own=False).parent(fields)
    assert isinstance(context, Context)
    known = [value for name, value in fields if name == "traceparent" and isinstance(value, str)]
    if not any(value.startswith("00-") for value in known):
        assert not trace.get_current_span(context).get_span_context().is_valid


@pytest.mark.parametrize(
    "value",
    [
        "", "00", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01", f"{PARENT}-{'x' * 5000}", f"{PARENT.upper()}\n", f"00-ä{PARENT}",
    ],
)  # fmt: skip
def test_a_parent_that_is_none_is_ignored(value: str) -> None:
    provider = Provider(TracerProvider(), own=False)
    span = trace.get_current_span(provider.parent({"traceparent": value}))
    assert not span.get_span_context().is_valid


def test_a_span_is_found_again_where_it_was_carried_to() -> None:
    provider = Provider(TracerProvider(), own=False)
    span = provider.tracer("t").start_span("one")
    carried = provider.carried(span)
    assert [name for name, _ in carried] == ["traceparent"]
    there = trace.get_current_span(provider.parent(carried)).get_span_context()
    assert (there.trace_id, there.span_id) == (
        span.get_span_context().trace_id,
        span.get_span_context().span_id,
    )
    assert there.is_remote


def test_of_two_parents_the_first_counts() -> None:
    """Another library may add its own behind ours."""
    provider = Provider(TracerProvider(), own=False)
    other = PARENT.replace("a", "c")
    span = trace.get_current_span(provider.parent([("traceparent", PARENT), ("traceparent", other)]))
    assert f"{span.get_span_context().trace_id:032x}" == "a" * 32


def test_every_kind_of_error_has_the_status_that_the_server_gives_it() -> None:
    from dmesh.coordination.faults import Fault
    from dmesh.v1 import common_pb2
    from dmesh_server.core.errors import ErrorKind
    from dmesh_server.rpc.errors import STATUS_CODES

    for kind in ErrorKind:
        number = common_pb2.ErrorKind.Value(f"ERROR_KIND_{kind.name}")
        assert Fault(number, "m").status is STATUS_CODES[kind], kind
    assert Fault(0, "m", code=grpc.StatusCode.UNAVAILABLE).status is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("name", "goes"), [("te", False), ("tenant", True), ("user-agent", False)])
def test_names_that_mean_something_else_stay_behind(name: str, goes: bool) -> None:
    assert bool(outgoing({name: "x"})) is goes


def test_a_propagator_that_fails_costs_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(TextMapPropagator):
        @property
        def fields(self) -> set[str]:
            return {"x-mine"}

        def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
            carrier["traceparent"] = PARENT
            raise KeyError("mine")

        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Context:
            raise KeyError("mine")

    monkeypatch.setattr(propagate, "get_global_textmap", Failing)
    provider = Provider(TracerProvider(), own=False)
    for _ in range(2):
        assert provider.carried(provider.tracer("t").start_span("one")) == (("traceparent", PARENT),)
        assert provider.parent({"x-mine": "1"}) == Context()
    [told] = [record.getMessage() for record in caplog.records]
    assert "propagator failed" in told
