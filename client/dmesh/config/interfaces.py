"""Network interfaces of this host, from /sys. Linux only; on other systems there are none."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dmesh.errors import ConfigurationError

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
"""IP address with the length of its network's prefix."""

NAME_PATTERN = re.compile(r"[^\s/,]{1,15}")
"""Pattern of an interface's name."""

MOST_INTERFACES = 8
"""Maximum number of interfaces of one client: the maximum number of streams of a connection."""

_ETHERNET, _INFINIBAND = 1, 32
_UP = 0x1  # of an interface's flags
_GET_ADDRESS, _GET_NETMASK = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK
_GLOBAL_SCOPE = 0
_UNSTABLE = 0x01 | 0x08 | 0x20 | 0x40  # an IPv6 address that is temporary, a duplicate, deprecated, tentative


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    """Its name, such as `eth0`."""
    address: Address
    """Its IPv4 address, or its IPv6 address if it has no other."""
    speed: int
    """Megabits per second, as the driver reports it; 0 if unknown."""

    def describe(self) -> str:
        """Return its name, address and speed as text."""
        speed = f", {self.speed} Mbit/s" if self.speed else ""
        return f"{self.name} ({self.address}{speed})"


def _ipv4(name: str) -> Address | None:
    """Return the first IPv4 address of an interface from the kernel; /sys does not show it."""
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answers = [fcntl.ioctl(sock, code, request) for code in (_GET_ADDRESS, _GET_NETMASK)]
        except OSError:
            return None
    address, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
    return ipaddress.IPv4Interface(f"{address}/{mask}")


def look_at(
    name: str, root: Path = Path("/"), ipv4: Callable[[str], Address | None] = _ipv4
) -> Interface | str:
    """Return an interface, or the reason why it cannot be used.

    Args:
        name: Its name.
        root: The root of the file system.
        ipv4: Returns the IPv4 address of an interface.
    """
    folder = root / "sys/class/net" / name
    if not folder.is_dir():
        return "this host has no such interface"
    # Not `operstate`, which stays "down" for up to a second after an interface comes up.
    if not int(_read(folder / "flags") or "0", 16) & _UP or _read(folder / "carrier") != "1":
        return "it is down"
    address = ipv4(name) or _ipv6(root, name)
    if address is None:
        return "it has no address"
    return Interface(name, address, max(0, int(_read(folder / "speed") or "0")))


def usable(root: Path = Path("/"), ipv4: Callable[[str], Address | None] = _ipv4) -> tuple[Interface, ...]:
    """Return the interfaces over which other hosts can be reached, sorted by name.

    These are Ethernet and InfiniBand interfaces with a link and a network address; a bond instead of its
    members. Loopback, bridges, tunnels, and interfaces on top of others, such as VLANs, are excluded.

    Args:
        root: The root of the file system.
        ipv4: Returns the IPv4 address of an interface.
    """
    names = (folder.name for folder in sorted((root / "sys/class/net").glob("*")) if _is_card(folder))
    seen = (look_at(name, root, ipv4) for name in names)
    return tuple(found for found in seen if isinstance(found, Interface) and _leads_out(found.address))


def _is_card(folder: Path) -> bool:
    stacked = any(folder.glob("lower_*")) and not (folder / "bonding").exists()
    return (
        _read(folder / "type") in (str(_ETHERNET), str(_INFINIBAND))
        and _read(folder / "operstate") != "unknown"  # "unknown" is the state of tunnels and dummies
        and not (stacked or (folder / "bridge").exists())
    )


def _leads_out(address: Address) -> bool:
    return address.network.num_addresses > 1 and not address.is_link_local


def check_exists(names: tuple[str, ...], root: Path = Path("/")) -> None:
    """Raise an error for names of interfaces that this host does not have.

    Args:
        names: `DMESH_INTERFACES`.
        root: The root of the file system.

    Raises:
        ConfigurationError: There is no such interface.
    """
    there = sorted(folder.name for folder in (root / "sys/class/net").glob("*") if folder.is_dir())
    for name in names:
        if name not in there:
            raise ConfigurationError(
                f"DMESH_INTERFACES names {name}, which is not a network interface of this host; it has "
                f"{', '.join(there) or 'none in /sys'}. Correct the name, or unset the variable"
            )


def _ipv6(root: Path, name: str) -> Address | None:
    for line in _read(root / "proc/net/if_inet6").splitlines():
        digits, _, prefix, scope, flags, owner = line.split()
        if owner == name and int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & _UNSTABLE:
            return ipaddress.IPv6Interface((int(digits, 16), int(prefix, 16)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # the file does not exist; or it is `speed`, which is unknown while the link is down
        return ""
