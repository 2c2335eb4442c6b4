"""Real servers and real clients, and what a collector gets of them."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from tests.e2e.clients import Process, free_ports, run_clients
from tests.faults.secured import serving
from tests.server.raw_client import RawClient
from tests.telemetry.collector import Collector, Got, collecting

from dmesh.security import tokens
from dmesh.telemetry.provider import FLUSH
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.coordination_pb2_grpc import CoordinationServiceStub
from dmesh.v1.progress_pb2 import ListClustersRequest

JOIN = """
import numpy as np, dmesh, sys, time
from dmesh import coordination
dmesh.initialize_accelerator_system("CPU")
rank = dmesh.client_id()
"""
LEAVE = """
dmesh.shutdown_accelerator_system()
print("left")
"""
OWN_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
mine = TracerProvider(resource=Resource({"service.name": "training"}))
mine.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(mine)
"""
SECRET = "the value is nobody's business"


@pytest.fixture
def collector():
    with collecting() as made:
        yield made
        assert not made.problems


def environment(collector: Collector, **more: str) -> dict[str, str]:
    return {
        "DMESH_OTEL": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "NO_PROXY": "127.0.0.1",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        **more,
    }


def ended(clients: dict[int, Process], code: int = 0) -> None:
    for client in clients.values():
        assert client.wait() == code, client.err


def in_sequence(collector: Collector, rank: int) -> list[Got]:
    """The all-reduces of a rank: those that wait long become spans before others that were over sooner."""
    found = collector.named("all_reduce", dmesh_rank=rank)
    return sorted(found, key=lambda one: one.attributes["dmesh.sequence"])


def test_one_trace_goes_from_the_program_through_the_client_to_the_server(collector: Collector) -> None:
    script = (
        OWN_PROVIDER
        + JOIN
        + f"""
with trace.get_tracer("program").start_as_current_span("step") as step:
    coordination.key_value_set(f"k/{{rank}}", {SECRET!r})
    try:
        coordination.key_value_increment(f"k/{{rank}}")
    except dmesh.errors.KeyTypeError as error:
        assert {SECRET!r} in str(error)
    dmesh.collectives.all_reduce(np.ones(4, "f4"))
    dmesh.collectives.all_reduce(np.ones(4, "f4"), async_op=True).result(30)
    if rank == 0:
        dmesh.collectives.send(np.ones(2), 1)
    else:
        dmesh.collectives.recv(np.ones(2), 0)
    coordination.barrier("stepped")
    coordination.members()
    with coordination.watch("k/") as watch:
        pass
assert trace.get_tracer_provider() is mine
"""
        + LEAVE
        + "mine.shutdown()"
    )
    token = tokens.generate()
    with serving("--otel", environ={**environment(collector), "DMESH_TOKEN": token}) as server:
        environ = environment(collector, DMESH_COORDINATOR=server.grpc, DMESH_TOKEN=token)
        with run_clients(2, script, environ=environ) as clients:
            ended(clients)
        collector.wait_for(lambda: len(collector.named("dmesh.v1.CoordinationService/Leave")) == 4)
    steps = {one.trace_id: one for one in collector.named("step")}
    assert len(steps) == 2
    host, port = server.grpc.rsplit(":", 1)
    for rank, step in ((0, None), (1, None)):
        [sent] = collector.named("dmesh.v1.KeyValueService/Set", dmesh_rank=rank)
        step = steps[sent.trace_id]
        mine = {one.name + one.kind: one for one in collector.spans if one.trace_id == step.trace_id}
        assert (sent.kind, sent.parent_id) == ("CLIENT", step.span_id)
        assert sent.attributes["server.address"] == host
        assert sent.attributes["server.port"] == int(port)
        assert sent.resource["service.name"] == "training"
        for name in (
            "dmesh.v1.KeyValueService/Set",
            "dmesh.v1.KeyValueService/Watch",
            "dmesh.v1.CoordinationService/GetClusterState",
            "barrier",
        ):
            there, here = mine[name + "SERVER"], mine[name + "CLIENT"]
            assert (there.parent_id, here.parent_id) == (here.span_id, step.span_id), name
            assert there.resource["service.name"] == "dmesh-server"
            assert there.attributes["dmesh.task"] == f"/job:worker/task:{rank}"
            assert not there.failed
            if name != "barrier":
                service, method = name.split("/")
                for one in (here, there):
                    told = {key: one.attributes.get(f"rpc.{key}") for key in ("system", "service", "method")}
                    assert told == {"system": "grpc", "service": service, "method": method}
                    assert one.attributes["rpc.grpc.status_code"] == 0
        reduced = [one for one in in_sequence(collector, rank) if one.trace_id == step.trace_id]
        [transfer] = collector.named("recv" if rank else "send")
        assert [one.attributes["dmesh.sequence"] for one in reduced] == [1, 2]
        for one in (*reduced, transfer):
            assert (one.kind, one.parent_id) == ("INTERNAL", step.span_id)
            assert step.span.start_time_unix_nano - 10_000_000 < one.span.start_time_unix_nano
            assert one.span.end_time_unix_nano < step.span.end_time_unix_nano + 10_000_000
        about = reduced[0].attributes
        assert about["dmesh.collective.call"] == "all_reduce(sum, float32, shape (4,))"
        assert {
            "dmesh.rank": rank, "dmesh.world_size": 2, "dmesh.group": "world", "dmesh.collective.bytes": 16,
            "dmesh.collective.dtype": "float32", "dmesh.collective.operation": "all_reduce",
        }.items() <= about.items()  # fmt: skip
        assert 0 <= about["dmesh.collective.wait_seconds"] <= reduced[0].seconds + 1e-6
    everything = b"".join(collector.bodies)
    assert SECRET.encode() not in everything
    assert token.encode() not in everything


def test_without_a_provider_of_its_own_a_program_has_spans_of_all_ranks(collector: Collector) -> None:
    script = JOIN + "for _ in range(50): dmesh.collectives.all_reduce(np.ones(1))\n" + LEAVE
    script += "from opentelemetry import trace\n"
    script += "assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)"
    with run_clients(3, script, environ=environment(collector, OTEL_SERVICE_NAME="digits")) as clients:
        ended(clients)
    for rank in range(3):
        found = in_sequence(collector, rank)
        assert [one.attributes["dmesh.sequence"] for one in found] == list(range(1, 51))
        assert {one.resource["service.name"] for one in found} == {"digits"}
    assert len({one.attributes["dmesh.lane"] for one in collector.named("all_reduce")}) == 1
    entered = collector.named("barrier", dmesh_barrier_name="dmesh/initialize")
    assert sorted(one.kind for one in entered) == ["CLIENT"] * 3 + ["SERVER"] * 3  # client 0 hosts the server


def test_errors_are_told_with_their_type(collector: Collector) -> None:
    script = (
        JOIN
        + """
def fails(do):
    try:
        do()
    except dmesh.errors.DMeshError as error:
        print(type(error).__name__)
coordination.key_value_set(f"k{rank}", "1")
fails(lambda: coordination.key_value_set(f"k{rank}", "2"))
fails(lambda: coordination.key_value_get("customer-4711", timeout=0.05))
if rank == 0:
    fails(lambda: coordination.barrier("alone", timeout=0.05))
coordination.barrier("together")
fails(lambda: dmesh.collectives.all_reduce(np.ones(1 + rank)))
"""
        + LEAVE
    )
    with run_clients(2, script, environ=environment(collector)) as clients:
        ended(clients)
        assert clients[0].out.split()[:4] == [
            "KeyExistsError", "KeyWaitTimeoutError", "BarrierTimeoutError", "CollectiveMismatchError",
        ]  # fmt: skip
    for rank in range(2):
        [failed] = [
            one for one in collector.named("dmesh.v1.KeyValueService/Set", dmesh_rank=rank) if one.failed
        ]
        assert failed.attributes["rpc.grpc.status_code"] == 6
        [(name, event)] = failed.events()
        assert (name, event) == ("exception", {"exception.type": "dmesh.errors.KeyExistsError"})
        [late] = collector.named("dmesh.v1.KeyValueService/Get", dmesh_rank=rank)
        assert (late.failed, late.attributes["rpc.grpc.status_code"]) == (True, 4)
        [wrong] = collector.named("all_reduce", dmesh_rank=rank)
        [(name, event)] = wrong.events()
        assert event["exception.type"] == "dmesh.errors.CollectiveMismatchError"
        assert "rank 0 called all_reduce" in event["exception.message"]
        assert (wrong.failed, wrong.attributes["error.type"]) == (True, "CollectiveMismatchError")
    alone = collector.named("barrier", dmesh_barrier_name="alone")
    assert {one.kind for one in alone} == {"CLIENT", "SERVER"}
    assert all(one.failed for one in alone)
    [told] = [event for one in alone for _, event in one.events()]
    assert "barrier 'alone'" in told["exception.message"]
    assert {one.attributes["error.type"] for one in alone} == {"BarrierTimeoutError", "DEADLINE_EXCEEDED"}
    assert b"customer-4711" not in b"".join(collector.bodies)


def test_a_key_that_a_call_of_grpc_waited_for_in_vain_is_in_no_span(
    collector: Collector, tmp_path: Path
) -> None:
    script = (
        JOIN
        + """
import grpc, os
from dmesh.v1 import common_pb2, key_value_pb2, key_value_pb2_grpc
caller = common_pb2.Caller(cluster=os.environ["DMESH_CLUSTER"])
with grpc.insecure_channel(os.environ["DTENSOR_JOBS"]) as channel:
    try:
        key_value_pb2_grpc.KeyValueServiceStub(channel).Get(
            key_value_pb2.GetRequest(caller=caller, key="customer-4711", timeout_ms=50), timeout=20
        )
    except grpc.RpcError as error:
        print(error.details())
"""
        + LEAVE
    )
    # Where other tests have left no token: a server that finds one asks for it, and the stub has none.
    alone = environment(collector, DMESH_CLUSTER="one", XDG_CONFIG_HOME=str(tmp_path))
    with run_clients(1, script, environ=alone) as clients:
        ended(clients)
        assert "key 'customer-4711' did not appear" in clients[0].out
    [late] = collector.named("dmesh.v1.KeyValueService/Get")
    assert (late.failed, late.span.status.message) == (True, "DEADLINE_EXCEEDED")
    assert b"customer-4711" not in b"".join(collector.bodies)


def test_what_the_variables_say_of_the_resource_comes_first(collector: Collector) -> None:
    said = "host.name=node-7,upstream.service.name=other"
    script = JOIN + "coordination.barrier('b')\n" + LEAVE
    with run_clients(1, script, environ=environment(collector, OTEL_RESOURCE_ATTRIBUTES=said)) as clients:
        ended(clients)
    [about] = {one.span_id: one.resource for one in collector.named("barrier", dmesh_barrier_name="b")
               if one.kind == "CLIENT"}.values()  # fmt: skip
    assert {"host.name": "node-7", "upstream.service.name": "other", "service.name": "dmesh"}.items() <= (
        about.items()
    )
    assert about["process.pid"] > 0


def test_an_initialization_that_fails_leaves_no_thread_behind(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = """
import threading, dmesh
try:
    dmesh.initialize_accelerator_system("CPU")
except dmesh.errors.ConfigurationError as error:
    assert "DMESH_TRACE" in str(error), error
    print([thread.name for thread in threading.enumerate() if "otel" in thread.name.lower()])
"""
    environ = environment(collector, DMESH_TRACE=str(tmp_path / "file" / "traces"))
    with run_clients(1, script, environ=environ) as clients:
        ended(clients)
        assert clients[0].out.strip() == "[]"


def test_a_program_that_crashes_has_its_spans(collector: Collector) -> None:
    script = JOIN + "dmesh.collectives.all_reduce(np.ones(1))\n"
    script += "coordination.barrier('reduced')\nraise RuntimeError('of the program')"
    with run_clients(2, script, environ=environment(collector, OTEL_BSP_SCHEDULE_DELAY="60000")) as clients:
        assert clients[0].wait() == 1, clients[0].err
        # Client 0 hosts the server: client 1 may hear of its end within the barrier, and ends of that.
        assert clients[1].wait() in (1, 75), clients[1].err
    assert len(collector.named("all_reduce")) == 2
    assert {one.kind for one in collector.named("dmesh.v1.CoordinationService/Leave")} >= {"CLIENT"}


def test_a_forked_child_neither_repeats_nor_takes_spans(collector: Collector) -> None:
    script = (
        JOIN
        + """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
dmesh.collectives.all_reduce(np.ones(1))
if not (child := os.fork()):
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
dmesh.collectives.all_reduce(np.ones(1))
"""
        + LEAVE
    )
    with run_clients(2, script, environ=environment(collector, OTEL_BSP_SCHEDULE_DELAY="60000")) as clients:
        ended(clients)
    ids = [one.span_id for one in collector.spans]
    assert len(ids) == len(set(ids))
    assert len(collector.named("all_reduce")) == 4


# Switched off, or not there ---------------------------------------------------------------------------------


def test_nothing_is_imported_unless_it_is_switched_on(collector: Collector) -> None:
    check = "assert not [name for name in sys.modules if name.split('.')[0] == 'opentelemetry']\n"
    script = JOIN + "dmesh.collectives.all_reduce(np.ones(1))\ncoordination.barrier('b')\n" + LEAVE + check
    environ = environment(collector)
    del environ["DMESH_OTEL"]
    with run_clients(2, script, environ=environ, fresh=True) as clients:
        ended(clients)
    server = Process(
        [sys.executable, "-X", "importtime", "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http",
         "--insecure"], environ,
    )  # fmt: skip
    try:
        server.wait_for("dmesh-server ready")
        assert "dmesh_server.runtime" in server.err
        assert "opentelemetry" not in server.err
    finally:
        server.end()
    assert not collector.spans


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_SAMPLER": "always_off"}],
    ids=str,
)
def test_the_standard_variables_switch_it_off(collector: Collector, variables: dict[str, str]) -> None:
    script = JOIN + "dmesh.collectives.all_reduce(np.ones(1))\ncoordination.barrier('b')\n" + LEAVE
    with run_clients(2, script, environ=environment(collector, **variables)) as clients:
        ended(clients)
    assert not collector.spans


def test_propagators_are_the_users_to_choose(collector: Collector) -> None:
    script = JOIN + "coordination.key_value_set(f'k{rank}', '1')\n" + LEAVE
    with run_clients(1, script, environ=environment(collector, OTEL_PROPAGATORS="none")) as clients:
        ended(clients)
    assert len({one.trace_id for one in collector.named("dmesh.v1.KeyValueService/Set")}) == 2


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger9"}, "ConfigurationError: OTEL_TRACES_EXPORTER asks for 'jaeger9'"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
            "ConfigurationError: OTEL_EXPORTER_OTLP_PROTOCOL is 'smoke'",
        ),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "ConfigurationError: DMESH_OTEL is on, but OpenTelemetry cannot"),
        (
            {"OTEL_PROPAGATORS": "tracecontxt"},
            "but OpenTelemetry cannot be set up: Propagator tracecontxt not found",
        ),
        ({"DMESH_OTEL": "perhaps"}, "ConfigurationError: DMESH_OTEL is 'perhaps'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_start(
    collector: Collector, variables: dict[str, str], said: str
) -> None:
    with run_clients(1, JOIN, environ=environment(collector, **variables)) as clients:
        ended(clients, 1)
        assert said in clients[0].err


def test_a_missing_extra_is_named(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ModuleNotFoundError('not installed')")
    environ = environment(collector, PYTHONPATH=str(tmp_path))
    with run_clients(1, JOIN, environ=environ) as clients:
        ended(clients, 1)
        assert "MissingExtraError: DMESH_OTEL asks for OpenTelemetry" in clients[0].err
        assert "pip install 'dmesh[otel]'" in clients[0].err
    server = Process([sys.executable, "-m", "dmesh", "serve", "--otel", "--insecure"], environ)
    try:
        assert server.wait() == 2
        assert "pip install 'dmesh[otel]'" in server.err
    finally:
        server.end()


# Collectors and callers that are not as they should be ------------------------------------------------------


@pytest.mark.parametrize("state", ["gone", "silent"])
def test_a_collector_that_does_not_answer_costs_a_job_little(collector: Collector, state: str) -> None:
    script = (
        JOIN
        + """
began = time.monotonic()
for _ in range(3000):
    dmesh.collectives.all_reduce(np.ones(1))
    if _ % 500 == 0:
        coordination.key_value_set(f"{rank}/{_}", "1")
print("took", time.monotonic() - began)
began = time.monotonic()
"""
        + LEAVE
        + "print('ended', time.monotonic() - began)"
    )
    if state == "gone":
        collector.endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    else:
        collector.hold = threading.Event()
    with run_clients(2, script, environ=environment(collector)) as clients:
        ended(clients)
        for client in clients.values():
            said = dict(line.split() for line in client.out.splitlines() if " " in line)
            assert float(said["took"]) < 15
            assert float(said["ended"]) < FLUSH + 5
            assert "the last spans are lost" in client.err
    assert state == "gone" or not collector.spans
    collector.problems.clear()  # of answers to those who had gone


async def test_a_server_ends_in_time_although_its_collector_is_silent(collector: Collector) -> None:
    collector.hold = threading.Event()
    with serving("--otel", "--insecure", environ=environment(collector)) as server:
        client = RawClient(server.grpc)
        await client.join()
        await client.channel.close()
        began = time.monotonic()
        server.process.signal(15)
        assert server.process.wait() == 0
        assert time.monotonic() - began < FLUSH + 5
        assert "the last spans are lost" in server.log
    collector.problems.clear()


async def test_callers_that_say_nonsense_are_answered_all_the_same(collector: Collector) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    said = [
        (("traceparent", "nonsense"),),
        (("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),),
        (("traceparent", parent), ("tracestate", "x" * 6000)),
        (("traceparent", parent + "-" + "f" * 5000),),
        (("traceparent", parent), ("tracestate", "=,=;;==, ,")),
    ]
    with serving("--otel", "--insecure", environ=environment(collector)) as server:
        client = RawClient(server.grpc)
        await client.join()
        request = {"caller": client.caller}
        for metadata in (*said, (("traceparent", parent),)):
            response = await client.coordination.GetClusterState(
                pb.GetClusterStateRequest(**request), metadata=metadata
            )
            assert response.members
        with pytest.raises(grpc.aio.AioRpcError):
            await client.coordination.CancelBarrier(
                pb.CancelBarrierRequest(**request, request_id="r", name="none", instance=-1),
                metadata=(("traceparent", parent),),
            )
        await client.channel.close()
        name = "dmesh.v1.CoordinationService/GetClusterState"
        cancelled = "dmesh.v1.CoordinationService/CancelBarrier"
        collector.wait_for(lambda: len(collector.named(name)) == 6 and bool(collector.named(cancelled)))
    spans = collector.named(name)
    assert [one.parent_id for one in spans[:4]] == ["", "", "", ""]
    assert (spans[5].trace_id, spans[5].parent_id) == ("a" * 32, "b" * 16)
    assert {one.attributes["client.address"] for one in spans} == {"127.0.0.1"}
    [refused] = collector.named(cancelled)
    assert refused.attributes["rpc.grpc.status_code"] not in (0, 2)
    assert not refused.failed  # the server has answered


def test_strangers_make_no_spans(collector: Collector) -> None:
    token = tokens.generate()
    with serving("--otel", environ={**environment(collector), "DMESH_TOKEN": token}) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = CoordinationServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                stub.ListClusters(ListClustersRequest(), timeout=30)
            stub.ListClusters(
                ListClustersRequest(),
                metadata=(("authorization", f"Bearer {token}"),),
                timeout=30,
            )
        collector.wait_for(lambda: bool(collector.spans))
        server.process.signal(15)
        assert server.process.wait() == 0
    assert [one.name for one in collector.spans] == ["dmesh.v1.CoordinationService/ListClusters"]
    assert token.encode() not in b"".join(collector.bodies)


def test_a_collector_may_speak_grpc(collector: Collector) -> None:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            headers = {"content-type": "application/x-protobuf", "content-encoding": ""}
            collector.take("/v1/traces", headers, request.SerializeToString())
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        environ = environment(
            collector,
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        )
        with run_clients(
            2, JOIN + "dmesh.collectives.all_reduce(np.ones(1))\n" + LEAVE, environ=environ
        ) as clients:
            ended(clients)
        assert {one.attributes["dmesh.rank"] for one in collector.named("all_reduce")} == {0, 1}
    finally:
        server.stop(0).wait()
