"""Brings frames and what is posted together. All of it happens with the mailbox's lock held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from dmesh.collectives.transport.base import TransportListener
from dmesh.collectives.transport.channel import MailboxChannel
from dmesh.collectives.transport.frames import Frame, Kind
from dmesh.collectives.transport.records import Kept, Receive, Send, Wire
from dmesh.errors import CollectiveError, CollectiveMismatchError

Deferred = list[Callable[[], None]]
"""What is to be done once the lock is released."""


class Matching(ABC):
    """The part of a `Mailbox` that decides what becomes of a frame whose channel is open."""

    rank: int
    wire: Wire
    _listener: TransportListener | None

    @abstractmethod
    def describe(self, rank: int) -> str:
        """Names a peer to a person."""

    @abstractmethod
    def refund(self, kept: Kept, deferred: Deferred) -> None:
        """Gives back what a kept frame was charged."""

    @staticmethod
    @abstractmethod
    def tell(call: Callable[[], None]) -> None:
        """Calls the listener."""

    def match(self, channel: MailboxChannel, kept: Kept, deferred: Deferred) -> None:
        """Gives a complete, charged frame to its channel."""
        frame, at = kept.frame, (kept.peer, kept.frame.step)
        if not self.signature_fits(channel, kept.peer, frame, deferred):
            self.refund(kept, deferred)
        elif frame.kind is Kind.READY:
            send = channel.sends.get(at)
            if send is not None:
                self.refund(kept, deferred)
                self.start_send(channel, send, frame.length, deferred)
            elif at in channel.readies:
                self.refund(kept, deferred)
            else:
                channel.readies[at] = kept
        else:
            receive = channel.receives.get(at)
            if receive is not None:
                self.settle(channel, receive, kept, deferred)
                return
            earlier = channel.waiting.get(at)
            if earlier is not None and frame.kind is not Kind.CANCEL:
                self.refund(kept, deferred)
                return
            if earlier is not None:
                self.refund(earlier, deferred)
            channel.waiting[at] = kept

    def settle(self, channel: MailboxChannel, receive: Receive, kept: Kept, deferred: Deferred) -> None:
        """Brings a posted receive and a kept DATA, OFFER or CANCEL frame together."""
        self.refund(kept, deferred)
        if receive.done or channel.failure is not None:
            return
        frame = kept.frame
        if frame.kind is Kind.CANCEL:
            channel.fail_locked(
                CollectiveError(
                    f"{self.describe(kept.peer)} gave up sending step {frame.step} of {channel.name} "
                    "before all of it had been sent"
                )
            )
        elif self.length_fits(channel, receive, frame) and kept.payload is not None and not receive.started:
            receive.view[:] = kept.payload
            receive.started = receive.done = True
            channel.ring()

    def start_send(self, channel: MailboxChannel, send: Send, expected: int, deferred: Deferred) -> None:
        """The receiver of a large payload is ready for `expected` bytes."""
        if send.started or channel.failure is not None:
            return
        if expected != send.data.nbytes:
            channel.fail_locked(
                CollectiveError(
                    f"{self.describe(send.peer)} expects {expected} bytes in step {send.frame.step} of "
                    f"{channel.name}, this rank sends {send.data.nbytes}"
                )
            )
            # If READY came before there was anything to offer, the receiver does not know yet.
            deferred.append(lambda: self.wire.transmit(send.peer, send.frame, None))
            return
        send.started = True
        frame = send.frame._replace(kind=Kind.CHUNK, signature=b"")
        deferred.append(lambda: self.wire.transmit(send.peer, frame, send))

    def length_fits(self, channel: MailboxChannel, receive: Receive, frame: Frame) -> bool:
        """Compares the lengths of a frame and its receive; a difference fails the channel."""
        if frame.length == receive.view.nbytes:
            return True
        channel.fail_locked(
            CollectiveError(
                f"{self.describe(receive.peer)} sends {frame.length} bytes in step {frame.step} of "
                f"{channel.name}, this rank expects {receive.view.nbytes}"
            )
        )
        return False

    def signature_fits(self, channel: MailboxChannel, peer: int, frame: Frame, deferred: Deferred) -> bool:
        """Compares the signatures of a frame and its channel; a difference fails the channel."""
        if frame.signature == channel.signature:
            return True
        if peer not in channel.mismatched:
            channel.mismatched.add(peer)
            deferred.append(lambda: self._report_mismatch(channel, peer, frame.signature))
        return False

    def _report_mismatch(self, channel: MailboxChannel, peer: int, signature: bytes) -> None:
        listener = self._listener
        if listener is not None:
            self.tell(
                lambda: listener.on_mismatch(
                    channel.group, channel.sequence, peer, signature, channel.generation
                )
            )
        # The listener can say it better and comes first; but whatever it does, the channel must not wait for
        # ever.
        channel.fail(
            CollectiveMismatchError(
                f"{self.describe(peer)} takes part in {channel.name} with {_printable(signature)}, "
                f"this rank ({self.rank}) with {_printable(channel.signature)}"
            )
        )


def _printable(signature: bytes) -> str:
    text = signature.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 300 else text[:300] + "...")
