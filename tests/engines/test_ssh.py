"""`dmesh run --hosts` over OpenSSH, on two hosts that are network namespaces with an sshd each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines.packages import require
from tests.engines.two_hosts import TwoHosts
from tests.faults.network import Network, missing
from tests.launch.launching import DMESH, Launch
from tests.launch.test_run import pids
from tests.processes import running_after

pytestmark = pytest.mark.engines

REDUCE = """
    import os, signal, sys
    import numpy as np
    import dmesh

    dmesh.initialize_accelerator_system("CPU")
    me = dmesh.client_id()
    print(f"pid={os.getpid()} sum", dmesh.collectives.all_reduce(np.array([1.0, me])), dmesh.jobs()[me])
    print("tls", "DMESH_TLS_CA" in os.environ, "token", len(os.environ["DMESH_TOKEN"]))
"""
STAYS = (
    REDUCE
    + """
    while True:
        dmesh.collectives.all_reduce(np.ones(10))
"""
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    require({"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2"})
    if reason := missing():
        pytest.skip(reason)
    with Network(2) as network, TwoHosts(tmp_path_factory.mktemp("ssh"), network).serving() as two:
        yield two


@pytest.fixture
def run(hosts: TwoHosts, tmp_path: Path) -> Iterator:
    """Starts `dmesh run` on the first host, with two clients on each."""
    started: list[Launch] = []

    def launch(
        *args: str,
        key: str = "user_key",
        first: str = hosts.addresses[0],
        second: str = hosts.addresses[1],
        **env: str,
    ) -> Launch:
        named = f"{first}:2,{second}:2"
        command = [*DMESH, "run", "--ssh", hosts.ssh(key), "--hosts", named, *args]
        process = subprocess.Popen(
            hosts.inside(command), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, **env},
        )  # fmt: skip
        started.append(Launch(process))
        return started[-1]

    yield launch
    for one in started:
        one.close()


def test_four_clients_on_two_hosts_reduce(run, script, hosts) -> None:
    one = run(script(REDUCE))
    assert one.wait() == 0, one.err
    for rank in range(4):
        [line] = [line for line in one.out if line.startswith(f"[{rank}] pid=")]
        assert f"sum [4. 6.] {hosts.addresses[rank // 2]}:" in line
        assert f"[{rank}] tls True token 64" in one.out


def test_the_launchers_own_machine_needs_no_ssh_and_has_an_address_for_the_others(run, script, hosts) -> None:
    one = run(script(REDUCE), first="localhost")
    assert one.wait() == 0, one.err
    [line] = [line for line in one.out if line.startswith("[0] pid=")]
    assert f"sum [4. 6.] {hosts.addresses[0]}:" in line


def test_a_killed_client_is_named_with_host_and_pid(run, script, hosts) -> None:
    one = run(script(STAYS))
    victim = next(line for line in one.expect("pid=", 4) if line.startswith("[3] "))
    [pid] = pids([victim])
    os.kill(pid, signal.SIGKILL)
    assert one.wait() == 137
    [report] = [line for line in one.err if "FAILED" in line]
    assert f"FAILED: rank 3 on host {hosts.addresses[1]} (pid {pid}) was killed by SIGKILL" in report
    assert any("the others followed: ranks 0-2" in line for line in one.err)


def test_signals_reach_both_hosts_and_nothing_is_left(run, script) -> None:
    one = run(script(STAYS))
    started = pids(one.expect("pid=", 4))
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 143
    assert not running_after(started)


def test_a_killed_launcher_leaves_nothing_on_the_other_host(run, script) -> None:
    one = run(script(STAYS))
    started = pids(one.expect("pid=", 4))
    one.process.kill()
    assert not running_after(started)


def test_a_killed_ssh_is_a_lost_host(run, script, hosts) -> None:
    one = run(script(STAYS))
    started = pids(one.expect("pid=", 4))
    clients = psutil.Process(one.process.pid).children(recursive=True)
    [ssh] = [child for child in clients if child.name() == "ssh" and hosts.addresses[1] in child.cmdline()]
    ssh.kill()
    assert one.wait() == 255
    assert not running_after(started)
    text = "\n".join(one.err)
    assert f"FAILED: ranks 2-3 on host {hosts.addresses[1]} were lost with the connection to its host" in text
    assert f"the connection to host {hosts.addresses[1]} is gone: ssh ended with SIGKILL" in text


def test_hosts_that_cannot_take_part_are_named(run, script, hosts, tmp_path) -> None:
    path = script("print('started')")
    for args, options, message in (
        ((), {"second": "10.200.0.99"}, "host 10.200.0.99: it cannot be reached. Try: ssh -F "),
        ((), {"key": "other_key"}, "Permission denied (publickey"),
        (("--python", "/no/python"), {}, "there is no /no/python. Name the Python there with --python"),
        (("--python", _without_dmesh(tmp_path)), {}, "dmesh is not installed for"),
        (("--chdir", "/no/where"), {}, "it has no working directory /no/where"),
    ):
        one = run(*args, path, **options)
        assert one.wait() == 1
        assert one.out == []
        assert len(one.err) == 1
        assert one.err[0].startswith("dmesh run: error: the clients could not be started: host ")
        assert message in one.err[0]


def test_a_host_that_vanishes_is_lost_and_left_to_itself_ends_its_clients(run, script, hosts) -> None:
    """Packets are not heard any more, and nothing says so."""
    one = run("--timeout-after-failure", "0", "--terminate-grace", "0", script(STAYS), DMESH_LEASE="2")
    started = pids(one.expect("pid=", 4))
    hosts.network.cut(*hosts.network.hosts)
    assert one.wait() == 255
    hosts.network.heal()
    text = "\n".join(one.err)
    assert f"FAILED: ranks 2-3 on host {hosts.addresses[1]} were lost with the connection to its host" in text
    assert "it has not killed its clients within 10 s" in text
    assert not running_after(started)


def _without_dmesh(folder: Path) -> str:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)
