"""Functions that one client hands out to the others: results, errors, and workers that are lost."""

import functools
import json
import queue
import signal
import threading
from typing import ClassVar

import numpy as np
import pytest
from tests.e2e.clients import free_ports, run_clients, run_server
from tests.waiting import eventually

import dmesh
from dmesh.collectives.object_encoding import encode
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.calls import Announcer
from dmesh.distribute.coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
    run_worker,
    worker,
)
from dmesh.distribute.coordinator.channel import Channel
from dmesh.distribute.coordinator.messages import Encoding
from dmesh.distribute.experimental import coordinator as former
from dmesh.errors import (
    CollectiveTypeError,
    FunctionCancelledError,
    LimitExceededError,
    OutOfRangeError,
    PeerLostError,
    RemoteFunctionError,
    StrategyError,
    StrategyTypeError,
    StrategyValueError,
    WaitTimeoutError,
)
from dmesh.testing import FakeCluster

GATES = [threading.Event(), threading.Event()]
STARTED = threading.Semaphore(0)


def square(number, *, plus=0):
    return number * number + plus


def who():
    return dmesh.client_id(), experimental_get_current_worker_index()


def wait_at_the_gate(number=0):
    STARTED.release()
    assert GATES[number].wait(60)
    return "through"


def fail(kind, message):
    raise {"value": ValueError, "key": KeyError, "own": Unknown, "stop": StopIteration, "unicode": _unicode}[
        kind
    ](message)


def _unicode(message):
    return UnicodeDecodeError("utf-8", b"x", 0, 1, message)


class Unknown(Exception):
    pass


def counted():
    index = experimental_get_current_worker_index()
    return iter([index * 10, index * 10 + 1])


def take(iterator, scale=1):
    return next(iterator) * scale


def large(size):
    return b"x" * size


@pytest.fixture(autouse=True)
def _closed_gate():
    while STARTED.acquire(blocking=False):
        pass  # a function of an earlier test that ran once more than was waited for
    for gate in GATES:
        gate.clear()
    yield
    for gate in GATES:
        gate.set()


def on_clients(size, program, **options):
    """Runs a program as the coordinator, client 0, and workers as the others; returns what it returned."""

    def client():
        if dmesh.client_id() > 0:
            return run_worker(modules=[__name__], **options)
        with ClusterCoordinator(**options) as coordinator:
            return program(coordinator)

    with FakeCluster(size, timeout=30.0) as cluster:
        return cluster.run(client)[0]


def test_results_of_functions():
    def program(coordinator):
        values = [coordinator.schedule(square, args=(n,), kwargs={"plus": 1}) for n in range(20)]
        array = coordinator.schedule(square, (np.arange(3),))
        coordinator.join()
        assert coordinator.done()
        assert coordinator.fetch({"a": values[2:4], "b": 7}) == {"a": [5, 10], "b": 7}
        assert array.get().tolist() == [0, 1, 4]
        assert repr(array) == "<RemoteValue of square: ready>"
        assert coordinator.workers == (1, 2)
        return coordinator.fetch(values)

    assert on_clients(3, program) == [n * n + 1 for n in range(20)]


def test_all_workers_are_used_and_know_their_index():
    def program(coordinator):
        held = [coordinator.schedule(wait_at_the_gate) for _ in range(3)]
        for _ in range(3):
            assert STARTED.acquire(timeout=60), "one on each worker"
        waiting = [coordinator.schedule(who) for _ in range(9)]
        assert not coordinator.done()
        with pytest.raises(WaitTimeoutError, match="wait_at_the_gate has not ended within"):
            held[0].fetch(timeout=0.01)
        with pytest.raises(StrategyError, match=r"client \d runs wait_at_the_gate.*; 9 more functions"):
            coordinator.join(timeout=0.01)
        GATES[0].set()
        assert coordinator.fetch(held) == ["through"] * 3
        return set(coordinator.fetch(waiting))

    found = on_clients(4, program)
    assert found <= {(1, 0), (2, 1), (3, 2)}
    assert found


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        ("value", ValueError),
        ("key", KeyError),
        ("own", RuntimeError),
        ("stop", OutOfRangeError),
        ("unicode", RuntimeError),
    ],
)
def test_an_error_is_raised_by_the_next_call_and_cancels_what_waits(kind, builtin):
    def program(coordinator):
        failing = coordinator.schedule(fail, (kind, "the learning rate is negative"))
        with pytest.raises(
            builtin, match=r"fail failed on client 1: .*the learning rate is negative"
        ) as caught:
            failing.fetch()
        held = coordinator.schedule  # the error is raised by the next call, whichever it is
        with pytest.raises(RemoteFunctionError) as again:
            held(square, (2,))
        assert again.value is caught.value
        assert (caught.value.client, "in fail" in caught.value.traceback) == (1, True)
        assert coordinator.fetch(coordinator.schedule(square, (3,))) == 9, "and once only"
        coordinator.join()

    on_clients(2, program)


def test_what_waits_behind_an_error_is_cancelled_and_what_runs_ends_first():
    def program(coordinator):
        held = [coordinator.schedule(wait_at_the_gate) for _ in range(2)]
        for _ in range(2):
            assert STARTED.acquire(timeout=60)
        failing = coordinator.schedule(fail, ("value", "no"))
        waiting = [coordinator.schedule(wait_at_the_gate) for _ in range(4)]
        GATES[0].set()
        with pytest.raises(ValueError, match="no"):
            coordinator.join()
        assert coordinator.fetch(held) == ["through"] * 2
        with pytest.raises(ValueError, match="no"):
            failing.fetch()
        outcomes = []
        for value in waiting:
            try:
                outcomes.append(value.fetch(timeout=60))
            except FunctionCancelledError as error:
                outcomes.append(str(error).split(":")[0])
        assert set(outcomes) <= {"through", "wait_at_the_gate was not run, because another function failed"}
        coordinator.join()

    on_clients(3, program)


def test_datasets_of_workers():
    def program(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(counted))
        with pytest.raises(StrategyError, match="is on the workers"):
            next(iterator)
        assert coordinator.fetch(coordinator.schedule(take, (iterator,))) == 0
        assert coordinator.fetch(coordinator.schedule(take, kwargs={"iterator": iterator, "scale": 5})) == 5
        with pytest.raises(OutOfRangeError):
            coordinator.fetch(coordinator.schedule(take, (iterator,)))
        with pytest.raises(IndexError):
            coordinator.join()
        again = iter(coordinator.create_per_worker_dataset(counted))
        return coordinator.fetch(coordinator.schedule(take, (again,)))

    assert on_clients(2, program) == 0


def test_a_worker_runs_only_what_it_may():
    def program(coordinator):
        with pytest.raises(ValueError, match="does not run functions of the module 'json'"):
            coordinator.fetch(coordinator.schedule(json.dumps))
        with pytest.raises(RemoteFunctionError):
            coordinator.join()
        for fn in (lambda: 1, functools.partial(square, 2), [].append, "square"):
            with pytest.raises(StrategyTypeError, match="cannot be sent to a worker by name"):
                coordinator.schedule(fn)
        with pytest.raises(CollectiveTypeError, match="cannot be sent"):
            coordinator.schedule(square, (object(),))
        with pytest.raises(StrategyTypeError, match="arguments as a tuple"):
            coordinator.schedule(square, 3)
        result = coordinator.schedule(square, (2,))
        for wrong in ((result,), ([1, {"a": result}],)):
            with pytest.raises(StrategyValueError, match=r"RemoteValue of square: .*no argument: fetch"):
                coordinator.schedule(square, wrong)
        with pytest.raises(ValueError, match="is no argument"):
            coordinator.schedule(square, (1,), {"plus": result})
        assert coordinator.schedule(square, (result.fetch(),)).fetch() == 16

    on_clients(2, program)


@pytest.mark.parametrize("name", ["json.dumps", "json.decoder", "Names.known", "nothing", "square.__call__"])
def test_what_a_module_has_only_imported_is_none_of_its_functions(name):
    with pytest.raises(StrategyValueError, match=r"is no function of that module|has no function"):
        Encoding(modules=[__name__]).decode_call(encode([f"{__name__}:{name}", (), {}]))


def test_what_is_too_large_is_an_error_of_that_function():
    def program(coordinator):
        for fn, argument in ((large, 2 << 20), (len, b"x" * (2 << 20))):
            with pytest.raises(LimitExceededError):
                coordinator.fetch(coordinator.schedule(fn, (argument,)))
            with pytest.raises(LimitExceededError):
                coordinator.join()
        return coordinator.fetch(coordinator.schedule(square, (2,)))

    assert on_clients(2, program) == 4


class Names:
    """The program's own serializer: of functions that it knows, and JSON."""

    known: ClassVar = {"double": lambda number: 2 * number}

    @classmethod
    def dumps(cls, value):
        if isinstance(value, tuple):
            fn, args, kwargs = value
            value = [next(name for name, known in cls.known.items() if known is fn), args, kwargs]
        return json.dumps(value)

    @classmethod
    def loads(cls, data):
        value = json.loads(data)
        if isinstance(value, list):
            value[0] = cls.known[value[0]]
        return value


def test_the_programs_own_serializer():
    def program(coordinator):
        return coordinator.fetch(coordinator.schedule(Names.known["double"], (21,)))

    assert on_clients(2, program, serializer=Names) == 42


def test_there_is_one_coordinator_and_it_ends():
    def client():
        if dmesh.client_id() > 0:
            for _ in range(2):
                run_worker(modules=[__name__])
            return
        for number in range(2):
            coordinator = ClusterCoordinator()
            with pytest.raises(
                StrategyValueError, match="client 0 is the coordinator of this cluster already"
            ):
                ClusterCoordinator()
            held = coordinator.schedule(wait_at_the_gate, (number,))
            assert STARTED.acquire(timeout=60)
            waiting = coordinator.schedule(square, (2,))
            coordinator.close()
            coordinator.close()
            GATES[number].set()
            for value in (held, waiting):
                with pytest.raises(FunctionCancelledError, match="closed"):
                    value.fetch()
            with pytest.raises(StrategyError, match="is closed"):
                coordinator.schedule(square, (1,))

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(client)


def test_a_worker_that_comes_too_late_does_not_wait():
    closed = threading.Event()

    def client():
        if dmesh.client_id() == 0:
            with ClusterCoordinator() as coordinator:
                assert coordinator.schedule(square, (2,)).fetch() == 4
            closed.set()
        elif dmesh.client_id() == 1:
            run_worker(modules=[__name__])
        else:
            assert closed.wait(60)
            run_worker(modules=[__name__])
        dmesh.collectives.barrier()
        if dmesh.client_id() == 0:
            with ClusterCoordinator() as coordinator:
                assert coordinator.schedule(square, (3,)).fetch() == 9
        else:
            run_worker(modules=[__name__])

    with FakeCluster(3, timeout=30.0) as cluster:
        cluster.run(client)


def test_a_coordinator_that_ends_before_it_greets_a_worker_has_ended_for_that_one(monkeypatch):
    serve, send = worker._serve, Channel.send
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def serve_and_say(*arguments):
        said.put("waits for functions")
        serve(*arguments)

    def greet_nobody(self, to, name, value):
        if name != "host" or self._number > 1:
            send(self, to, name, value)

    monkeypatch.setattr(worker, "_serve", serve_and_say)
    monkeypatch.setattr(Channel, "send", greet_nobody)

    def client():
        if dmesh.client_id() > 0:
            for _ in range(2):
                run_worker(modules=[__name__])
                said.put("has ended")
            return
        with ClusterCoordinator() as coordinator:
            eventually(lambda: coordinator.workers == (1,))
        heard = [said.get(timeout=60) for _ in range(3)]
        assert heard == ["waits for functions", "has ended", "waits for functions"]
        with ClusterCoordinator() as coordinator:
            assert coordinator.schedule(square, (2,)).fetch() == 4

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(client)


def test_workers_hear_of_a_lost_coordinator_that_did_not_greet_them(monkeypatch):
    monkeypatch.setattr(Channel, "send", lambda *arguments: None)
    monkeypatch.setattr(Announcer, "left", 0.05)

    def client():
        if dmesh.client_id() > 0:
            return run_worker(modules=[__name__])
        coordinator = ClusterCoordinator()
        eventually(lambda: coordinator.workers == (1, 2))
        raise Unknown("the coordinator dies")

    with FakeCluster(3, timeout=30.0) as cluster:
        died, *lost = cluster.run(client, check=False)
    assert isinstance(died, Unknown)
    for error in lost:
        assert isinstance(error, PeerLostError)
        assert "lost the coordinator, client 0" in str(error)


@pytest.mark.parametrize(("place", "message"), [("x/y/ready", b"1"), ("1/y/result", encode([1]))])
def test_a_message_of_no_worker_is_an_error_and_no_wait_for_ever(place, message):
    def client():
        if dmesh.client_id() == 0:
            coordinator = ClusterCoordinator()
            waiting = coordinator.schedule(square, (2,))
            current_agent().key_value_set(f"dmesh/coordinator/from/{place}", message)
            with pytest.raises(StrategyError, match="from no worker"):
                waiting.fetch(30.0)
        dmesh.collectives.barrier()

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(client)


def test_without_workers_there_is_an_error():
    with FakeCluster(1) as cluster:

        def program():
            with ClusterCoordinator() as coordinator:
                value = coordinator.schedule(square, (2,))
                for call in (coordinator.join, value.fetch, coordinator.done):
                    with pytest.raises(PeerLostError, match="no client is left to run functions"):
                        call()

        cluster.run(program)


def test_former_names():
    assert former.ClusterCoordinator is ClusterCoordinator
    with pytest.raises(RuntimeError, match="there is no current worker"):
        experimental_get_current_worker_index()


PROGRAM = """
import os, signal, sys, time
import dmesh
from dmesh.distribute import coordinator

def where(number):
    open(f"{place}/{{number}}.{{os.getpid()}}", "w").close()
    if number == 3 and not os.path.exists("{place}/killed"):
        print("runs", number, flush=True)
        signal.pause()
    return number, os.getpid()

if __name__ == "__main__":
    dmesh.initialize_accelerator_system()
    if dmesh.client_id() == 0:
        with coordinator.ClusterCoordinator() as dispatcher:
            values = [dispatcher.schedule(where, args=(n,)) for n in range(12)]
            dispatcher.join()
            print("numbers", [number for number, _ in dispatcher.fetch(values)], flush=True)
            print("workers", dispatcher.workers, flush=True)
            if "{mode}" == "lost":
                print("waits", flush=True)
                signal.pause()
    else:
        try:
            coordinator.run_worker()
        except dmesh.errors.PeerLostError as error:
            print("lost", error, flush=True)
            os._exit(3)
        print("worker ends", flush=True)
    if "{mode}" != "killed":
        dmesh.shutdown_accelerator_system()
"""


def test_what_a_killed_worker_ran_runs_on_another_one(tmp_path):
    with (
        run_server() as (_, address),
        run_clients(
            3, PROGRAM.format(place=tmp_path, mode="killed"), environ={"DMESH_COORDINATOR": address}
        ) as clients,
    ):
        victim = _runs_the_third(clients)
        (tmp_path / "killed").touch()
        clients[victim].signal(signal.SIGKILL)
        assert clients[0].wait_for("numbers").endswith(str(list(range(12))))
        assert clients[0].wait_for("workers").endswith(f"({3 - victim},)")
        clients[3 - victim].wait_for("worker ends")
        assert clients[0].wait() == clients[3 - victim].wait() == 0, clients[0].err
    assert len(list(tmp_path.glob("3.*"))) == 2, "it was begun twice"
    assert all(len(list(tmp_path.glob(f"{n}.*"))) == 1 for n in range(12) if n != 3)


def _runs_the_third(clients):
    return eventually(lambda: next((rank for rank in (1, 2) if "runs 3" in clients[rank].out), None))


def test_workers_are_told_that_the_coordinator_was_killed(tmp_path):
    (tmp_path / "killed").touch()
    with (
        run_server() as (_, address),
        run_clients(
            3, PROGRAM.format(place=tmp_path, mode="lost"), environ={"DMESH_COORDINATOR": address}
        ) as clients,
    ):
        clients[0].wait_for("waits")
        clients[0].signal(signal.SIGKILL)
        for rank in (1, 2):
            assert "lost the coordinator, client 0" in clients[rank].wait_for("lost")
            assert clients[rank].wait() == 3


REJOINING = """
import os, signal, dmesh
from dmesh.distribute import coordinator

def work(number):
    print("works on", number, os.getpid(), flush=True)
    if number == 3 and not os.path.exists("{place}/go"):
        signal.pause()
    return number

if __name__ == "__main__":
    dmesh.initialize_accelerator_system()
    if dmesh.client_id() == 0:
        dispatcher = coordinator.ClusterCoordinator()
        print("numbers", dispatcher.fetch([dispatcher.schedule(work, (n,)) for n in range(6)]), flush=True)
        signal.pause()
    coordinator.run_worker()
"""


def test_lost_workers_and_coordinators_are_replaced(tmp_path):
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_RESTART_POLICY": "rejoin"}
        script, ports = REJOINING.format(place=tmp_path), free_ports(2)
        with run_clients(2, script, environ=environ, ports=ports) as clients:
            clients[1].wait_for("works on 3")
            clients[1].signal(signal.SIGKILL)
            clients[1].wait()
            (tmp_path / "go").touch()
            with run_clients(2, script, environ=environ, ports=ports, only=(1,)) as second:
                assert clients[0].wait_for("numbers").endswith("[0, 1, 2, 3, 4, 5]")
                second[1].wait_for("works on 5")
                clients[0].signal(signal.SIGKILL)
                clients[0].wait()
                with run_clients(2, script, environ=environ, ports=ports, only=(0,)) as third:
                    assert third[0].wait_for("numbers").endswith("[0, 1, 2, 3, 4, 5]")
                    eventually(lambda: second[1].out.count("works on 5") == 2, "that the worker goes on")
