"""Channel of one collective: its posted sends and receives, and the matching of arriving frames with them.

Independent of how frames travel. A `MessageQueue` opens channels and routes frames to them.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dmesh.collectives.backends.tcp.frames import EAGER_LIMIT, Frame, Kind
from dmesh.collectives.backends.tcp.transport import Channel, Completion, Peer
from dmesh.collectives.backends.tcp.unexpected import BufferedFrame
from dmesh.coordination.waiting import take
from dmesh.errors import CollectiveError, CollectiveValueError, PeerLostError

Deferred = list[Callable[[], None]]
"""Actions to run once the message queue's lock is released."""


class Receive:
    """A posted receive: the `Completion` that `Channel.receive` returns.

    Arriving frames have claimed the first `claimed` bytes of its memory; `filled` bytes are in place.
    """

    __slots__ = ("claimed", "done", "filled", "peer", "started", "step", "view")

    def __init__(self, peer: int, step: int, view: memoryview) -> None:
        self.peer = peer
        self.step = step
        self.view = view
        self.claimed = 0
        self.filled = 0
        self.started = False
        self.done = False


class Send:
    """A posted send.

    The message queue's lock guards `started` and `done`; `withdrawn` and `written` belong to the frame
    sender.
    """

    __slots__ = ("channel", "data", "done", "frame", "peer", "started", "withdrawn", "written")

    def __init__(self, channel: MessageChannel, peer: int, frame: Frame, data: memoryview) -> None:
        self.channel = channel
        self.peer = peer
        self.frame = frame
        self.data = data
        self.started = False
        self.done = False
        self.withdrawn = False
        self.written = False


class Destination:
    """Memory for the payload of an arriving frame.

    The transport fills it in as many pieces as it likes, each under `guard` and only while `view` is not
    None; otherwise it discards the bytes. Once all `size` bytes have come, stored or not, it calls
    `MessageQueue.payload_received`.
    """

    __slots__ = ("_memory", "buffered", "channel", "guard", "receive", "size")

    def __init__(
        self,
        size: int,
        memory: memoryview | None = None,
        channel: MessageChannel | None = None,
        receive: Receive | None = None,
        buffered: BufferedFrame | None = None,
    ) -> None:
        self.size = size
        self.channel = channel
        self.receive = receive
        self.buffered = buffered
        self.guard = threading.Lock() if channel is None else channel.guard
        self._memory = memory

    @property
    def view(self) -> memoryview | None:
        """The memory to fill; None if the bytes are not needed (any more). Only valid under `guard`."""
        if self.channel is not None and self.channel.revoked:
            return None
        return self._memory


class FrameSender(Protocol):
    """Sending side of a transport. Never called with the message queue's lock held."""

    def transmit(self, peer: int, frame: Frame, send: Send | None) -> None:
        """Send a frame after all earlier ones to that peer; it may overtake large payloads.

        With a `send`, its data is the payload (of one DATA frame, or of as many CHUNK frames as it takes),
        and `MessageQueue.sent` is called when its memory is not needed any more. Nothing is sent for a
        withdrawn `send`.
        """

    def withdraw(self, send: Send) -> bool:
        """Stop using a send's memory. Return True if all its data has gone out, or will from a copy."""

    def resume(self, peer: int) -> None:
        """Read a peer again: there is room for frames after one was refused."""


class ChannelOwner(Protocol):
    """The part of a message queue that its channels use."""

    lock: threading.Lock
    """Guards all state of the owner and its channels."""
    sender: FrameSender
    """Carries frames away."""
    generation: int
    """The current one."""

    def peer(self, rank: int) -> Peer:
        """Return a peer; raise CollectiveValueError if there is none of that rank."""

    def describe(self, rank: int) -> str:
        """Return a peer's name for messages."""

    def lost_error(self, peer: int) -> PeerLostError | None:
        """Return the error of a peer that is gone; None if it is not. With the lock held."""

    def refund(self, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Return a buffered frame's charge. With the lock held."""

    def forget(self, channel: MessageChannel, deferred: Deferred) -> None:
        """Remove a channel that closes. With the lock held."""

    def report_mismatch(self, channel: MessageChannel, peer: int, signature: bytes) -> None:
        """Report a peer's other signature to the listener, and fail the channel. Without the lock."""


class MessageChannel(Channel):
    """A channel whose frames come through a message queue.

    The owner's lock guards all attributes. While a transport writes into posted memory it holds `guard`, so
    `close` can promise that no memory is touched afterwards.

    Args:
        owner: Its message queue.
        group: Number of the group.
        sequence: Number of the collective in its group.
        signature: Text that must be the same on both sides.
        generation: Generation of the groups.
    """

    def __init__(
        self, owner: ChannelOwner, group: int, sequence: int, signature: bytes, generation: int = 0
    ) -> None:
        self.generation = generation
        self.group = group
        self.sequence = sequence
        self.signature = signature
        self.guard = threading.Lock()
        self.receives: dict[tuple[int, int], Receive] = {}
        self.sends: dict[tuple[int, int], Send] = {}
        self.failure: BaseException | None = None
        self.revoked = False
        self._owner = owner
        self._unsent = 0
        self._unexpected: dict[tuple[int, int], BufferedFrame] = {}
        self._readies: dict[tuple[int, int], BufferedFrame] = {}
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
        """Start to send; see `Channel.send`."""
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
            lost = owner.lost_error(peer)
            if lost is not None:
                self.fail_locked(lost)
                return
            if kind is Kind.DATA:
                send.started = True
                deferred.append(lambda: owner.sender.transmit(peer, frame, send))
            elif (ready := self._readies.pop(at, None)) is not None:
                owner.refund(ready, deferred)
                self._start_send(send, ready.frame.length, deferred)
            else:
                deferred.append(lambda: owner.sender.transmit(peer, frame, None))
        run(deferred)

    def receive(self, peer: int, step: int, into: memoryview) -> Completion:
        """Start to receive; see `Channel.receive`."""
        at = self._address(peer, step)
        into = _as_bytes(into, writable=True)
        receive = Receive(peer, step, into)
        owner = self._owner
        deferred: Deferred = []
        with owner.lock:
            self._check()
            if at in self.receives:
                raise CollectiveValueError(f"step {step} from rank {peer} of {self.name} is posted already")
            self.receives[at] = receive
            buffered = self._unexpected.pop(at, None)
            if buffered is not None:
                self._settle(receive, buffered, deferred)
            if not receive.done and self.failure is None:
                lost = owner.lost_error(peer)
                if lost is not None:
                    self.fail_locked(lost)
                elif into.nbytes > EAGER_LIMIT:
                    ready = self._frame(Kind.READY, step, into.nbytes)
                    deferred.append(lambda: owner.sender.transmit(peer, ready, None))
        run(deferred)
        return receive

    def wait(self, completions: Sequence[Completion], timeout: float | None) -> bool:
        """Wait for receives; see `Channel.wait`."""
        return self._wait(lambda: all(completion.done for completion in completions), timeout)

    def flush(self, timeout: float | None) -> bool:
        """Wait for sends; see `Channel.flush`."""
        return self._wait(lambda: self._unsent == 0, timeout)

    def waiting_for(self) -> tuple[int, ...]:
        """Return the ranks that block this channel; see `Channel.waiting_for`."""
        with self._owner.lock:
            ranks = {receive.peer for receive in self.receives.values() if not receive.done}
            ranks.update(send.peer for send in self.sends.values() if not send.done)
        return tuple(sorted(ranks))

    def fail(self, error: BaseException) -> None:
        """Fail the channel; see `Channel.fail`."""
        with self._owner.lock:
            self.fail_locked(error)

    def close(self) -> None:
        """Forget the channel; see `Channel.close`."""
        owner = self._owner
        deferred: Deferred = []
        with owner.lock:
            if self.revoked:
                return
            self.revoked = True
            owner.forget(self, deferred)
            for buffered in (*self._unexpected.values(), *self._readies.values()):
                owner.refund(buffered, deferred)
            self._unexpected.clear()
            self._readies.clear()
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

    def _wait(self, finished: Callable[[], bool], timeout: float | None) -> bool:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._owner.lock:
                self._check()
                if finished():
                    return True
            remaining = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if remaining <= 0:
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

    # -- the message queue's side; with its lock held --------------------------------------------------

    def fail_locked(self, error: BaseException) -> None:
        """Fail the channel, with the lock held."""
        if self.failure is None:
            self.failure = error
            self._wake()

    def sent(self, send: Send) -> None:
        """Complete a send: all its data is on its way."""
        send.done = True
        if not self.revoked:
            self._unsent -= 1
            if self._unsent == 0:
                self._wake()

    def received(self, receive: Receive, size: int) -> None:
        """Count `size` bytes that were written into a receive's memory."""
        if not self.revoked:
            receive.filled += size
            if receive.filled == receive.view.nbytes:
                receive.done = True
                self._wake()

    def destination(self, peer: int, frame: Frame, deferred: Deferred) -> Destination | None:
        """Return the destination of a DATA frame; None if its receive is not posted yet."""
        discard = Destination(frame.length)
        if not self._signature_fits(peer, frame, deferred):
            return discard
        receive = self.receives.get((peer, frame.step))
        if receive is None:
            return None
        if receive.started or self.failure is not None or not self._length_fits(receive, frame):
            return discard
        receive.started = True
        return Destination(frame.length, receive.view, self, receive)

    def match(self, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Take a complete, charged frame: match it, or buffer it until its send or receive is posted."""
        frame, at = buffered.frame, (buffered.peer, buffered.frame.step)
        refund = self._owner.refund
        if not self._signature_fits(buffered.peer, frame, deferred):
            refund(buffered, deferred)
        elif frame.kind is Kind.READY:
            send = self.sends.get(at)
            if send is not None:
                refund(buffered, deferred)
                self._start_send(send, frame.length, deferred)
            elif at in self._readies:
                refund(buffered, deferred)
            else:
                self._readies[at] = buffered
        elif (receive := self.receives.get(at)) is not None:
            self._settle(receive, buffered, deferred)
        else:
            earlier = self._unexpected.get(at)
            if earlier is not None and frame.kind is not Kind.CANCEL:
                refund(buffered, deferred)
                return
            if earlier is not None:
                refund(earlier, deferred)
            self._unexpected[at] = buffered

    def _settle(self, receive: Receive, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Match a posted receive with a buffered DATA, OFFER or CANCEL frame."""
        self._owner.refund(buffered, deferred)
        if receive.done or self.failure is not None:
            return
        frame = buffered.frame
        if frame.kind is Kind.CANCEL:
            self.fail_locked(
                CollectiveError(
                    f"{self._owner.describe(buffered.peer)} gave up sending step {frame.step} of {self.name} "
                    "before all of it had been sent"
                )
            )
        elif self._length_fits(receive, frame) and buffered.payload is not None and not receive.started:
            receive.view[:] = buffered.payload
            receive.started = receive.done = True
            self._wake()

    def _start_send(self, send: Send, expected: int, deferred: Deferred) -> None:
        """Send a large payload, now that its receiver is ready for `expected` bytes."""
        if send.started or self.failure is not None:
            return
        transmit = self._owner.sender.transmit
        if expected != send.data.nbytes:
            self.fail_locked(
                CollectiveError(
                    f"{self._owner.describe(send.peer)} expects {expected} bytes in step {send.frame.step} "
                    f"of {self.name}, this rank sends {send.data.nbytes}"
                )
            )
            # If READY came before the OFFER went out, the receiver does not know of the difference yet.
            deferred.append(lambda: transmit(send.peer, send.frame, None))
            return
        send.started = True
        frame = send.frame._replace(kind=Kind.CHUNK, signature=b"")
        deferred.append(lambda: transmit(send.peer, frame, send))

    def _length_fits(self, receive: Receive, frame: Frame) -> bool:
        """Compare the lengths of a frame and its receive; a difference fails the channel."""
        if frame.length == receive.view.nbytes:
            return True
        self.fail_locked(
            CollectiveError(
                f"{self._owner.describe(receive.peer)} sends {frame.length} bytes in step {frame.step} of "
                f"{self.name}, this rank expects {receive.view.nbytes}"
            )
        )
        return False

    def _signature_fits(self, peer: int, frame: Frame, deferred: Deferred) -> bool:
        """Compare the signatures of a frame and the channel; a difference is reported once per peer."""
        if frame.signature == self.signature:
            return True
        if peer not in self._mismatched:
            self._mismatched.add(peer)
            deferred.append(lambda: self._owner.report_mismatch(self, peer, frame.signature))
        return False

    def _wake(self) -> None:
        self._wakeups.put(None)


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
