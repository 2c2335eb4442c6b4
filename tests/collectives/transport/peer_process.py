"""A client in a process of its own, for tests that kill it.

It says on standard output at which address it listens, reads on standard input who the peers are, and then
does what it is told by control messages. It leaves with a goodbye when standard input ends. Arguments: its
rank, and the files of its certificate, its key and its authority if connections are to be encrypted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.collectives.transport.harness import CLUSTER, LIMIT, SECRET, tcp_listener

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.security.certificates import IdentityFiles

SIZE = 64 * 1024 * 1024


class Obedient:
    """Listener that obeys control messages, and reports other ranks' events to rank 0."""

    def __init__(self) -> None:
        self.transport: TcpTransport | None = None

    def on_control(self, peer: int, message: bytes) -> None:
        assert self.transport is not None
        if message == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif message == b"send a lot":
            threading.Thread(target=self.send_a_lot, daemon=True).start()
        elif message.startswith(b"greet "):
            self.transport.control(int(message[6:]), b"greetings")
        elif message != b"greetings":
            self.transport.control(peer, b"echo " + message)

    def send_a_lot(self) -> None:
        assert self.transport is not None
        channel = self.transport.message_queue.open(1, 1, b"a lot")
        channel.send(0, 0, memoryview(bytearray(SIZE)))
        channel.flush(LIMIT)

    def on_peer_lost(self, peer: int, reason: str) -> None:
        assert self.transport is not None
        if peer != 0:
            self.transport.control(0, f"lost {peer}".encode())

    def on_peer_left(self, peer: int) -> None:
        assert self.transport is not None
        self.transport.control(0, f"left {peer}".encode())

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        raise AssertionError("nothing here differs")


def main() -> None:
    rank = int(sys.argv[1])
    listener = tcp_listener()
    print(listener.getsockname()[1], flush=True)
    peers = [
        Peer(at, (f"127.0.0.1:{port}",), 0, f"task {at}") for at, port in json.loads(sys.stdin.readline())
    ]
    tls = None
    if len(sys.argv) > 2:
        cert, key, ca = map(Path, sys.argv[2:])
        tls = PeerTls(IdentityFiles(cert, key), ca)
    transport = TcpTransport(rank, listener, lambda: SECRET, CLUSTER, tls=tls)
    obedient = Obedient()
    obedient.transport = transport
    transport.start(obedient, peers)
    transport.connect_all(LIMIT)
    transport.control(0, b"ready")
    sys.stdin.read()
    transport.close(LIMIT)


if __name__ == "__main__":
    main()
