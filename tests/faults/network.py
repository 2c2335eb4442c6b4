"""Hosts of their own: network namespaces on one bridge, that can be cut off one direction at a time.

A cut is a black hole, as a firewall's DROP is: nothing is refused, no reset and no ICMP message is sent,
packets are just not heard. It is made with a permanent neighbor entry whose hardware address nobody has, so
it needs no firewall, only iproute2 and root; open connections notice nothing but the silence.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

_NOBODY = "02:00:00:00:00:01"
_numbers = itertools.count(1)


def missing() -> str:
    """Why network namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root (run `sudo make faults`)"
    if shutil.which("ip") is None:
        return "network namespaces need the program `ip` (Debian: apt-get install iproute2)"
    probe = subprocess.run(["ip", "netns", "add", name := _unique("probe")], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made here: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Host:
    """One network namespace with one address."""

    def __init__(self, name: str, address: str, hardware: str) -> None:
        self.name = name
        self.address = address
        self.hardware = hardware

    @property
    def prefix(self) -> list[str]:
        """What runs a command on this host when it is put in front of it."""
        return ["ip", "netns", "exec", self.name]


class Network:
    """Hosts that reach one another, until the test cuts them off.

    With several `networks`, each host has as many interfaces: eth1 has 10.78.0.N where eth0 has 10.77.0.N.

    ```python
    with Network(3) as network:
        server, *clients = network.hosts
        network.cut(server, clients[0])           # neither hears the other
        network.cut_one_way(server, clients[1])   # what the server says is not heard, what it hears is
        network.heal()
    ```
    """

    def __init__(self, hosts: int, networks: int = 1) -> None:
        self._hub = _unique("hub")
        self._undo: list[Sequence[str]] = []
        self.hosts: list[Host] = []
        try:
            self._make(hosts, networks)
        except BaseException:
            self.close()
            raise

    def _make(self, hosts: int, networks: int) -> None:
        self._namespace(self._hub)
        for at in range(networks):
            _ip("-n", self._hub, "link", "add", f"bridge{at}", "type", "bridge",
                "stp_state", "0", "forward_delay", "0")  # fmt: skip
            _ip("-n", self._hub, "link", "set", f"bridge{at}", "up")
        for number in range(1, hosts + 1):
            host = Host(_unique(f"h{number}"), f"10.77.0.{number}", f"02:00:00:77:00:{number:02x}")
            self._namespace(host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            for at in range(networks):
                port, name, hardware = f"port{at}-{number}", f"eth{at}", f"02:00:00:{77 + at}:00:{number:02x}"
                _ip("-n", self._hub, "link", "add", port, "type", "veth",
                    "peer", "name", name, "netns", host.name)  # fmt: skip
                _ip("-n", self._hub, "link", "set", port, "master", f"bridge{at}", "up")
                _ip("-n", host.name, "link", "set", name, "address", hardware, "up")
                _ip("-n", host.name, "address", "add", f"10.{77 + at}.0.{number}/24", "dev", name)
            self.hosts.append(host)
        self.heal()

    def _namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._undo.append(("netns", "del", name))

    def cut_one_way(self, source: Host, destination: Host) -> None:
        """From now on `destination` hears nothing of `source`."""
        self._point(source, destination, _NOBODY)

    def cut(self, one: Host, other: Host) -> None:
        """From now on neither hears the other."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def isolate(self, host: Host) -> None:
        """From now on `host` and all others do not hear each other."""
        for other in self.hosts:
            if other is not host:
                self.cut(host, other)

    def cut_network(self, at: int) -> None:
        """From now on nobody hears anybody by `eth{at}`, whose link is up all the same."""
        _ip("-n", self._hub, "link", "set", f"bridge{at}", "down")

    def take_down(self, host: Host, interface: str) -> None:
        """Takes an interface of a host down."""
        _ip("-n", host.name, "link", "set", interface, "down")

    def heal(self) -> None:
        """Everybody hears everybody again."""
        for source in self.hosts:
            for destination in self.hosts:
                if source is not destination:
                    self._point(source, destination, destination.hardware)

    def _point(self, source: Host, destination: Host, hardware: str) -> None:
        _ip("-n", source.name, "neigh", "replace", destination.address, "lladdr", hardware,
            "dev", "eth0", "nud", "permanent")  # fmt: skip

    def close(self) -> None:
        """Removes all hosts. What still runs on them keeps running, unheard."""
        while self._undo:
            subprocess.run(["ip", *self._undo.pop()], capture_output=True, check=False)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _unique(name: str) -> str:
    return f"dm{os.getpid()}-{next(_numbers)}-{name}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
