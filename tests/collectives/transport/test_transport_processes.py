"""Real processes, killed with kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.collectives.transport.harness import CLUSTER, LIMIT, SECRET, Recorder, authority, tcp_listener
from tests.collectives.transport.peer_process import SIZE

import dmesh
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.security.certificates import IdentityFiles

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def encrypted(request: pytest.FixtureRequest) -> bool:
    return request.param


@contextmanager
def processes(
    count: int, encrypted: bool
) -> Iterator[tuple[TcpTransport, Recorder, list[subprocess.Popen[str]]]]:
    """This process is rank 0; ranks 1 to `count` are processes of their own, and all are connected."""
    paths = [str(ROOT), str(Path(dmesh.__file__).resolve().parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    listener = tcp_listener()
    children = []
    files = [
        (*authority().issue(f"rank-{rank}"), authority().path) if encrypted else ()
        for rank in range(count + 1)
    ]
    tls = PeerTls(IdentityFiles(*files[0][:2]), files[0][2]) if encrypted else None
    transport = TcpTransport(0, listener, lambda: SECRET, CLUSTER, tls=tls)
    try:
        for rank in range(1, count + 1):
            module = "tests.collectives.transport.peer_process"
            command = [sys.executable, "-m", module, str(rank), *map(str, files[rank])]
            pipe = subprocess.PIPE
            children.append(
                subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            )
        ports = [(0, listener.getsockname()[1])]
        ports += [(rank, int(child.stdout.readline())) for rank, child in enumerate(children, 1)]
        for child in children:
            child.stdin.write(json.dumps(ports) + "\n")
            child.stdin.flush()
        recorder = Recorder()
        transport.start(
            recorder, [Peer(rank, (f"127.0.0.1:{port}",), 0, f"task {rank}") for rank, port in ports]
        )
        transport.connect_all(LIMIT)
        for rank in range(1, count + 1):
            recorder.wait_for("control", rank, b"ready")
        yield transport, recorder, children
    finally:
        transport.close(5.0)
        for child in children:
            child.stdin.close()
            try:
                child.wait(LIMIT)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


def test_a_killed_process_is_noticed_by_everybody_at_once(encrypted):
    with processes(3, encrypted) as (_, recorder, children):
        began = time.monotonic()
        children[0].send_signal(signal.SIGKILL)
        recorder.wait_for("lost", 1)
        recorder.wait_for("control", 2, b"lost 1")
        recorder.wait_for("control", 3, b"lost 1")
        assert time.monotonic() - began < 10.0  # milliseconds, but the machine may be busy
        assert recorder.of("left") == []
        children[1].stdin.close()
        recorder.wait_for("left", 2)
        recorder.wait_for("control", 3, b"left 2")
        assert len(recorder.of("lost")) == 1


def test_a_process_killed_while_it_sends_never_completes_a_receive(encrypted):
    with processes(1, encrypted) as (transport, recorder, children):
        channel = transport.message_queue.open(1, 1, b"a lot")
        into = bytearray(SIZE)
        transport.control(1, b"send a lot")
        completion = channel.receive(1, 0, memoryview(into))
        transport.control(1, b"die")
        _, _, reason = recorder.wait_for("lost", 1)
        assert children[0].wait(LIMIT) == -signal.SIGKILL
        if not completion.done:
            assert "without a goodbye" in reason or "broke" in reason
            assert channel.waiting_for() == (1,)
        channel.close()


def test_a_stopped_process_is_not_dead_and_goes_on(encrypted):
    with processes(1, encrypted) as (transport, recorder, children):
        children[0].send_signal(signal.SIGSTOP)
        try:
            transport.control(1, b"are you there?")
            channel = transport.message_queue.open(1, 1, b"a lot")
            with pytest.raises(AssertionError, match="waiting"):
                assert channel.wait([channel.receive(1, 0, memoryview(bytearray(SIZE)))], 0.05), "waiting"
            assert channel.waiting_for() == (1,)
            assert recorder.of("lost") == []
        finally:
            children[0].send_signal(signal.SIGCONT)
        recorder.wait_for("control", 1, b"echo are you there?")
