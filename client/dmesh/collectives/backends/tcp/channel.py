"""Channels of messages: posted sends and receives, and their matching with the frames of peers.

A collective opens one `Channel` for itself, named by (group, sequence number), and sends and receives bytes
in numbered steps. Every frame carries the channel's *signature* (the operation, dtype, shape and arguments,
as text): a frame with another signature than the receiver's is a mismatch, detected before a byte of it is
stored. Nothing here knows arrays, operations or schedules, or how frames travel.

The lock of `Channels` guards all matching. While it is held, calls of the transport or listener are deferred.
"""

from __future__ import annotations

import contextlib
import queue
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dmesh._locks import Lock
from dmesh.collectives.backends.tcp.frames import EAGER_LIMIT, SIGNATURE_LIMIT, Frame, Kind, agree
from dmesh.coordination.waiting import Bell, take
from dmesh.errors import CollectiveError, CollectiveValueError, PeerLostError

T = TypeVar("T")
Attempt = Callable[[float], bool]
"""Waits for something for at most so many seconds; True once it is there. Raises the channel's failure."""
Waits = Generator[Attempt, None, T]
"""Goes on whenever the attempt that it has yielded has succeeded."""
Deferred = list[Callable[[], None]]
"""Actions to run once the message queue's lock is released."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another client."""

    rank: int
    """Its client id."""
    addresses: tuple[str, ...]
    """HOST:PORT at which it listens, most preferred first."""
    incarnation: int
    """Random number of its process; 0 if unknown (no coordination service)."""
    description: str
    """Its name for messages, e.g. `/job:worker/task:2 (host h, pid 9)`."""


class FrameSender(Protocol):
    """Sending side of a transport. Never called with the message queue's lock held."""

    def transmit(self, peer: int, frame: Frame, send: Send | None, payload: bytes | None = None) -> None:
        """Send a frame after all earlier ones to that peer; it may overtake large payloads.

        With a `send`, its data is the payload (of one DATA frame, or of as many CHUNK frames as it takes),
        and `Channel.sent` is called when its memory is not needed any more. Nothing is sent for a withdrawn
        `send`. A CONTROL frame has a `payload` without a `send`.
        """

    def withdraw(self, send: Send) -> bool:
        """Stop using a send's memory. Return True if all its data has gone out, or will from a copy."""

    def resume(self, peer: int) -> None:
        """Read a peer again: there is room for frames after one was refused."""


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive. Arriving frames have claimed the first `claimed` bytes of its memory."""

    peer: int
    view: memoryview
    claimed: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class Send:
    """A posted send."""

    channel: Channel
    peer: int
    frame: Frame
    data: memoryview
    # The channels' lock guards these two.
    started: bool = False
    done: bool = False
    # These belong to the frame sender.
    withdrawn: bool = False
    written: bool = False


@dataclass(slots=True, eq=False)
class ReceiveBudget:
    """Bytes charged to one process of a peer for its buffered frames."""

    peer: int
    charged: int = 0
    refused: bool = False
    """True if a frame of the peer waits for room."""


@dataclass(slots=True, eq=False)
class BufferedFrame:
    """A complete frame that no receive has taken yet."""

    budget: ReceiveBudget
    cost: int
    frame: Frame
    payload: bytearray


class Channel:
    """The frames of one collective. Used by one thread; failed by any.

    A transport holds `guard` while it writes into posted memory: none is touched after `close` has returned.
    """

    def __init__(self, owner: Channels, group: int, sequence: int, signature: bytes, generation: int) -> None:
        self.generation = generation
        self.group = group
        self.sequence = sequence
        self.signature = signature
        self.guard = Lock()
        self.receives: dict[tuple[int, int], Receive] = {}
        self.sends: dict[tuple[int, int], Send] = {}
        self.failure: BaseException | None = None
        self.revoked = False
        self._owner = owner
        self._unsent = 0
        self._unexpected: dict[tuple[int, int, bool], BufferedFrame] = {}  # by peer, step, is READY
        self._mismatched: set[int] = set()
        # Wakes the one thread that waits. Not a condition: Ctrl-C can leave that locked forever, and with it
        # the whole message queue; see `dmesh.coordination.waiting`.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"collective {self.sequence} of group {self.group}"

    # -- the collective's side -----------------------------------------------------------------------

    def send(self, peer: int, step: int, data: memoryview) -> None:
        """Start to send `data` (bytes, C-contiguous); it must not change before `flush` returns.

        Steps are numbered by the sender; a (peer, step) pair is used once per channel and direction.
        """
        at = self._address(peer, step)
        data = _as_bytes(data, writable=False)
        kind = Kind.DATA if data.nbytes <= EAGER_LIMIT else Kind.OFFER
        frame = self._frame(kind, step, data.nbytes)
        send = Send(self, peer, frame, data)
        owner = self._owner
        deferred: Deferred = []
        with owner.lock:
            self._check()
            if at in self.sends:
                raise CollectiveValueError(f"step {step} to rank {peer} of {self.name} is sent already")
            self.sends[at] = send
            self._unsent += 1
            if self._is_lost(peer):
                return
            if kind is Kind.DATA:
                send.started = True
                deferred.append(lambda: owner.sender.transmit(peer, frame, send))
            elif (ready := self._unexpected.pop((*at, True), None)) is not None:
                owner.refund(ready, deferred)
                self._start_send(send, ready.frame.length, deferred)
            else:
                deferred.append(lambda: owner.sender.transmit(peer, frame, None))
        run(deferred)

    def receive(self, peer: int, step: int, into: memoryview) -> Receive:
        """Start to receive exactly `into.nbytes` bytes of that step from `peer`."""
        at = self._address(peer, step)
        receive = Receive(peer, _as_bytes(into, writable=True))
        owner = self._owner
        deferred: Deferred = []
        with owner.lock:
            self._check()
            if at in self.receives:
                raise CollectiveValueError(f"step {step} from rank {peer} of {self.name} is posted already")
            self.receives[at] = receive
            if (buffered := self._unexpected.pop((*at, False), None)) is not None:
                self._settle(receive, buffered, deferred)
            open_still = not receive.done and self.failure is None and not self._is_lost(peer)
            if open_still and into.nbytes > EAGER_LIMIT:
                ready = self._frame(Kind.READY, step, into.nbytes)
                deferred.append(lambda: owner.sender.transmit(peer, ready, None))
        run(deferred)
        return receive

    def wait(self, receives: Sequence[Receive], timeout: float) -> bool:
        """Wait until all are done; return False after `timeout` seconds. Raises the channel's failure."""
        return self._wait(lambda: all(receive.done for receive in receives), timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until the system has taken all sends; return False on timeout. Raises like `wait`."""
        return self._wait(lambda: self._unsent == 0, timeout)

    def waiting_for(self) -> tuple[int, ...]:
        """Return the ranks whose frames (or readiness to take ours) are still missing, sorted."""
        with self._owner.lock:
            ranks = {receive.peer for receive in self.receives.values() if not receive.done}
            ranks.update(send.peer for send in self.sends.values() if not send.done)
        return tuple(sorted(ranks))

    def fail(self, error: BaseException) -> None:
        """Make every pending and later `wait` and `flush` raise `error`. Only the first failure counts."""
        with self._owner.lock:
            self.fail_locked(error)

    def close(self) -> None:
        """Forget the channel and release its buffers; no memory is touched after it returns."""
        owner = self._owner
        deferred: Deferred = []
        with owner.lock:
            if self.revoked:
                return
            self.revoked = True
            owner.forget(self, deferred)
            for buffered in self._unexpected.values():
                owner.refund(buffered, deferred)
            self._unexpected.clear()
            unfinished = [send for send in self.sends.values() if not send.done]
            self._wake()
        # A transport that was writing into our memory at that moment holds the guard; no other begins to.
        with self.guard:
            self.receives.clear()
        for send in unfinished:
            if not owner.sender.withdraw(send) and self.generation == owner.generation:
                cancel = send.frame._replace(kind=Kind.CANCEL, length=0)
                owner.sender.transmit(send.peer, cancel, None)
        self.sends.clear()
        run(deferred)

    def _wait(self, finished: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            with self._owner.lock:
                self._check()
                if finished():
                    return True
            if (remaining := deadline - time.monotonic()) <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                take(self._wakeups, remaining)

    def _frame(self, kind: Kind, step: int, length: int) -> Frame:
        return Frame(kind, self.group, self.sequence, step, length, self.signature, self.generation)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.revoked:
            raise CollectiveError(f"{self.name} is closed")

    def _address(self, peer: int, step: int) -> tuple[int, int]:
        self._owner.peer(peer)
        if not 0 <= step < 2**32:
            raise CollectiveValueError(f"step {step} is not within 0 to 2**32 - 1")
        return peer, step

    # -- the message queue's side; with its lock held, except for `sent` -------------------------------

    def sent(self, send: Send) -> None:
        """Complete a send whose memory the transport does not need any more. Without the lock."""
        with self._owner.lock:
            send.done = True
            self._unsent -= 1
            if self._unsent == 0:
                self._wake()

    def fail_locked(self, error: BaseException) -> None:
        """Fail the channel, with the lock held."""
        if self.failure is None:
            self.failure = error
            self._wake()

    def _is_lost(self, peer: int) -> bool:
        """Fail the channel if a peer is gone."""
        if (reason := self._owner.departures.get(peer)) is not None:
            self.fail_locked(PeerLostError(f"{self._owner.describe(peer)} is gone: {reason}", peer))
        return reason is not None

    def received(self, receive: Receive) -> None:
        """Complete a receive."""
        receive.done = True
        self._wake()

    def match(self, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Take a complete, charged frame: match it, or buffer it until its send or receive is posted."""
        frame, peer, refund = buffered.frame, buffered.budget.peer, self._owner.refund
        at, ready = (peer, frame.step), frame.kind is Kind.READY
        if not self.signature_fits(peer, frame, deferred):
            refund(buffered, deferred)
        elif ready and (send := self.sends.get(at)) is not None:
            refund(buffered, deferred)
            self._start_send(send, frame.length, deferred)
        elif not ready and (receive := self.receives.get(at)) is not None:
            self._settle(receive, buffered, deferred)
        elif (earlier := self._unexpected.setdefault((*at, ready), buffered)) is not buffered:
            if frame.kind is Kind.CANCEL:
                self._unexpected[*at, ready] = buffered
            refund(earlier if frame.kind is Kind.CANCEL else buffered, deferred)

    def _settle(self, receive: Receive, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Match a posted receive with a buffered DATA, OFFER or CANCEL frame."""
        self._owner.refund(buffered, deferred)
        if receive.done or self.failure is not None:
            return
        frame = buffered.frame
        if frame.kind is Kind.CANCEL:
            step = f"step {frame.step} of {self.name}"
            self._break(receive.peer, f"gave up sending {step} before all of it had been sent")
        elif self.length_fits(receive, frame) and frame.kind is Kind.DATA and not receive.claimed:
            receive.view[:] = buffered.payload
            self.received(receive)

    def _start_send(self, send: Send, expected: int, deferred: Deferred) -> None:
        """Send a large payload, now that its receiver is ready for `expected` bytes."""
        if send.started or self.failure is not None:
            return
        transmit = self._owner.sender.transmit
        if expected != send.data.nbytes:
            theirs = f"expects {expected} bytes in step {send.frame.step} of {self.name}"
            self._break(send.peer, f"{theirs}, this rank sends {send.data.nbytes}")
            # If READY came before the OFFER went out, the receiver does not know of the difference yet.
            deferred.append(lambda: transmit(send.peer, send.frame, None))
            return
        send.started = True
        frame = send.frame._replace(kind=Kind.CHUNK, signature=b"")
        deferred.append(lambda: transmit(send.peer, frame, send))

    def length_fits(self, receive: Receive, frame: Frame) -> bool:
        """Compare the lengths of a frame and its receive; a difference fails the channel."""
        if frame.length == receive.view.nbytes:
            return True
        theirs = f"sends {frame.length} bytes in step {frame.step} of {self.name}"
        self._break(receive.peer, f"{theirs}, this rank expects {receive.view.nbytes}")
        return False

    def signature_fits(self, peer: int, frame: Frame, deferred: Deferred) -> bool:
        """Compare the signatures of a frame and the channel; a difference is reported once per peer."""
        if frame.signature == self.signature or agree(frame.signature, self.signature):
            return True
        if peer not in self._mismatched:
            self._mismatched.add(peer)
            deferred.append(lambda: self._owner.report_mismatch(self, peer, frame.signature))
        return False

    def _break(self, peer: int, what: str) -> None:
        self.fail_locked(CollectiveError(f"{self._owner.describe(peer)} {what}"))

    def _wake(self) -> None:
        self._wakeups.put(None)


class Steps:
    """Steps of a call in its channel, one wait after the other; see `base.Operation`.

    A group of one has no channel.
    """

    def __init__(self, channel: Channel | None, steps: Waits[None]) -> None:
        self._channel = channel
        self._steps = steps
        self._attempt: Attempt | None = lambda seconds: True  # the steps begin with the first progress

    def progress(self, seconds: float) -> bool:
        """Go on with the steps; see `Operation.progress`."""
        deadline = time.monotonic() + seconds
        while (attempt := self._attempt) is not None:
            if not attempt(max(deadline - time.monotonic(), 0.0)):
                return False
            self._attempt = next(self._steps, None)
        return True

    @property
    def complete(self) -> bool:
        """True once the last step is done."""
        return self._attempt is None

    def missing(self) -> tuple[int, ...]:
        """Return the ranks whose messages are missing."""
        return () if self._channel is None else self._channel.waiting_for()

    def fail(self, error: BaseException) -> None:
        """Fail the channel."""
        if self._channel is not None:
            self._channel.fail(error)

    def revoke(self) -> None:
        """Close the channel: no memory is touched after that."""
        if self._channel is not None:
            self._channel.close()
        self._steps.close()


class Channels(ABC):
    """Open channels of one client, and the frames that wait for one; `transport.MessageQueue` feeds them."""

    def __init__(self, rank: int, sender: FrameSender) -> None:
        self.rank = rank
        self.sender = sender
        self.lock = Lock()
        self.generation = 0
        self.peers: dict[int, Peer] = {}
        self.departures: dict[int, str] = {}  # why a peer is gone: it is lost or has left
        self._channels: dict[tuple[int, int], Channel] = {}
        # Frames of channels that are not open yet, by generation and group, then number; others hold theirs.
        self._early: dict[tuple[int, int], dict[int, list[BufferedFrame]]] = {}
        self.arrivals = Bell()
        """Rings when a frame waits for its channel."""
        self._budgets: dict[int, ReceiveBudget] = {}
        self._closed: dict[int, ClosedSequences] = {}
        self._over: BaseException | None = None

    @abstractmethod
    def report_mismatch(self, channel: Channel, peer: int, signature: bytes) -> None:
        """Report a peer's other signature, and fail the channel. Without the lock."""

    def describe(self, rank: int) -> str:
        """Return a peer's name for messages."""
        peer = self.peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank} = {peer.description}"

    def peer(self, rank: int) -> Peer:
        """Return a peer; raise CollectiveValueError if there is none of that rank."""
        peer = self.peers.get(rank)
        if peer is None:
            problem = "is this client itself" if rank == self.rank else "is no peer of this transport"
            raise CollectiveValueError(
                f"rank {rank} {problem}; the peers are {sorted(self.peers) or 'none (not started)'}"
            )
        return peer

    def gone(self, peer: int) -> str | None:
        """Return why a peer is gone: it is lost or has left; None if it is there."""
        with self.lock:
            return self.departures.get(peer)

    def open(self, group: int, sequence: int, signature: bytes, generation: int = 0) -> Channel:
        """Open the channel of one collective. Frames that came before are delivered to it at once.

        Raises CollectiveError if `generation` is not the current one.
        """
        if not 0 <= group < 2**64 or not 0 <= sequence < 2**64:
            raise CollectiveValueError(
                f"a channel's group ({group}) and sequence ({sequence}) must be 0 to 2**64 - 1"
            )
        if len(signature) > SIGNATURE_LIMIT:
            raise CollectiveValueError(
                f"a channel's signature has {len(signature)} bytes, at most {SIGNATURE_LIMIT} are allowed"
            )
        key = (group, sequence)
        channel = Channel(self, group, sequence, signature, generation)
        deferred: Deferred = []
        with self.lock:
            if self._over is not None:
                raise self._over
            if generation != self.generation:
                raise CollectiveError(
                    f"channel {sequence} of group {group} is of generation {generation}, "
                    f"but it is generation {self.generation} now"
                )
            if key in self._channels or sequence in self._closed.get(group, ()):
                state = "open" if key in self._channels else "over"
                raise CollectiveError(f"channel {sequence} of group {group} is already {state}")
            self._channels[key] = channel
            early = self._early.get((generation, group), {})
            for buffered in early.pop(sequence, ()):
                channel.match(buffered, deferred)
            if not early:
                self._early.pop((generation, group), None)
        run(deferred)
        return channel

    def waiting(self, group: int, generation: int) -> list[tuple[int, bytes]]:
        """Return sequence number and signature of what waits for a channel of a group, in order."""
        with self.lock:
            early = self._early.get((generation, group), {})
            return sorted(
                (sequence, frame.signature)
                for sequence, frames in early.items()
                for frame in [frames[0].frame]
                if frame.kind is not Kind.READY
            )

    def keep_early(self, buffered: BufferedFrame) -> None:
        """Buffer a frame until its channel opens; with the lock held."""
        frame = buffered.frame
        early = self._early.setdefault((frame.generation, frame.group), {})
        early.setdefault(frame.sequence, []).append(buffered)

    def forget(self, channel: Channel, deferred: Deferred) -> None:
        """Remove a channel that closes; with the lock held."""
        group = channel.group
        if self._channels.get((group, channel.sequence)) is not channel:
            return  # of an earlier generation, of which nothing is known any more
        del self._channels[group, channel.sequence]
        closed = self._closed.setdefault(group, ClosedSequences())
        if closed.add(channel.sequence, lambda: self._awaited(group)):
            mine = (self.generation, group)
            self._drop(lambda key, peer: key[:2] == mine and key[2] in closed, deferred)

    def _awaited(self, group: int) -> set[int]:
        """Return the numbers of a group's channels that are open, or for which data waits; with the lock."""
        early = self._early.get((self.generation, group), {})
        waiting = {number for number, frames in early.items() if frames[0].frame.kind is not Kind.READY}
        return waiting | {number for at, number in self._channels if at == group}

    def close_groups(self, groups: Collection[int]) -> None:
        """Close all channels of some groups, in this generation: their frames are dropped, now and later."""
        deferred: Deferred = []
        with self.lock:
            for group in groups:
                self._closed[group] = ClosedSequences.all()
            self._drop(lambda key, peer: key[0] == self.generation and key[1] in groups, deferred)
        run(deferred)

    def refund(self, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Return a buffered frame's charge; with the lock held."""
        budget = buffered.budget
        budget.charged -= buffered.cost
        # A former process of the peer has another account, and nothing waits on its behalf.
        if budget.refused and self._budgets.get(budget.peer) is budget:
            budget.refused = False
            deferred.append(lambda: self.sender.resume(budget.peer))

    def _drop(self, stale: Callable[[tuple[int, int, int], int], bool], deferred: Deferred) -> None:
        """Drop the frames whose channels will never open, by channel and peer; with the lock held."""
        everything = list(self._early.items())
        self._early.clear()
        for key, by_sequence in everything:
            for sequence, frames in by_sequence.items():
                for buffered in frames:
                    if stale((*key, sequence), buffered.budget.peer):
                        self.refund(buffered, deferred)
                    else:
                        self.keep_early(buffered)


class ClosedSequences:
    """Sequence numbers of a group's closed channels, stored as disjoint ranges in bounded memory.

    Collectives of a group close nearly in order, so a handful of ranges is enough. Numbers that are never
    opened here leave gaps; beyond `limit` ranges the two lowest are joined that have nothing awaited between
    them, and the numbers between them count as closed.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._bounds: list[int] = []  # first number of a range, first one after it, and so on

    @classmethod
    def all(cls) -> ClosedSequences:
        """Return all sequence numbers."""
        made = cls()
        made._bounds = [0, 2**64]
        return made

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and bisect_right(self._bounds, number) % 2 == 1

    def add(self, number: int, awaited: Callable[[], Collection[int]] = tuple) -> bool:
        """Add a number; return True if others that were never added, nor are awaited, count as closed now."""
        if number in self:
            return False
        for bound in (number, number + 1):
            at = bisect_left(self._bounds, bound)
            if self._bounds[at : at + 1] == [bound]:
                del self._bounds[at]  # here the number joins a neighbor's range
            else:
                self._bounds.insert(at, bound)
        if len(self._bounds) <= 2 * self._limit:
            return False
        kept, bounds = awaited(), self._bounds
        for at in range(1, len(bounds) - 1, 2):
            if not any(bounds[at] <= other < bounds[at + 1] for other in kept):
                del bounds[at : at + 2]
                return True
        return False


def run(deferred: Deferred) -> None:
    """Run the actions that had to wait for the lock's release."""
    for action in deferred:
        action()


def _as_bytes(data: memoryview, *, writable: bool) -> memoryview:
    if not data.c_contiguous or (writable and data.readonly):
        problem = "read-only" if data.c_contiguous else "not C-contiguous"
        raise CollectiveValueError(f"memory to {'receive into' if writable else 'send'} is {problem}")
    if data.nbytes == 0:
        return memoryview(bytearray())  # a view with a 0 in its shape cannot be cast
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")
