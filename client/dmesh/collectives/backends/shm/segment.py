"""Segment of memory that processes of one host share. It has no name, and is gone with its last process.

A segment is an anonymous file (`memfd_create`), sealed against shrinking, so that no access to it can fail
later. Its owner sends others a ticket, over connections that have proven their peers: the process, the
descriptor there, and a random number at the beginning of the memory. They open it through `/proc`, which the
kernel permits to processes of the same user that could trace each other. Containers with process ids of their
own do not see each other there. The random number shows that it is the right segment.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import sys
from dataclasses import dataclass

import numpy as np

HEADER = 4096
"""Bytes of the header of a segment."""
_MAGIC = b"dmesh segment 1\n"
_NONCE = 16
_NAME = "dmesh"
_TICKET = struct.Struct("!16sQIiQ16s")


Host = tuple[bytes, int]
"""Boot id of a host, 16 bytes, and a namespace of process ids there."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Location of a segment."""

    boot: bytes
    """Boot id of the host."""
    namespace: int
    """Namespace of the process id; 0 if unknown."""
    pid: int
    """Process that shares it."""
    descriptor: int
    """Descriptor in that process."""
    nbytes: int
    """Size in bytes."""
    nonce: bytes
    """16 random bytes that it begins with."""

    SIZE = _TICKET.size

    @property
    def beginning(self) -> bytes:
        """First bytes of the memory."""
        return _MAGIC + self.nonce

    def encode(self) -> bytes:
        """Return it as `SIZE` bytes."""
        return _TICKET.pack(self.boot, self.namespace, self.pid, self.descriptor, self.nbytes, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Return the ticket that `encode` wrote."""
        return cls(*_TICKET.unpack(data))


class Segment:
    """Memory that this process shares with others.

    Args:
        nbytes: Its size, header included. Costs nothing before it is written to.
        host: Host of this process; detected if None.

    Raises:
        OSError: The system cannot do that, or has no memory for it.
    """

    def __init__(self, nbytes: int, host: Host | None = None) -> None:
        self._host = host or here()
        self._descriptor = -1  # until there is one, also for `__del__`
        if missing := unsupported():
            raise OSError(errno.ENOTSUP, missing)
        import fcntl

        self.nonce = secrets.token_bytes(_NONCE)
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, nbytes)
            fcntl.fcntl(
                self._descriptor,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self.memory = mmap.mmap(self._descriptor, nbytes)
        except BaseException:
            self.close()
            raise
        self.memory[: len(_MAGIC) + _NONCE] = _MAGIC + self.nonce
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        """Address of the memory in this process."""

    @property
    def ticket(self) -> Ticket:
        """Ticket for other processes."""
        return Ticket(*self._host, os.getpid(), self._descriptor, len(self.memory), self.nonce)

    def close(self) -> None:
        """Let no process attach any more. The memory goes when no process uses it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def attach(ticket: Ticket, host: Host | None = None) -> mmap.mmap:
    """Map another process's segment.

    Args:
        ticket: Its ticket.
        host: Host of this process; detected if None.

    Raises:
        OSError: It cannot be opened: another host or container, another user, or its process is gone.
        ValueError: It is not the segment of the ticket.
    """
    import fcntl

    if (ticket.boot, ticket.namespace) != (host or here()):
        raise OSError(errno.EXDEV, "its process is on another host or in another container")
    path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
        raise ValueError(f"{path} is no segment")  # found out before it is opened, which can have effects
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        # A file of somebody else could be cut off while we use it, which would kill this process.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise ValueError(f"{path} is not sealed")
        if os.fstat(descriptor).st_size != ticket.nbytes or ticket.nbytes < HEADER:
            raise ValueError(f"{path} has not {ticket.nbytes} bytes")
        memory = mmap.mmap(descriptor, ticket.nbytes)
    finally:
        os.close(descriptor)
    if memory[: len(ticket.beginning)] != ticket.beginning:
        memory.close()
        raise ValueError(f"{path} is another segment")
    return memory


def unsupported() -> str:
    """Return why memory cannot be shared on this system; empty if it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "shared memory without names needs Linux"
    if not here()[1]:
        return "/proc is not there"
    return ""


def here() -> Host:
    """Return the host and the namespace of process ids of this process; (b"", 0) if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return b"", 0
