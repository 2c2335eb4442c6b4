"""The harness does what it says: a scenario that passes because nothing was injected would prove nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
from tests.faults.processes import RemoteError, eventually, results

CLOCKS = "import time; print(time.time(), time.monotonic(), flush=True)"


def test_a_server_that_is_killed_comes_back_at_its_address(make_server, make_client):
    server = make_server().start()
    client = make_client(0, 1, server.address).join()
    assert client.do("agent.key_value_set('a', '1')") >= 1
    first = client.do("agent.server_incarnation")
    server.restart()
    assert client.do("agent.key_value_get('a', 30)") == "1"
    eventually(lambda: client.do("agent.server_incarnation") != first, "the new server to be known")
    assert server.lives == 2
    assert server.terminate() == 0


def test_clients_answer_raise_and_tell(make_server, make_client):
    server = make_server(data_dir=None).start()
    client = make_client(0, 1, server.address).join()
    assert client.do("x = 20\nresult = x + 1") == 21
    assert client.do("x + 2") == 22
    with pytest.raises(RemoteError) as caught:
        client.do("agent.key_value_get('never', 0)")
    assert caught.value.kind == "KeyNotFoundError"
    assert "KeyError" in caught.value.kinds
    client.do("say('hello', who='me')")
    client.do("print('a line', flush=True)")
    assert client.wait_event("hello", who="me")["at"] <= time.monotonic()
    client.wait_event("line", text="a line")
    waiting = client.submit("agent.key_value_get('later', 60)", thread=True)
    client.do("agent.key_value_set('later', 'now')")
    assert results([waiting])[0].value == "now"
    assert client.size["fds"] > 0
    assert client.end() == 0


def test_a_frozen_process_stands_still(make_server, make_client):
    server = make_server(data_dir=None).start()
    client = make_client(0, 1, server.address).join()
    client.freeze()
    future = client.submit("1")
    with pytest.raises(TimeoutError):
        future.result(0.3)
    client.thaw()
    assert future.result(30).value == 1


def ping(source, destination) -> bool:
    """Whether a datagram to `destination` is answered."""
    server = (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"s.bind(({destination.address!r}, 4000))\nprint('up', flush=True)\n"
        "data, who = s.recvfrom(10)\nprint('heard', flush=True)\ns.sendto(data, who)"
    )
    client = (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.settimeout(0.3)\n"
        f"s.sendto(b'x', ({destination.address!r}, 4000))\n"
        "try: print(s.recv(10))\nexcept TimeoutError: pass"
    )
    with subprocess.Popen(
        [*destination.prefix, sys.executable, "-c", server], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        answer = subprocess.run(
            [*source.prefix, sys.executable, "-c", client], capture_output=True, text=True, check=True
        )
        process.kill()
        ping.heard = "heard" in process.stdout.read()
    return "x" in answer.stdout


def test_a_network_is_cut_in_one_direction_or_both(make_network):
    network = make_network(2)
    one, other = network.hosts
    assert ping(one, other)
    network.cut_one_way(other, one)
    assert not ping(one, other)
    assert ping.heard, "the other direction is open"
    network.cut(one, other)
    assert not ping(one, other)
    assert not ping.heard
    network.heal()
    assert ping(one, other)


def test_no_namespace_is_left_behind(make_network):
    network = make_network(1)
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert network.hosts[0].name in names
    network.close()
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert network.hosts[0].name not in names


def test_a_small_disk_fills_up_and_has_space_again(small_disk):
    disk = small_disk("64k")
    disk.fill()
    with pytest.raises(OSError, match="No space"):
        (disk.path / "file").write_bytes(b"x" * 4096)
    disk.free()
    (disk.path / "file").write_bytes(b"x" * 4096)
    disk.read_only()
    with pytest.raises(OSError, match="Read-only"):
        (disk.path / "file").write_bytes(b"")


def test_a_wall_clock_can_be_set_while_the_process_runs(wall_clock):
    clock = wall_clock("server")
    clock.shift(3600)
    process = subprocess.Popen(
        [sys.executable, "-c", f"{CLOCKS}\ninput()\n{CLOCKS}"],
        env={**clock.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        wall, monotonic = map(float, process.stdout.readline().split())
        assert 3500 < wall - time.time() <= 3601
        assert abs(monotonic - time.monotonic()) < 100, "the monotonic clock is not shifted"
        clock.shift(-3600)
        process.stdin.write("\n")
        process.stdin.flush()
        wall, _ = map(float, process.stdout.readline().split())
        assert -3700 < wall - time.time() <= -3599


def test_a_monotonic_clock_can_be_another(time_namespace):
    out = subprocess.run(
        [*time_namespace(7200), sys.executable, "-c", CLOCKS], capture_output=True, text=True, check=True
    ).stdout
    wall, monotonic = map(float, out.split())
    assert 7100 < monotonic - time.monotonic() <= 7200
    assert abs(wall - time.time()) < 100


def test_a_process_in_a_namespace_is_the_one_that_was_started(make_network, make_server):
    network = make_network(1)
    host = network.hosts[0]
    server = make_server("--insecure", host=host.address, prefix=host.prefix, data_dir=None).start()
    assert "serve" in psutil.Process(server.process.pid).cmdline()
    server.kill()
    assert not psutil.pid_exists(server.process.pid)


def test_random_choices_follow_the_seed(chance, seed):
    import random

    assert chance.random() == random.Random(seed).random()
