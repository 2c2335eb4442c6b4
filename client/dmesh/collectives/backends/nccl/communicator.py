"""An NCCL communicator, and the thread that uses it.

Three properties of NCCL decide the design:

- Calls that look asynchronous can block, without limit if a peer is dead: the creation of a communicator
  always, the first operations while they connect. So each communicator has a thread that makes all calls, and
  other threads wait for it with a time limit.
- All members must abort a communicator that has failed. That is allowed while another thread is blocked in it
  (since NCCL 2.19).
- An abort can block, too, so another thread makes it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from dmesh._log import logger
from dmesh.collectives.backends.nccl.reductions import load_nccl
from dmesh.collectives.request import Buffers, Request
from dmesh.coordination import waiting
from dmesh.errors import CollectiveError

IDENTITY_BYTES = 128
"""Bytes of NCCL's unique ids."""


def new_identity() -> bytes:
    """Return a new id, by which the members' communicators connect.

    Raises:
        CollectiveError: NCCL cannot make one, or CuPy is too old: before 14, ids were tuples.
    """
    nccl = load_nccl()
    try:
        identity = nccl.get_unique_id()
    except nccl.NcclError as error:
        raise CollectiveError(f"NCCL cannot make an id for a communicator: {error}") from error
    if not isinstance(identity, bytes) or len(identity) != IDENTITY_BYTES:
        raise CollectiveError("collectives of GPU arrays need CuPy 14 or later")
    return identity


class NcclCommunicator:
    """NCCL communicator of some ranks' GPUs, in one generation.

    Its thread creates the communicator before the first operation. The thread does not refer to this object:
    garbage collection of the object ends the communicator.

    Args:
        identity: The communicator's id, the same on all members.
        size: How many members there are.
        position: This rank's among them.
        device: This rank's GPU.
        name: Of the thread.
    """

    def __init__(self, identity: bytes, size: int, position: int, device: int, name: str) -> None:
        self._handle = _Handle(identity, size, position, device)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False
        waiting.Worker(partial(_work, self._jobs, self._handle), name).start()

    def perform(
        self,
        request: Request,
        buffers: Buffers,
        enqueue: Callable[[Any, int], None],
        over: Callable[[BaseException | None], None],
    ) -> None:
        """Carry out an operation after those before it.

        Args:
            request: The call.
            buffers: Its memory, which is kept alive until it is over.
            enqueue: Enqueues the work on a communicator and a stream.
            over: Called when it is over on this GPU, with its error if it failed; on the thread.
        """
        self._jobs.put(partial(_perform, self._handle, request, buffers, enqueue, over))

    def trouble(self) -> Exception | None:
        """Return the asynchronous error that NCCL reports, if any. Any thread."""
        return self._handle.trouble()

    def end(self) -> None:
        """Destroy the communicator when nothing is under way in it. Any thread, does not wait."""
        self._end()

    def abort(self) -> None:
        """Abort all operations under way; later ones fail, too. Any thread, does not wait. Idempotent."""
        comm = self._handle.take()
        if comm is not None:
            waiting.Worker(partial(_abort, comm), "dmesh-nccl-abort").start()
        self._end()


class _Handle:
    """Communicator that its thread shares with other threads, until it is taken away.

    NCCL frees a communicator that is aborted. So a thread takes it away before it aborts it, and no other
    thread can use it any more.
    """

    def __init__(self, identity: bytes, size: int, position: int, device: int) -> None:
        self.device = device
        self.stream: Any = None
        """The communicator's own; non-blocking, so the default stream does not wait for other members."""
        self._made_of = (size, identity, position)
        self._lock = threading.Lock()
        self._comm: Any = None
        self._taken = False

    def open(self) -> Any:
        """Return the communicator, which the first call creates; on the communicator's thread."""
        with self._lock:
            comm, taken = self._comm, self._taken
        if comm is None and not taken:
            comm = load_nccl().NcclCommunicator(*self._made_of)  # blocks until all members have come
            with self._lock:
                taken = self._taken
                self._comm = None if taken else comm
            if taken:
                _abort(comm)
        if taken:
            raise CollectiveError("the NCCL communicator has been aborted")
        return comm

    def trouble(self) -> Exception | None:
        """Return NCCL's asynchronous error; see `NcclCommunicator.trouble`."""
        with self._lock:
            if self._comm is None:
                return None
            try:
                self._comm.check_async_error()
            except Exception as error:  # noqa: BLE001 -- NcclError, or KeyError for a code new to CuPy
                return error
            return None

    def take(self) -> Any:
        """Take the communicator away; None if there is none yet, or it has been taken."""
        with self._lock:
            comm, self._comm, self._taken = self._comm, None, True
            return comm


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None], handle: _Handle) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or its arrays would stay alive until the next one
    if (comm := handle.take()) is not None:
        comm.destroy()


def _perform(
    handle: _Handle,
    request: Request,
    buffers: Buffers,
    enqueue: Callable[[Any, int], None],
    over: Callable[[BaseException | None], None],
) -> None:
    try:
        import cupy

        with cupy.cuda.Device(handle.device):
            # Here, and not on the GPU: NCCL is not entered before it can begin at once. What becomes of an
            # operation behind other work when its communicator is aborted, NCCL does not say.
            request.ready.synchronize()
            comm = handle.open()
            stream = handle.stream = handle.stream or cupy.cuda.Stream(non_blocking=True)
            enqueue(comm, stream.ptr)
            with stream:
                request.finish(buffers)  # enqueues the copy into the result, if there is one
            done = cupy.cuda.Event(block=True, disable_timing=True)  # its waiters sleep
            done.record(stream)
            done.synchronize()
            trouble = handle.trouble()
    except BaseException as error:  # noqa: BLE001 -- handed to whoever waits for the operation
        over(error)
    else:
        over(trouble)


def _abort(comm: Any) -> None:
    try:
        comm.abort()
    except Exception:  # noqa: BLE001 -- nobody waits for this
        logger.exception("an NCCL communicator could not be aborted")
