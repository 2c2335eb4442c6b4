"""MPI's requests, statuses and messages over dmesh's futures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from tests.mpi4py_suite.buffers import Absent, parse

from dmesh import collectives

SUCCESS, UNDEFINED, ANY = 0, -32766, -1
first_tag = 0
"""Tag of dmesh for MPI's tag 0."""
_POLL = 0.001
"""Seconds for which a test of a request gives way to the threads that carry it out."""


class Status:
    """Source and tag of a message."""

    def __init__(self) -> None:
        self.source = self.tag = ANY
        self.error = SUCCESS

    def take(self, found: collectives.Status | None) -> None:
        self.source = ANY if found is None or found.source is None else found.source
        self.tag = ANY if found is None or found.tag is None else found.tag - first_tag


class Request:
    """A call under way; null when it is complete."""

    def __init__(
        self,
        future: Any = None,
        finish: Callable[[Any], Any] | None = None,
        status: collectives.Status | None = None,
    ) -> None:
        if isinstance(future, Request):
            raise Absent("handles of C and Fortran")
        self._future: Future[Any] | None = future
        self._finish, self._status = finish, status

    def __getattr__(self, name: str) -> Any:
        raise Absent("cancelling" if name.lower() == "cancel" else "handles of C and Fortran")

    def __reduce__(self) -> Any:
        raise Absent("handles of C and Fortran")

    @property
    def active(self) -> bool:
        return self._future is not None

    def __bool__(self) -> bool:
        return self.active

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Request) and not self and not other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def done(self) -> bool:
        return self._future is None or self._future.done()

    def wait(self, status: Status | None = None) -> Any:
        if self._future is None:
            return None
        found = self._future.result()
        self._future = None
        if status is not None:
            status.take(self._status)
        return found if self._finish is None else self._finish(found)

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        if self._future is not None:
            wait([self._future], _POLL)
        return (True, self.wait(status)) if self.done else (False, None)

    def Wait(self, status: Status | None = None) -> bool:
        self.wait(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        return self.test(status)[0]

    def get_status(self, status: Status | None = None) -> bool:
        return self.done

    Get_status = get_status

    def Free(self) -> None:
        self._future = None

    # -- several -----------------------------------------------------------------------------------------

    @classmethod
    def waitall(cls, requests: Iterable[Request], statuses: list[Status] | None = None) -> list[Any]:
        found = []
        for request in requests:
            found.append(request.wait(status := Status()))
            if statuses is not None:
                statuses.append(status)
        return found

    @classmethod
    def testall(cls, requests: list[Request], statuses: list[Status] | None = None) -> tuple[bool, Any]:
        wait([request._future for request in requests if request._future is not None], _POLL)
        done = all(request.done for request in requests)
        return (True, cls.waitall(requests, statuses)) if done else (False, None)

    @classmethod
    def waitany(cls, requests: list[Request], seconds: float | None = None) -> tuple[int, Any]:
        futures = [request._future for request in requests if request._future is not None]
        wait(futures, seconds, FIRST_COMPLETED)
        for at, request in enumerate(requests):
            if request.active and request.done:
                return at, request.wait()
        return UNDEFINED, None

    @classmethod
    def testany(cls, requests: list[Request]) -> tuple[int, bool, Any]:
        none = not any(request.active for request in requests)
        at, value = cls.waitany(requests, _POLL)
        return at, none or at != UNDEFINED, value

    @classmethod
    def waitsome(
        cls, requests: list[Request], statuses: list[Status] | None = None, seconds: float | None = None
    ) -> tuple[Any, Any]:
        active = {at: request for at, request in enumerate(requests) if request.active}
        if not active:
            return None, None
        wait([request._future for request in active.values() if request._future], seconds, FIRST_COMPLETED)
        done = [at for at, request in active.items() if request.done]
        return done, cls.waitall([requests[at] for at in done], statuses)

    @classmethod
    def testsome(cls, requests: list[Request], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        return cls.waitsome(requests, statuses, _POLL)

    @classmethod
    def Waitall(cls, requests: list[Request]) -> bool:
        cls.waitall(requests)
        return True

    @classmethod
    def Testall(cls, requests: list[Request]) -> bool:
        return cls.testall(requests)[0]

    @classmethod
    def Waitany(cls, requests: list[Request]) -> int:
        return cls.waitany(requests)[0]

    @classmethod
    def Testany(cls, requests: list[Request]) -> tuple[int, bool]:
        return cls.testany(requests)[:2]

    @classmethod
    def Waitsome(cls, requests: list[Request]) -> Any:
        return cls.waitsome(requests)[0]

    @classmethod
    def Testsome(cls, requests: list[Request]) -> Any:
        return cls.testsome(requests)[0]


class Prequest(Request):
    """A call that can be started again and again."""

    def __init__(self, start: Any) -> None:
        super().__init__(start if isinstance(start, Request) else None)
        self._start: Callable[[], Request] | None = start

    def __bool__(self) -> bool:
        return self._start is not None

    def Start(self) -> None:
        assert self._start is not None
        begun = self._start()
        self._future, self._finish, self._status = begun._future, begun._finish, begun._status

    def Free(self) -> None:
        self._start = self._future = None

    @classmethod
    def Startall(cls, requests: list[Prequest]) -> None:
        for request in requests:
            request.Start()


class Message:
    """What a matched probe has found, and received."""

    def __init__(self, content: Any = None) -> None:
        self._content: Any = content._content if isinstance(content, Message) else content

    def __bool__(self) -> bool:
        return self._content is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._content is other._content

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        raise Absent("handles of C and Fortran")

    def _take(self) -> Any:
        content = self._content
        assert content is not None
        if self is not MESSAGE_NO_PROC:
            self._content = None
        return None if content is NO_PROC else content[0]

    def recv(self, status: Status | None = None) -> Any:
        return self._take()

    def irecv(self) -> Request:
        (future := Future[Any]()).set_result(self._take())
        return Request(future)

    def Recv(self, buffer: Any, status: Status | None = None) -> None:
        found = self._take()
        if found is not None:
            parse(buffer).simple()[: found.size] = found

    def Irecv(self, buffer: Any) -> Request:
        self.Recv(buffer)
        (future := Future[Any]()).set_result(None)
        return Request(future)

    @classmethod
    def probe(cls, comm: Any, *args: Any) -> Message:
        return comm.mprobe(*args)

    @classmethod
    def iprobe(cls, comm: Any, *args: Any) -> Message | None:
        return comm.improbe(*args)

    @classmethod
    def Probe(cls, comm: Any, *args: Any) -> Message:
        return comm.Mprobe(*args)

    @classmethod
    def Iprobe(cls, comm: Any, *args: Any) -> Message | None:
        return comm.Improbe(*args)


NO_PROC = object()
MESSAGE_NULL, MESSAGE_NO_PROC = Message(), Message(NO_PROC)
REQUEST_NULL = Request()
