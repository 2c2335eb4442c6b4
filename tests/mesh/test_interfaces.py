"""Network interfaces and NUMA nodes, as /sys shows them: trees of files as Linux has them."""

from __future__ import annotations

from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path

import pytest

from dmesh.config.host import numa_nodes, own_nodes
from dmesh.config.interfaces import Interface, check_exists, look_at, usable
from dmesh.errors import ConfigurationError

IPV6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000010000000000000007 04 40 00 01     eth2
fd0000000000000100000000000000aa 04 40 00 80     eth2
fe8000000000000000fc00fffe000001 04 40 20 80     eth2
fe8000000000000000fc00fffe000002 05 40 20 80     eth4
"""

HOST = {
    # name: type, operstate, carrier and flags, speed (None: reading is an error), what else is there, IPv4
    "lo": ("772", "unknown", "1", "0x9", None, [], "127.0.0.1/8"),
    "eth0": ("1", "up", "1", "0x1003", "25000", ["device/vendor"], "10.1.0.5/16"),
    "eth1": ("1", "up", "1", "0x1003", "-1", ["device/vendor"], "10.2.0.5/16"),  # virtio knows no speed
    "eth2": ("1", "up", "1", "0x1003", "1000", [], None),
    "eth3": ("1", "down", "0", "0x1003", None, [], "10.3.0.5/16"),  # no cable
    "eth4": ("1", "up", "1", "0x1003", "10000", [], None),  # nothing but a link-local address
    "eth5": ("1", "down", None, "0x1002", None, [], None),
    "eth6": ("1", "down", "1", "0x1003", "25000", [], "10.6.0.5/16"),  # has just come up
    "ib0": ("32", "up", "1", "0x1003", "100000", [], "10.4.0.5/16"),
    "bond0": (
        "1",
        "up",
        "1",
        "0x1403",
        "50000",
        ["bonding/mode", "lower_ens1/x", "lower_ens2/x"],
        "10.5.0.5/24",
    ),
    "ens1": ("1", "up", "1", "0x1803", "25000", ["master/x", "upper_bond0/x"], None),
    "eth0.7": ("1", "up", "1", "0x1003", "25000", ["lower_eth0/x"], "10.7.0.5/24"),
    "docker0": ("1", "up", "1", "0x1003", "10000", ["bridge/stp_state", "brif/x"], "172.17.0.1/16"),
    "veth1a2b": ("1", "up", "1", "0x1003", "10000", ["brport/x", "master/x"], None),
    "tun0": ("65534", "unknown", "1", "0x10d1", None, ["tun_flags"], "10.8.0.5/24"),
    "tailscale0": ("1", "unknown", "1", "0x1091", None, ["tun_flags"], "100.64.0.5/32"),
    "flannel.1": ("1", "up", "1", "0x1003", None, [], "10.244.0.0/32"),
    "169": ("1", "up", "1", "0x1003", "1000", [], "169.254.3.4/16"),
    "bonding_masters": None,  # a file among the interfaces
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "sys/class/net"
    folder.mkdir(parents=True)
    for name, facts in HOST.items():
        if facts is None:
            (folder / name).write_text("bond0\n")
            continue
        kind, state, carrier, flags, speed, others, _ = facts
        (folder / name).mkdir()
        files = {"type": kind, "operstate": state, "carrier": carrier, "flags": flags, "speed": speed}
        for path, text in {**files, **dict.fromkeys(others, "")}.items():
            if text is not None:
                (folder / name / path).parent.mkdir(exist_ok=True)
                (folder / name / path).write_text(text + "\n")
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/if_inet6").write_text(IPV6)
    return tmp_path


def ipv4(name: str) -> IPv4Interface | None:
    address = (HOST[name] or [None])[-1]
    return None if address is None else IPv4Interface(address)


def test_the_interfaces_that_reach_other_hosts_are_found(root: Path) -> None:
    assert usable(root, ipv4) == (
        Interface("bond0", IPv4Interface("10.5.0.5/24"), 50_000),
        Interface("eth0", IPv4Interface("10.1.0.5/16"), 25_000),
        Interface("eth1", IPv4Interface("10.2.0.5/16"), 0),
        Interface("eth2", IPv6Interface("fd00:0:0:1::aa/64"), 1000),  # not the temporary address
        Interface("eth6", IPv4Interface("10.6.0.5/16"), 25_000),
        Interface("ib0", IPv4Interface("10.4.0.5/16"), 100_000),
    )


def test_a_named_interface_is_used_whatever_it_is_if_it_is_up(root: Path) -> None:
    assert look_at("docker0", root, ipv4) == Interface("docker0", IPv4Interface("172.17.0.1/16"), 10_000)
    assert look_at("tun0", root, ipv4) == Interface("tun0", IPv4Interface("10.8.0.5/24"), 0)
    assert look_at("eth3", root, ipv4) == look_at("eth5", root, ipv4) == "it is down"
    assert look_at("eth4", root, ipv4) == "it has no address"
    assert (
        look_at("eth9", root, ipv4)
        == look_at("bonding_masters", root, ipv4)
        == "this host has no such interface"
    )
    assert str(look_at("eth0", root, ipv4).describe()) == "eth0 (10.1.0.5/16, 25000 Mbit/s)"


def test_a_name_without_an_interface_is_refused_with_those_that_there_are(root: Path) -> None:
    check_exists(("eth0", "eth3"), root)
    with pytest.raises(
        ConfigurationError,
        match=r"names eth9, which is not a network interface of this host; it has 169, bond0",
    ):
        check_exists(("eth0", "eth9"), root)


def test_where_there_is_no_sys_there_are_none(tmp_path: Path) -> None:
    assert usable(tmp_path, ipv4) == ()
    assert numa_nodes(tmp_path) == {}
    with pytest.raises(ConfigurationError, match="it has none in /sys"):
        check_exists(("eth0",), tmp_path)


def test_this_machines_own_loopback_has_its_address() -> None:
    assert look_at("lo") == Interface("lo", IPv4Interface("127.0.0.1/8"), 0)


def test_the_cpus_of_numa_nodes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node"
    lists = {"node0": "0-2,8-9", "node1": "3-5,11", "node10": ""}  # the last one is memory alone
    for name, cpus in lists.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(cpus + "\n")
    (folder / "possible").write_text("0-10\n")
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 8, 9}, 1: {3, 4, 5, 11}, 10: set()}
    assert own_nodes(tmp_path, {2, 8, 90}) == {0: {2, 8}}
    assert own_nodes(tmp_path, {2, 11}) == {0: {2}, 1: {11}}
