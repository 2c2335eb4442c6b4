"""MPI's communicators over dmesh's groups.

Each buffer call is written once, as what dmesh is to call: blocking, nonblocking and prepared forms are made
of it. Where dmesh has no such call, but a program does without it in a line or two, `without` takes note.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, reduce
from typing import Any

import numpy as np
from tests.mpi4py_suite import requests
from tests.mpi4py_suite.buffers import IN_PLACE, Absent, fill, lengths, parse, parse_bytes
from tests.mpi4py_suite.requests import (
    ANY,
    MESSAGE_NO_PROC,
    Message,
    Prequest,
    Request,
    Status,
)

from dmesh import collectives
from dmesh.errors import CollectiveTypeError, CollectiveValueError

PROC_NULL = -2
ERR_ROOT = 7
substitutes: set[str] = set()
"""Calls that the running test has made and dmesh does not have."""
made: list[collectives.Group] = []
"""Groups of the running test."""
NO_TAG = "synchronous sends without a tag"
_buffered: list[Future[Any]] = []
"""Buffered sends under way."""
Prepared = tuple[Callable[..., Any], Callable[[Any], Any] | None, "collectives.Status | None"]
"""Call of dmesh, what is to be done with its result, and where it describes what it has received."""


def without(call: str) -> None:
    """Take note of a call that dmesh does not have, and programs do without."""
    substitutes.add(call)


class Error(Exception):
    """MPI's exception."""

    def Get_error_class(self) -> int:
        return ERR_ROOT


class Op:
    """Reduction: dmesh's, and a function of two Python values."""

    def __init__(self, op: str, of_values: Callable[[Any, Any], Any], ufunc: Any = None) -> None:
        self.op, self.ufunc, self._of_values = op, ufunc, of_values

    def __call__(self, x: Any, y: Any) -> Any:
        return self._of_values(x, y)

    def Reduce_local(self, given: Any, into: Any) -> None:
        without("Op.Reduce_local: a ufunc of NumPy")
        x, out = parse(given).simple(), parse(into).simple()
        if (x.dtype, x.size) != (out.dtype, out.size):
            raise ValueError("the arrays differ")
        self.ufunc(x, out, out=out)


SUM = Op("sum", operator.add, np.add)


def _in_place(buffer: Any) -> bool:
    return buffer is IN_PLACE or buffer is None


def _source(source: int) -> Any:
    return {ANY: collectives.ANY_SOURCE, PROC_NULL: collectives.NULL_PEER}.get(source, source)


def _tag(tag: int) -> Any:
    return collectives.ANY_TAG if tag == ANY else tag + requests.first_tag


def _synchronous() -> dict[str, bool]:
    if not requests.first_tag:
        raise Absent(NO_TAG)
    without(NO_TAG + ": all tags are larger by one")
    return {"synchronous": True}


class Comm:
    """A communicator."""

    def __init__(self, group: Any = None) -> None:
        self.group: Any = group
        if group is not None:
            made.append(group)

    def __getattr__(self, name: str) -> Any:
        raise Absent(name)

    @property
    def rank(self) -> int:
        return int(self.group.rank)

    @property
    def size(self) -> int:
        return int(self.group.size)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Dup(self) -> Comm:
        return Comm(collectives.new_group(self.group.ranks, f"{self.group.name}, duplicate"))

    def Free(self) -> None:
        pass

    # -- transfers ---------------------------------------------------------------------------------------

    def _Send(self, buf: Any, dest: int, tag: int = 0) -> Prepared:
        return partial(self.group.send, parse(buf).simple(), _source(dest), tag=_tag(tag)), None, None

    def _Rsend(self, buf: Any, dest: int, tag: int = 0) -> Prepared:
        without("ready sends: sends")
        return self._Send(buf, dest, tag)

    def _Ssend(self, buf: Any, dest: int, tag: int = 0) -> Prepared:
        return partial(self._Send(buf, dest, tag)[0], **_synchronous()), None, None

    def _Bsend(self, buf: Any, dest: int, tag: int = 0) -> Prepared:
        without("buffered sends: asynchronous sends of copies")
        x = parse(buf).simple().copy()
        return partial(_buffer, partial(self.group.send, x, _source(dest), tag=_tag(tag))), None, None

    def _Recv(self, buf: Any, source: int = ANY, tag: int = ANY) -> Prepared:
        status, out = collectives.Status(), parse(buf).simple()
        receive = partial(self.group.recv, None, _source(source), tag=_tag(tag), status=status, out=out)
        return receive, None, status

    def _Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY,
        recvtag: int = ANY,
    ) -> Prepared:  # fmt: skip
        x, status, out = parse(sendbuf).simple(), collectives.Status(), parse(recvbuf).simple()
        more = {"sendtag": _tag(sendtag), "recvtag": _tag(recvtag), "status": status, "out": out}
        return partial(self.group.sendrecv, x, _source(dest), None, _source(source), **more), None, status

    def _Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY, recvtag: int = ANY
    ) -> Prepared:
        return self._Sendrecv(parse(buf).simple().copy(), dest, sendtag, buf, source, recvtag)

    def Iprobe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:
        found = self.group.iprobe(_source(source), tag=_tag(tag))
        if status is not None:
            status.take(found)
        return found is not None

    def Probe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:
        found = self.group.probe(_source(source), tag=_tag(tag))
        if status is not None:
            status.take(found)
        return True

    iprobe, probe = Iprobe, Probe

    def _matched(self, receive: Any, source: int, tag: int) -> Message:
        without("matched probes: the message is received at once")
        return MESSAGE_NO_PROC if source == PROC_NULL else Message((receive(source, tag),))

    def _matched_now(self, receive: Any, source: int, tag: int, status: Status | None) -> Message | None:
        found = status or Status()
        self.Iprobe(source, tag, found)
        if source == PROC_NULL:
            return MESSAGE_NO_PROC
        return None if found.source == ANY else self._matched(receive, found.source, found.tag)

    def _array(self, source: int, tag: int) -> Any:
        found = self.group.recv(None, _source(source), tag=_tag(tag))
        return found.reshape(-1)

    def Mprobe(self, source: int = ANY, tag: int = ANY) -> Message:
        return self._matched(self._array, source, tag)

    def Improbe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> Message | None:
        return self._matched_now(self._array, source, tag, status)

    # -- collectives of buffers --------------------------------------------------------------------------

    def _Barrier(self) -> Prepared:
        return self.group.barrier, None, None

    def _Bcast(self, buf: Any, root: int = 0) -> Prepared:
        x = parse(buf).simple()
        return partial(self.group.broadcast, x, root, out=x), None, None

    def _Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Prepared:
        if self.rank != root:
            return partial(self.group.gather, parse(sendbuf).simple(), root), None, None
        out = parse(recvbuf).rows(self.size)
        x = out[root] if _in_place(sendbuf) else parse(sendbuf).simple()
        return partial(self.group.gather, x, root, out=out), None, None

    def _Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Prepared:
        out = None if _in_place(recvbuf) else parse(recvbuf).simple()
        x = parse(sendbuf).rows(self.size) if self.rank == root else None
        return partial(self.group.scatter, x, root, out=out), None, None

    def _Allgather(self, sendbuf: Any, recvbuf: Any) -> Prepared:
        out = parse(recvbuf).rows(self.size)
        x = out[self.rank] if _in_place(sendbuf) else parse(sendbuf).simple()
        return partial(self.group.all_gather, x, out=out), None, None

    def _Alltoall(self, sendbuf: Any, recvbuf: Any) -> Prepared:
        out = parse(recvbuf).rows(self.size)
        x = out if _in_place(sendbuf) else parse(sendbuf).rows(self.size)
        return partial(self.group.all_to_all, x, out=out), None, None

    def _Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Prepared:
        out = parse(recvbuf).simple() if self.rank == root else None
        x = out if _in_place(sendbuf) else parse(sendbuf).simple()
        return partial(self.group.reduce, x, op.op, root, out=out), None, None

    def _fold(self, call: Any, sendbuf: Any, recvbuf: Any, op: Op) -> Prepared:
        out = parse(recvbuf).simple()
        x = out if _in_place(sendbuf) else parse(sendbuf).simple()
        return partial(call, x, op.op, out=out), None, None

    def _Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Prepared:
        return self._fold(self.group.all_reduce, sendbuf, recvbuf, op)

    def _Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Prepared:
        return self._fold(self.group.scan, sendbuf, recvbuf, op)

    def _Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Prepared:
        return self._fold(self.group.exscan, sendbuf, recvbuf, op)

    def _Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Prepared:
        if _in_place(sendbuf):
            x = parse(recvbuf).rows(self.size)
            out = x.reshape(-1)[: x.shape[1]]
        else:
            x, out = parse(sendbuf).rows(self.size), parse(recvbuf).simple()
        return partial(self.group.reduce_scatter, x, op.op, out=out), None, None

    def _Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM) -> Prepared:
        out = parse(recvbuf).simple()
        counts = self.group.all_gather(out.size).tolist() if recvcounts is None else recvcounts
        x = out if _in_place(sendbuf) else parse(sendbuf).simple()
        out = out[: counts[self.rank]]
        return partial(self.group.reduce_scatter, x, op.op, counts=counts, out=out), None, None

    def _Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Prepared:
        blocks = parse(recvbuf).blocks(self.size) if self.rank == root else []
        x = blocks[root] if blocks and _in_place(sendbuf) else parse(sendbuf).simple()
        finish = partial(fill, blocks) if blocks else None
        return partial(self.group.gather, x, root, counts="exchange"), finish, None

    def _Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Prepared:
        out = None if _in_place(recvbuf) else parse(recvbuf).simple()
        if self.rank != root:
            return partial(self.group.scatter, None, root, counts="exchange", out=out), None, None
        blocks = parse(sendbuf).blocks(self.size)
        x, counts = np.concatenate(blocks), lengths(blocks)
        return partial(self.group.scatter, x, root, counts=counts, out=out), None, None

    def _Allgatherv(self, sendbuf: Any, recvbuf: Any) -> Prepared:
        blocks = parse(recvbuf).blocks(self.size)
        x = blocks[self.rank] if _in_place(sendbuf) else parse(sendbuf).simple()
        return partial(self.group.all_gather, x, counts=lengths(blocks)), partial(fill, blocks), None

    def _Alltoallv(self, sendbuf: Any, recvbuf: Any, parse: Any = parse) -> Prepared:
        into = parse(recvbuf).blocks(self.size)
        blocks = into if _in_place(sendbuf) else parse(sendbuf).blocks(self.size)
        counts, expected = lengths(blocks), lengths(into)
        x = np.concatenate(blocks)
        exchange = partial(self.group.all_to_all, x, counts=counts, recv_counts=expected)
        return exchange, partial(fill, into), None

    def _Alltoallw(self, sendbuf: Any, recvbuf: Any) -> Prepared:
        without("Alltoallw: all_to_all of bytes")
        return self._Alltoallv(sendbuf, recvbuf, parse_bytes)

    # -- prepared calls that dmesh has -------------------------------------------------------------------

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Prequest:
        out = parse(recvbuf).simple()
        x = out if _in_place(sendbuf) else parse(sendbuf).simple()
        return _planned(collectives.plan_all_reduce(x, op.op, group=self.group), x, out)

    def Bcast_init(self, buf: Any, root: int = 0) -> Prequest:
        x = parse(buf).simple()
        return _planned(collectives.plan_broadcast(x, root, group=self.group), x, x)

    def Allgather_init(self, sendbuf: Any, recvbuf: Any) -> Prequest:
        out = parse(recvbuf).rows(self.size)
        x = out[self.rank] if _in_place(sendbuf) else parse(sendbuf).simple()
        return _planned(collectives.plan_all_gather(x, group=self.group), x, out)

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any) -> Prequest:
        blocks = parse(recvbuf).blocks(self.size)
        x = blocks[self.rank] if _in_place(sendbuf) else parse(sendbuf).simple()
        plan = collectives.plan_all_gather(x, counts=lengths(blocks), group=self.group)
        return Prequest(lambda: _completed(fill(blocks, plan(x))))

    # -- objects -----------------------------------------------------------------------------------------

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.group.send_object(obj, _source(dest), tag=_tag(tag))

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return Request(self.group.send_object(obj, _source(dest), tag=_tag(tag), async_op=True))

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        without("buffered sends: asynchronous sends of copies")
        self.isend(obj, dest, tag)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        self.bsend(obj, dest, tag)
        return _completed(None)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.issend(obj, dest, tag).wait()

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        more = _synchronous()
        return Request(self.group.send_object(obj, _source(dest), tag=_tag(tag), async_op=True, **more))

    def recv(self, buf: Any = None, source: int = ANY, tag: int = ANY, status: Status | None = None) -> Any:
        if buf is not None:
            raise Absent("buffers for pickled objects")
        try:
            return self.irecv(None, source, tag).wait(status)
        except CollectiveTypeError as error:
            raise Absent("objects sent as buffers of pickled bytes") from error

    def irecv(self, buf: Any = None, source: int = ANY, tag: int = ANY) -> Request:
        status = collectives.Status()
        receive = partial(self.group.recv_object, _source(source), tag=_tag(tag), status=status)
        return Request(receive(async_op=True), None, status)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY,
        recvtag: int = ANY, status: Status | None = None,
    ) -> Any:  # fmt: skip
        request = self.isend(sendobj, dest, sendtag)
        found = self.recv(recvbuf, source, recvtag, status)
        request.wait()
        return found

    def _object(self, source: int, tag: int) -> Any:
        return self.recv(None, source, tag)

    def mprobe(self, source: int = ANY, tag: int = ANY) -> Message:
        return self._matched(self._object, source, tag)

    def improbe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> Message | None:
        return self._matched_now(self._object, source, tag, status)

    def barrier(self) -> None:
        self.group.barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.group.broadcast_object(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> Any:
        return self.group.gather_object(sendobj, root)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        return self.group.scatter_object(sendobj, root)

    def allgather(self, sendobj: Any) -> Any:
        return self.group.all_gather_object(sendobj)

    def alltoall(self, sendobj: Any) -> Any:
        return self.group.all_to_all_object(sendobj)

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        without("reductions of objects: folds of what all_gather_object returns")
        try:
            found = self.gather(sendobj, root)
        except CollectiveValueError as error:
            raise Error(str(error)) from error
        return None if found is None else reduce(op, found)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        without("reductions of objects: folds of what all_gather_object returns")
        return reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Op = SUM) -> Any:
        without("reductions of objects: folds of what all_gather_object returns")
        return reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Op = SUM) -> Any:
        without("reductions of objects: folds of what all_gather_object returns")
        found = self.allgather(sendobj)[: self.rank]
        return reduce(op, found) if found else None


def _buffer(send: Callable[..., Any], async_op: bool = False) -> Any:
    _buffered.append(send(async_op=True))
    return _completed(None)._future if async_op else None


def detach_buffer() -> None:
    """Wait for the buffered sends."""
    while _buffered:
        _buffered.pop().result()


def _completed(value: Any) -> Request:
    (future := Future[Any]()).set_result(value)
    return Request(future)


def _planned(plan: Any, x: Any, out: Any) -> Prequest:
    return Prequest(lambda: _completed(np.copyto(out, plan(x))))


def _forms(name: str) -> None:
    """Give communicators the forms of a call: `Bcast`, `Ibcast`, `Bcast_init`."""

    def blocking(self: Comm, *args: Any, **named: Any) -> None:
        status = named.pop("status", None) or next((arg for arg in args if isinstance(arg, Status)), None)
        rest = [arg for arg in args if not isinstance(arg, Status)]
        call, finish, found = getattr(self, "_" + name)(*rest, **named)
        result = call()
        if status is not None:
            status.take(found)
        if finish is not None:
            finish(result)

    def nonblocking(self: Comm, *args: Any, **named: Any) -> Request:
        call, finish, found = getattr(self, "_" + name)(*args, **named)
        return Request(call(async_op=True), finish, found)

    def prepared(self: Comm, *args: Any, **named: Any) -> Prequest:
        call, _, found = getattr(self, "_" + name)(*args, **named)
        call = partial(call)  # of a method of the group, which has the name of a function
        function = getattr(collectives, call.func.__name__, None)
        if function is None:  # a buffered send
            return Prequest(partial(nonblocking, self, *args, **named))
        plan = collectives.plan(function, *call.args, group=self.group, **call.keywords)

        def start() -> Request:
            again, finish, _ = getattr(self, "_" + name)(*args, **named)  # some join what MPI's buffers have
            x = None if plan.input is None else partial(again).args[0]
            return Request(plan(x, async_op=True), finish, found)

        return Prequest(start)

    setattr(Comm, name, blocking)
    setattr(Comm, "I" + name.lower(), nonblocking)
    if name + "_init" not in vars(Comm):
        setattr(Comm, name + "_init", prepared)


for _name in [name[1:] for name in vars(Comm) if name[0] == "_" and name[1:2].isupper()]:
    _forms(_name)
