"""Names of hosts: `--hosts`, host files, allocations of Slurm, and the commands that lead there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dmesh.cli import main
from dmesh.errors import ConfigurationError
from dmesh.launcher.hosts import (
    Host,
    agent_command,
    exported,
    is_here,
    parse_hosts,
    read_hostfile,
    split_ssh,
    ssh_command,
    take_slots,
)
from dmesh.launcher.slurm import allocated_hosts, srun_command


def slots(hosts: tuple[Host, ...]) -> dict[str, int]:
    return {host.target: host.slots for host in hosts}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:4,b:4", {"a": 4, "b": 4}),
        ("a", {"a": 1}),
        ("a,b,a", {"a": 2, "b": 1}),
        (" me@a.example:2 , [::1]:3,[fe80::1]", {"me@a.example": 2, "[::1]": 3, "[fe80::1]": 1}),
        ("10.0.0.1:2,me@[::1]", {"10.0.0.1": 2, "me@[::1]": 1}),
    ],
)
def test_hosts_and_their_slots(text: str, expected: dict[str, int]) -> None:
    assert slots(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has ''; expected a host name"),
        ("a:4,,b", "has ''; expected a host name"),
        ("a:0", "has '0' slots; expected a number of clients from 1"),
        ("a:four", "has 'four' slots"),
        ("a:", "has '' slots"),
        ("::1", "cannot read '::1'; expected hosts such as a:4,b:4"),
        ("-oProxyCommand=touch:2", "expected a host name"),
        ("-x@a", "expected a host name"),
        ("a b", "expected a host name"),
        ("a;rm", "expected a host name"),
        ("[a]:2", "expected a host name"),
    ],
)
def test_malformed_hosts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match="--hosts") as caught:
        parse_hosts(text)
    assert message in str(caught.value)


def test_a_host_file_of_open_mpi_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("""
        # two machines, and one of them twice
        a slots=4
        b slots = 2 max_slots=8   # a comment
        me@c
        a slots=1
    """)
    assert slots(read_hostfile(str(path))) == {"a": 5, "b": 2, "me@c": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a slots", "line 1 of PATH is 'a slots'; expected HOST slots=N"),
        ("\na slots=0", "line 2 of PATH has '0' slots"),
        ("a gpus=2", "line 1 of PATH has 'gpus', which is not a known option"),
        ("-F slots=2", "line 1 of PATH has '-F'"),
        ("# nobody\n", "lists no hosts"),
    ],
)
def test_malformed_host_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        read_hostfile(str(path))
    assert message.replace("PATH", str(path)) in str(caught.value)


def test_the_first_slots_are_taken_first() -> None:
    hosts = parse_hosts("a:4,b:4,c:4")
    assert slots(take_slots(hosts, None, "")) == {"a": 4, "b": 4, "c": 4}
    assert slots(take_slots(hosts, 6, "")) == {"a": 4, "b": 2}
    with pytest.raises(ConfigurationError, match="-n 13 is more than the 12 slots of --hosts: a:4, b:4, c:4"):
        take_slots(hosts, 13, "--hosts")


def test_this_machine_is_known_by_its_names() -> None:
    assert all(is_here(Host(name, 1)) for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not any(is_here(Host(name, 1)) for name in ("me@localhost", "elsewhere", "127.0.0.2"))


def test_the_command_for_a_host_goes_through_no_shell_here_and_quoted_through_the_one_there() -> None:
    command = ssh_command(
        ("ssh", "-F", "my config"), Host("me@[::1]", 2), agent_command("/opt/my python/bin/python")
    )
    assert command[:3] == ["ssh", "-F", "my config"]
    assert "BatchMode=yes" in command
    assert command[-2:] == ["me@::1", "'/opt/my python/bin/python' -P -m dmesh.launcher.agent"]
    assert ssh_command(("/opt/wrapper", "-v"), Host("a", 1), ("x",)) == ["/opt/wrapper", "-v", "a", "x"]


def test_another_ssh_is_split_into_words() -> None:
    assert split_ssh("ssh -F 'my config' -p 22") == ("ssh", "-F", "my config", "-p", "22")
    for text, message in (("ssh 'x", "cannot be split"), (" ", "is empty")):
        with pytest.raises(ConfigurationError, match=message):
            split_ssh(text)


def test_variables_are_exported_by_name_or_with_a_value() -> None:
    assert exported(["A", "B=2", "C="], {"A": "1", "B": "0"}) == {"A": "1", "B": "2", "C": ""}
    for text, message in (
        ("D", "-x D: it is not set here"),
        ("=1", "names no variable"),
        ("a b=1", "names no"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            exported([text], {})


ALLOCATION = {
    "SLURM_JOB_NODELIST": "n[1-2],gpu",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
}


def test_an_allocation_has_its_tasks_as_slots_and_its_processors_if_more_are_wanted() -> None:
    assert slots(allocated_hosts(ALLOCATION, None)) == {"n1": 2, "n2": 2, "gpu": 1}
    assert slots(allocated_hosts(ALLOCATION, 5)) == {"n1": 2, "n2": 2, "gpu": 1}
    assert slots(allocated_hosts(ALLOCATION, 6)) == {"n1": 8, "n2": 8, "gpu": 8}


def test_what_is_no_allocation_says_how_to_get_one() -> None:
    with pytest.raises(ConfigurationError) as caught:
        allocated_hosts({}, None)
    assert "salloc --nodes=2 --ntasks-per-node=4 dmesh run --slurm" in str(caught.value)
    assert "sbatch" in str(caught.value)
    with pytest.raises(ConfigurationError, match="for 2 nodes, but SLURM_JOB_NODELIST has 3"):
        allocated_hosts({**ALLOCATION, "SLURM_TASKS_PER_NODE": "2(x2)"}, None)


def test_an_agent_is_a_step_of_one_task_on_its_node() -> None:
    command = srun_command(Host("n1", 2), ("python", "-V"))
    assert command[0] == "srun"
    assert {"--ntasks=1", "--nodelist=n1", "--overlap"} <= set(command)
    assert command[-2:] == ["python", "-V"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--hosts", "a:2", "--hostfile", "f", "s.py"), "--hosts and --hostfile both choose the hosts"),
        (("--hosts", "a:2", "--slurm", "s.py"), "--hosts and --slurm both choose the hosts"),
        (("--hosts", "a:2", "-n", "3", "s.py"), "-n 3 is more than the 2 slots of --hosts a:2"),
        (("--hosts", "a:2", "-n", "0", "s.py"), "-n must be a whole number from 1, got '0'"),
        (("--hosts", "a:2"), "no script given"),
        (("--hostfile", "/nowhere/hosts", "s.py"), "--hostfile /nowhere/hosts cannot be read"),
        (("-n", "2", "--python", "p", "s.py"), "--python is for --hosts, --hostfile and --slurm"),
        (("-n", "2", "-x", "A", "s.py"), "--export is for --hosts"),
        (("--hosts", "a:2", "--ssh", "'", "s.py"), '--ssh "\'" cannot be split'),
        (
            ("--hosts", "a:2", "--start-timeout", "0", "s.py"),
            "--start-timeout must be a number of seconds above 0",
        ),
        (("--hosts", "a:2", "--coordinator", "127.0.0.1:8470", "s.py"), "is different on each host"),
        (("--hosts", "a:2", "--coordinator", "localhost:8470", "s.py"), "is different on each host"),
        (("--slurm", "s.py"), "--slurm needs a Slurm allocation"),
    ],
)
def test_a_command_line_that_cannot_work_starts_nothing(args, message, capsys, monkeypatch) -> None:
    for name in ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    assert main(["run", *args]) == 2
    assert message in capsys.readouterr().err
