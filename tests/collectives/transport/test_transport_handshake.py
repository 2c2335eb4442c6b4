"""Handshake: admits only processes that know the secret and name both ends correctly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.collectives.backends.tcp.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    WELCOME_SIZE,
    Acceptor,
    Credentials,
    Dialer,
    Refused,
    Status,
)
from dmesh.errors import PeerAuthenticationError

SECRET = b"a secret that is not to be seen"
SIZES = (HELLO_SIZE, CHALLENGE_SIZE, PROOF_SIZE, WELCOME_SIZE)


def credentials(rank, **changes):
    return replace(Credentials(rank, 1000 + rank, b"cluster", lambda: SECRET), **changes)


def pair(dialer=None, acceptor=None, incarnations=None, to=1, incarnation=1001):
    return (
        Dialer(dialer or credentials(0), to, incarnation, "/job:worker/task:1", bytes(31) + b"d"),
        Acceptor(acceptor or credentials(1), incarnations or {0: 1000, 2: 1002}, bytes(31) + b"a"),
    )


def converse(dialer, acceptor, alter=lambda index, message: message, cut=lambda size: size):
    """Carry messages to and fro; `alter` may change one on its way, `cut` splits it."""

    def feed(side, index, message):
        message, answer = alter(index, message), b""
        while message:
            count = max(1, min(cut(side.wanted), side.wanted, len(message)))
            answer += side.feed(message[:count])
            message = message[count:]
        return answer

    challenge = feed(acceptor, 0, dialer.begin())
    proof = feed(dialer, 1, challenge)
    welcome = feed(acceptor, 2, proof)
    assert feed(dialer, 3, welcome) == b""


@given(st.integers(1, 200))
def test_peers_that_share_the_secret_accept_each_other(cut):
    dialer, acceptor = pair()
    converse(dialer, acceptor, cut=lambda size: cut)
    assert dialer.done
    assert acceptor.done
    assert (dialer.peer, acceptor.peer) == (1, 0)
    assert (dialer.wanted, acceptor.wanted) == (0, 0)


@given(st.data())
def test_any_flipped_bit_is_refused(data):
    where = data.draw(st.integers(0, 3))
    bit = data.draw(st.integers(0, 8 * SIZES[where] - 1))

    def alter(index, message):
        if index != where:
            return message
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    dialer, acceptor = pair()
    with pytest.raises(PeerAuthenticationError):
        converse(dialer, acceptor, alter)
    assert not dialer.done
    assert not acceptor.done or where == 3


@pytest.mark.parametrize("where", range(4))
def test_every_single_flipped_bit_is_refused(where):
    for bit in range(8 * SIZES[where]):

        def alter(index, message, bit=bit):
            flipped = bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(message))
            return flipped if index == where else message

        dialer, acceptor = pair()
        with pytest.raises(PeerAuthenticationError):
            converse(dialer, acceptor, alter)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        (
            {"dialer": credentials(0, secret=lambda: b"wrong")},
            Status.WRONG_PROOF,
            "does not know the cluster's secret",
        ),
        ({"dialer": credentials(0, cluster_id=b"other")}, Status.WRONG_CLUSTER, "another cluster"),
        ({"dialer": credentials(5)}, Status.UNKNOWN_RANK, "no peer of rank 5"),
        ({"dialer": credentials(2, secret=lambda: b"guess")}, Status.WRONG_PROOF, "claims to be of rank 2"),
        ({"dialer": credentials(0, incarnation=5)}, Status.WRONG_INCARNATION, "restarted"),
        ({"to": 2}, Status.WRONG_RANK, "it looks for rank 2, this is 1"),
        ({"incarnation": 77}, Status.WRONG_INCARNATION, "it looks for a former process"),
        (
            {"dialer": credentials(0, incarnation=5, generation=lambda: 3)},
            Status.NOT_YET,
            "newer than the one known here",
        ),
        (
            {
                "dialer": credentials(0, incarnation=5, generation=lambda: 3),
                "acceptor": credentials(1, generation=lambda: 3),
            },
            Status.WRONG_INCARNATION,
            "restarted",
        ),
    ],
)
def test_the_acceptor_refuses_with_a_reason(changes, status, message):
    dialer, acceptor = pair(**changes)
    with pytest.raises(Refused, match=message) as caught:
        converse(dialer, acceptor)
    assert caught.value.status is status
    assert not acceptor.done
    answer = caught.value.answer
    assert len(answer) in (CHALLENGE_SIZE, WELCOME_SIZE)
    assert SECRET not in answer
    with pytest.raises(Refused, match="the handshake with rank") as told:
        dialer.feed(answer)
    assert told.value.status is status
    assert not dialer.done


def test_unknown_incarnations_are_not_compared():
    nobody = credentials(0, incarnation=0)
    dialer, acceptor = pair(nobody, credentials(1, incarnation=0), {0: 0}, incarnation=0)
    converse(dialer, acceptor)
    assert dialer.done


def test_a_listener_that_does_not_know_the_secret_is_refused():
    dialer, _ = pair()
    impostor = Acceptor(credentials(1, secret=lambda: b"guess"), {0: 1000})
    challenge = impostor.feed(dialer.begin())
    dialer.feed(challenge)
    with pytest.raises(Refused, match="could not prove that it knows the cluster's secret"):
        dialer.feed(bytes([Status.OK]) + bytes(PROOF_SIZE))


@pytest.mark.parametrize(
    ("challenge", "message"),
    [
        (bytes(3) + b"\1" + bytes(CHALLENGE_SIZE - 4), "does not speak dmesh's protocol"),
        (bytes([99]) + bytes(CHALLENGE_SIZE - 1), "does not speak dmesh's protocol"),
        (bytes(7) + b"\2" + bytes(CHALLENGE_SIZE - 8), "rank 2 listens at this address"),
        (bytes(7) + b"\1" + bytes(CHALLENGE_SIZE - 8), "another process than the registered one"),
    ],
)
def test_the_dialer_refuses_other_listeners(challenge, message):
    dialer, _ = pair()
    with pytest.raises(Refused, match=message):
        dialer.feed(challenge)


def test_a_recorded_proof_fails_against_a_new_nonce():
    dialer, acceptor = pair()
    hello = dialer.begin()
    proof = dialer.feed(acceptor.feed(hello))
    acceptor.feed(proof)
    assert acceptor.done
    later = Acceptor(credentials(1), {0: 1000})
    later.feed(hello)
    with pytest.raises(Refused) as caught:
        later.feed(proof)
    assert caught.value.status is Status.WRONG_PROOF


def test_a_proof_cannot_be_reflected():
    """An outsider that connects back to the dialer cannot have it prove itself to itself."""
    dialer, acceptor = pair()
    proof = dialer.feed(acceptor.feed(dialer.begin()))
    with pytest.raises(Refused):
        dialer.feed(bytes([Status.OK]) + proof)


def test_other_protocols_are_refused_at_the_first_byte():
    _, acceptor = pair()
    with pytest.raises(Refused, match="does not speak dmesh's protocol"):
        acceptor.feed(b"G")


def test_a_missing_secret_lets_nobody_in():
    def missing():
        raise RuntimeError("a text that may show something")

    dialer, acceptor = pair(acceptor=credentials(1, secret=missing))
    with pytest.raises(Refused, match=r"secret is not available \(RuntimeError\)$") as caught:
        converse(dialer, acceptor)
    assert caught.value.answer == b""


def test_the_secret_is_in_no_repr():
    assert "secret" not in repr(credentials(0))
