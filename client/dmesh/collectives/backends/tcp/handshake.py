"""Handshake: two peers prove to each other that they belong to the same cluster, before anything else.

```
dialer                                             acceptor
   -- HELLO    own identity, wanted peer, nonce ------>
   <- CHALLENGE  status, own identity, nonce ----------
   -- PROOF    HMAC(secret, HELLO, CHALLENGE) -------->
   <- WELCOME  status, HMAC(secret, all of that) ------
```

Every message has a fixed size. The proofs are HMAC-SHA256 under the cluster's peer secret over everything
said so far, with a label for each role. So they cannot be replayed (both sides put in a fresh nonce),
reflected, moved to another pair of ranks, processes or clusters, or downgraded to another version. The dialer
proves itself first: an outsider who can only dial learns nothing that was computed from the secret. Inside of
TLS the proofs also cover the identity of that one TLS connection (`Handshake.binding`), so that nobody can
sit between two peers and pass their proofs on.

A refusal carries its reason in one byte. Nothing here does any input or output.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dmesh.errors import PeerAuthenticationError

PROTOCOL: Final = 4
"""Version of the handshake and of the frames that follow it."""

_MAGIC: Final = b"dmeshpee"
_NONCE: Final = 32
# magic, version, padding, dialer's rank, acceptor's rank, number of a dedicated connection (0: frames),
# dialer's incarnation, acceptor's incarnation as the dialer knows it, dialer's generation, digest of the
# cluster id, nonce
_HELLO: Final = struct.Struct(f"!8sHHIIIQQQ32s{_NONCE}s")
# status, padding, rank, incarnation, nonce
_CHALLENGE: Final = struct.Struct(f"!B3sIQ{_NONCE}s")
# status, HMAC
_WELCOME: Final = struct.Struct(f"!B{hashlib.sha256().digest_size}s")

HELLO_SIZE: Final = _HELLO.size
CHALLENGE_SIZE: Final = _CHALLENGE.size
PROOF_SIZE: Final = hashlib.sha256().digest_size
WELCOME_SIZE: Final = _WELCOME.size

_SAME_SETTING: Final = "DMESH_PEER_TLS must be the same for all clients"
_OTHER_CLUSTER: Final = "it belongs to another cluster, or its job list (DTENSOR_JOBS) differs"
_OTHER_PROTOCOL: Final = "it does not speak dmesh's protocol"


class Status(enum.IntEnum):
    """The acceptor's answer to a dialer: go on, or the reason of a refusal, as the dialer reports it."""

    problem: str

    def __new__(cls, value: int, problem: str) -> Status:
        """Attach the reason to the number that is sent."""
        status = int.__new__(cls, value)
        status._value_ = value
        status.problem = problem
        return status

    # Never 21 or 22: a message that begins like that is TLS.
    OK = 0, ""
    MALFORMED = 1, "it did not understand this client's first message"
    WRONG_VERSION = 2, "it speaks another version of the protocol: install the same dmesh everywhere"
    WRONG_CLUSTER = 3, _OTHER_CLUSTER
    WRONG_RANK = 4, "another client listens at this address"
    UNKNOWN_RANK = 5, "it knows no client of this rank"
    WRONG_INCARNATION = 6, "one of the two processes was restarted"
    WRONG_PROOF = 7, "the secrets differ (DMESH_TOKEN must be the same for all clients)"
    CONNECTED = 8, "it has had a connection with this rank before"
    # The acceptor has not heard of the dialer's process yet: the dialer tries again.
    NOT_YET = 9, "it has not reached the barrier after which this process takes part"
    TLS_ONLY = 10, f"it encrypts its connections, and this client does not ({_SAME_SETTING})"
    PLAIN_ONLY = 11, f"it does not encrypt its connections, and this client does ({_SAME_SETTING})"
    # Never sent: TLS sends its own alerts.
    TLS_FAILED = 12, "its TLS failed"
    UNEXPECTED = 13, "it does not expect such a connection, or not any more"


ABOUT_TLS: Final = frozenset({Status.TLS_ONLY, Status.PLAIN_ONLY, Status.TLS_FAILED})
"""Refusals before either side has said who it is."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Identity and secret of a client."""

    rank: int
    incarnation: int  # random number of its process; 0 if processes are not distinguished
    cluster_id: bytes  # names this run of the cluster
    secret: Callable[[], bytes] = field(repr=False)  # shared by all clients of the cluster
    # How new its knowledge of the others' processes is.
    generation: Callable[[], int] = field(default=lambda: 0, repr=False)

    @property
    def cluster_digest(self) -> bytes:
        """Digest of the cluster id, sent before anything is proven."""
        return hashlib.sha256(b"dmesh cluster\0" + self.cluster_id).digest()

    def proof(self, role: bytes, said: bytes) -> bytes:
        """Return the proof of knowing the secret, over everything said so far."""
        try:
            secret = self.secret()
        except Exception as error:
            # Not known yet, or not any more. Only the kind of error: its text might show the secret.
            problem = f"the cluster's secret is not available ({type(error).__name__})"
            raise Refused(problem, Status.WRONG_PROOF) from error
        return hmac.digest(secret, b"dmesh peer " + role + b"\0" + said, "sha256")


class Refused(PeerAuthenticationError):
    """Failure of a handshake; `answer` is to be sent before the connection is closed."""

    def __init__(self, message: str, status: Status, answer: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class Handshake(ABC):
    """One side of a handshake."""

    def __init__(self, credentials: Credentials, first_size: int) -> None:
        self.done = False  # the other side has proven itself, and knows that it was accepted
        self.peer: int | None = None  # the other side's rank, as soon as it claims one
        self.binding = b""  # identity of the TLS connection around this handshake; set before any `feed`
        self._credentials = credentials
        self._said = b""  # all complete messages so far, of both sides
        self._received = b""
        self._size = first_size

    @property
    def wanted(self) -> int:
        """Missing bytes of the next expected message, 0 in the end; never read more than this."""
        return self._size - len(self._received)

    def begin(self) -> bytes:
        """Return the first message to send; empty on the accepting side."""
        return self._said

    def feed(self, data: bytes) -> bytes:
        """Take at most `wanted` bytes that came; return the bytes to send, or raise `Refused`."""
        assert len(data) <= self.wanted
        self._received += data
        if self.wanted:
            # A refusal is as long as the message that it replaces: nothing to decide yet.
            return b""
        message, self._received = self._received, b""
        return self._take(message)

    @abstractmethod
    def _take(self, message: bytes) -> bytes:
        """Take a complete message; return the answer."""

    def _proof(self, role: bytes) -> bytes:
        return self._credentials.proof(role, self._said + self.binding)


class Dialer(Handshake):
    """The side that connects, to a process (0: any) of a peer; `number` asks for a dedicated connection."""

    def __init__(
        self,
        credentials: Credentials,
        peer: int,
        incarnation: int,
        description: str,
        nonce: bytes | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(credentials, CHALLENGE_SIZE)
        self.peer = peer
        self._incarnation = incarnation
        self._description = description
        self._said = _HELLO.pack(
            _MAGIC,
            PROTOCOL,
            0,
            credentials.rank,
            peer,
            number,
            credentials.incarnation,
            incarnation,
            credentials.generation(),
            credentials.cluster_digest,
            nonce or secrets.token_bytes(_NONCE),
        )

    @property
    def has_proven(self) -> bool:
        """True once this side has proven itself, so that the other may have let it in."""
        return len(self._said) > HELLO_SIZE

    def refuse(self, status: Status, problem: str = "") -> Refused:
        """Return the refusal by the acceptor, or of it."""
        problem = problem or status.problem
        return Refused(f"the handshake with rank {self.peer} = {self._description} failed: {problem}", status)

    def _take(self, message: bytes) -> bytes:
        # The status comes first in both messages.
        status = next((known for known in Status if known == message[0]), None)
        if status is None:
            raise self.refuse(Status.MALFORMED, _OTHER_PROTOCOL)
        if status is not Status.OK:
            raise self.refuse(status)
        if len(self._said) == HELLO_SIZE:
            return self._on_challenge(message)
        _, proof = _WELCOME.unpack(message)
        if not hmac.compare_digest(proof, self._proof(b"acceptor")):
            raise self.refuse(Status.WRONG_PROOF, "it could not prove that it knows the cluster's secret")
        self._size, self.done = 0, True
        return b""

    def _on_challenge(self, message: bytes) -> bytes:
        _, padding, rank, incarnation, _ = _CHALLENGE.unpack(message)
        if any(padding):
            raise self.refuse(Status.MALFORMED, _OTHER_PROTOCOL)
        if rank != self.peer:
            raise self.refuse(Status.WRONG_RANK, f"rank {rank} listens at this address")
        if self._incarnation and incarnation != self._incarnation:
            problem = "another process than the registered one listens there"
            raise self.refuse(Status.WRONG_INCARNATION, problem)
        self._said += message
        proof = self._proof(b"dialer")
        self._said += proof
        self._size = WELCOME_SIZE
        return proof


class Acceptor(Handshake):
    """The side that listens; `may_enter` tells if a proven peer (rank, incarnation, number) is expected.

    A random number of 0 is an unknown process. With `tls_only`, the dialer should encrypt and does not: it is
    refused once it has said who it is.
    """

    def __init__(
        self,
        credentials: Credentials,
        incarnations: Mapping[int, int],
        nonce: bytes | None = None,
        *,
        tls_only: bool = False,
        may_enter: Callable[[int, int, int], bool] = lambda rank, incarnation, number: True,
    ) -> None:
        super().__init__(credentials, HELLO_SIZE)
        self.number = self._incarnation = 0
        self._incarnations = incarnations
        self._nonce = nonce or secrets.token_bytes(_NONCE)
        self._tls_only = tls_only
        self._may_enter = may_enter

    def feed(self, data: bytes) -> bytes:
        """See `Handshake.feed`."""
        # Another protocol is refused at the first wrong byte.
        start = (self._received + data)[: len(_MAGIC)]
        if not self._said and not _MAGIC.startswith(start):
            raise self.refuse(Status.MALFORMED, _OTHER_PROTOCOL)
        return super().feed(data)

    def refuse(self, status: Status, problem: str) -> Refused:
        """Return the refusal of the dialer."""
        if status is Status.TLS_FAILED:
            answer = b""  # TLS has sent an alert
        elif self._said:
            answer = _WELCOME.pack(status, bytes(PROOF_SIZE))
        else:
            answer = _CHALLENGE.pack(status, bytes(3), 0, 0, bytes(_NONCE))
        claim = "a connection" if self.peer is None else f"a connection that claims to be of rank {self.peer}"
        return Refused(f"refused {claim}: {problem}", status, answer)

    def refuse_tls(self, claimed: int | None) -> Refused:
        """Return the refusal of a dialer that encrypts while this client does not; `claimed` is its rank."""
        self.peer = claimed
        return self.refuse(Status.PLAIN_ONLY, f"it encrypts, and this client does not ({_SAME_SETTING})")

    def _take(self, message: bytes) -> bytes:
        return self._on_proof(message) if self._said else self._on_hello(message)

    def _on_hello(self, message: bytes) -> bytes:
        own, hello = self._credentials, _HELLO.unpack(message)
        _, version, zero, rank, wanted, number, incarnation, expected, generation, cluster, _ = hello
        if version != PROTOCOL:
            raise self.refuse(
                Status.WRONG_VERSION, f"it uses protocol version {version}, this client version {PROTOCOL}"
            )
        if zero:
            raise self.refuse(Status.MALFORMED, "its first message is malformed")
        if not hmac.compare_digest(cluster, own.cluster_digest):
            raise self.refuse(Status.WRONG_CLUSTER, _OTHER_CLUSTER)
        self.peer = rank
        if wanted != own.rank:
            raise self.refuse(Status.WRONG_RANK, f"it looks for rank {wanted}, this is {own.rank}")
        if rank not in self._incarnations:
            raise self.refuse(Status.UNKNOWN_RANK, f"there is no peer of rank {rank}")
        if self._tls_only:
            raise self.refuse(Status.TLS_ONLY, f"it does not use TLS, but this client does ({_SAME_SETTING})")
        known = self._incarnations[rank]
        if expected and expected != own.incarnation:
            raise self.refuse(Status.WRONG_INCARNATION, "it looks for a former process of this rank")
        if known and incarnation != known:
            if generation > own.generation():
                raise self.refuse(Status.NOT_YET, "its process is newer than the one known here so far")
            raise self.refuse(Status.WRONG_INCARNATION, "one of the two processes was restarted")
        self.number, self._incarnation = number, incarnation
        challenge = _CHALLENGE.pack(Status.OK, bytes(3), own.rank, own.incarnation, self._nonce)
        self._said = message + challenge
        self._size = PROOF_SIZE
        return challenge

    def _on_proof(self, message: bytes) -> bytes:
        if not hmac.compare_digest(message, self._proof(b"dialer")):
            problem = "it does not know the cluster's secret (DMESH_TOKEN must be the same for all clients)"
            raise self.refuse(Status.WRONG_PROOF, problem)
        assert self.peer is not None
        if not self._may_enter(self.peer, self._incarnation, self.number):
            if self.number:
                raise self.refuse(Status.UNEXPECTED, "its dedicated connection is not expected here")
            raise self.refuse(Status.CONNECTED, "this rank has been connected before")
        self._said += message
        welcome = _WELCOME.pack(Status.OK, self._proof(b"acceptor"))
        self._size, self.done = 0, True
        return welcome
