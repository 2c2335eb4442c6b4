"""Floods a server from a process of its own: `python flooder.py KIND HOST:PORT RATE SECONDS [SOURCE]`.

Kinds: `http` connects, sends a request that needs no token, and drops the connection without reading; `calls`
makes gRPC calls without a token as fast as they are refused, RATE of them at a time; `hold` opens RATE gRPC
connections in all, completes the HTTP/2 handshake on each and says nothing more.
Prints one line of JSON at the end: `{"sent": ..., "refused": ..., "open": ...}`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import sys
import time

PATHS = itertools.cycle(["POST /logout", "GET /static/dashboard.css", "POST /login", "GET /static/app.js"])
HEAD = "HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def connect(address: tuple[str, int], source: str) -> socket.socket | None:
    """A connection from `source`; None if it is refused."""
    connection = socket.socket()
    connection.settimeout(2)
    try:
        connection.bind((source, 0))
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def flood_http(address: tuple[str, int], rate: float, seconds: float, source: str) -> dict[str, int]:
    began, sent, refused = time.monotonic(), 0, 0
    while (now := time.monotonic()) < began + seconds:
        if sent + refused > (now - began) * rate:
            time.sleep(0.001)
            continue
        with socket.socket() as connection:
            connection.setblocking(False)  # on one machine a connection is there at once
            connection.bind((source, 0))
            connection.connect_ex(address)
            try:
                connection.send(f"{next(PATHS)} {HEAD}".encode())
                sent += 1
            except OSError:
                refused += 1
    return {"sent": sent, "refused": refused, "open": 0}


def flood_calls(address: tuple[str, int], rate: float, seconds: float, source: str) -> dict[str, int]:
    import grpc

    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        channel = grpc.insecure_channel(
            f"{address[0]}:{address[1]}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        call = channel.unary_unary("/dmesh.v1.CoordinationService/GetClusterState")
        for _ in range(50):
            flying = [call.future(b"", timeout=2) for _ in range(int(rate))]
            for one in flying:
                with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                    one.result()
            sent += len(flying)
            if time.monotonic() >= until:
                break
        channel.close()
    return {"sent": sent, "refused": sent, "open": 0}


def hold(address: tuple[str, int], count: float, seconds: float, source: str) -> dict[str, int]:
    until, kept, refused = time.monotonic() + seconds, [], 0
    for _ in range(int(count)):
        connection = connect(address, source)
        if connection is None:
            refused += 1
            continue
        with contextlib.suppress(OSError):
            connection.sendall(PREFACE)
        kept.append(connection)
    time.sleep(max(0.0, until - time.monotonic()))
    poll = select.poll()
    for connection in kept:
        poll.register(connection, select.POLLRDHUP)
    closed = {number for number, event in poll.poll(0) if event}
    return {"sent": len(kept), "refused": refused, "open": len(kept) - len(closed)}


if __name__ == "__main__":
    kind, where, rate, seconds, *source = sys.argv[1:]
    host, _, port = where.rpartition(":")
    work = {"http": flood_http, "calls": flood_calls, "hold": hold}[kind]
    print(json.dumps(work((host, int(port)), float(rate), float(seconds), *(source or ["127.0.0.1"]))))
