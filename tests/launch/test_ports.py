"""Ports for clients: free, different, and left alone by other launchers."""

from __future__ import annotations

import random
import socket

import pytest

from dmesh.launcher import ports


class Fixed(random.Random):
    """Tries the candidates from the end of the list, always in the same order."""

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        return args[0] - 1


def test_they_are_free_different_and_not_ephemeral() -> None:
    with ports.reserve_ports(20) as reservation:
        assert len(set(reservation.ports)) == 20
        low, high = ports.ephemeral_range()
        for port in reservation.ports:
            assert not low <= port <= high or high - low > 50_000
            with socket.socket() as listener:  # a client can listen while the reservation lasts
                # As clients do: what an earlier run on the port left in TIME_WAIT is no obstacle.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((ports.LOOPBACK, port))
                listener.listen()


def test_two_launchers_that_choose_alike_get_different_ports() -> None:
    with ports.reserve_ports(3, Fixed()) as one, ports.reserve_ports(3, Fixed()) as two:
        assert not set(one.ports) & set(two.ports)


def test_a_port_that_somebody_listens_on_is_not_chosen() -> None:
    with ports.reserve_ports(1, Fixed()) as reservation:
        port = reservation.ports[0]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ports.LOOPBACK, port))
        listener.listen()
        with ports.reserve_ports(1, Fixed()) as reservation:
            assert reservation.ports[0] != port


def test_candidates_leave_out_the_ephemeral_range_unless_that_is_everything() -> None:
    outside = ports.candidate_ports((32_768, 60_999))
    assert len(outside) > 20_000
    assert not any(32_768 <= port <= 60_999 for port in outside)
    assert min(outside) == 10_000
    assert len(ports.candidate_ports((1024, 65_535))) == 55_536


def test_too_many_is_an_error_and_nothing_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.reserve_ports(2) as found:
        two = list(found.ports)
    monkeypatch.setattr(ports, "candidate_ports", lambda _: list(two))
    with pytest.raises(OSError, match="only 2 of 3"):
        ports.reserve_ports(3)
    ports.reserve_ports(2).close()
