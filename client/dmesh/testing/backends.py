"""Tests that every backend of collectives must pass, to run on yours.

```python
from dmesh.testing.backends import BackendConformance

class TestMyBackend(BackendConformance):
    name = "mine"

    def make_backend(self, membership):
        return MyBackend(membership)
```

The ranks are threads of the test's process. Where that cannot be, as under `mpirun`, let every process call
`check_values`. This module does not import pytest; pytest finds the tests in the class that derives from
`BackendConformance`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from dmesh.collectives import Group, world
from dmesh.collectives.backends import (
    Backend,
    Buffers,
    Membership,
    Operation,
    Request,
    register,
    unregister,
)
from dmesh.collectives.work import Stream
from dmesh.errors import CollectiveError, CollectiveMismatchError, PeerLostError
from dmesh.testing.backend_cases import LARGE, Array, Case, cases, check_values, collectives
from dmesh.testing.fake_cluster import FakeCluster

LIMIT = 60.0
"""Seconds after which a test fails."""
PROMPTLY = 10.0
"""Seconds within which a failure must be noticed; it takes milliseconds."""
AFTERWARDS = 0.5
"""Seconds for which the other ranks go on after one has revoked its operation."""


class Ranks(Protocol):
    """Connected ranks, which are threads of this process."""

    def run(self, body: Callable[[Group], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Call `body` with the group of all ranks, on all ranks (or some) at once.

        Returns:
            Results or exceptions, by rank.
        """

    def kill(self, rank: int) -> None:
        """End a rank as kill -9 would; the others notice."""


class BackendConformance:
    """Contract of `dmesh.collectives.backends.Backend`."""

    name: str
    """The backend's name."""
    sizes: Sequence[int] = (2, 3)
    """Sizes of groups whose results are compared."""
    size = 3
    """Size of the group in the other tests, at least 3."""
    in_rank_order = True
    """Whether contributions are folded in the order of ranks; else results of whole numbers are compared."""

    # What a backend's own tests define ----------------------------------------------------------------------

    def make_backend(self, membership: Membership) -> Backend:
        """Make the backend of one rank; unused where `open_ranks` is defined."""
        raise NotImplementedError(f"{type(self).__name__} must define make_backend(membership)")

    @contextmanager
    def open_ranks(self, size: int) -> Iterator[Ranks]:
        """Connect some ranks whose groups have the backend."""
        register(self.name, self.make_backend)
        try:
            with FakeCluster(size) as cluster:
                yield _FakeRanks(cluster)
        finally:
            unregister(self.name)

    def as_array(self, x: Array) -> Any:
        """Return a copy of a NumPy array as the kind of array that the backend takes."""
        return np.array(x)

    def as_numpy(self, x: Any) -> Array:
        """Return such an array as a NumPy array."""
        return np.asarray(x)

    def overwrite(self, x: Any, value: int) -> None:
        """Set all elements of such an array."""
        x[...] = value

    # The tests ----------------------------------------------------------------------------------------------

    def test_results_are_those_of_numpy(self) -> None:
        """Every supported call has NumPy's bits: in new arrays, in `out=`, in place and asynchronously."""
        for size in self.sizes:
            with self.open_ranks(size) as ranks:
                done = _values(
                    ranks.run(
                        lambda group: check_values(
                            group, self.name, as_array=self.as_array, as_numpy=self.as_numpy,
                            exact=self.in_rank_order,
                        )
                    )
                )  # fmt: skip
            assert done[0], f"backend {self.name!r} supports none of the calls"
            assert all(kinds == done[0] for kinds in done)

    def test_all_ranks_support_the_same_calls(self) -> None:
        """The answer follows from what all ranks know of a call."""

        def answers(group: Group) -> list[bool]:
            self._connect(group)
            return [
                case.is_supported(group, self.name, self.as_array(case.input(group.rank, exact=False)))
                for case in cases(group.size)
            ]

        with self.open_ranks(self.size) as ranks:
            found = _values(ranks.run(answers))
        for case, *theirs in zip(cases(self.size), *found, strict=True):
            assert len(set(theirs)) == 1, f"{case}: by rank, {theirs}"

    def test_a_started_call_names_the_ranks_that_have_not_come(self) -> None:
        """`missing` leads to the absent rank, and to nobody who is there; in the end it is empty."""
        with self.open_ranks(self.size) as ranks, _Bench(self, ranks) as bench:
            absent = bench.case.size - 1
            present = range(absent)
            for rank in present:
                bench.start(rank)
            bench.until(lambda: {r for rank in present for r in bench.missing(rank)} - {*present} == {absent})
            bench.start(absent)
            for rank in range(bench.case.size):
                assert bench.outcome(rank) is None
                assert bench.missing(rank) == ()
                bench.check_result(rank)

    def test_a_failure_ends_a_pending_call_promptly(self) -> None:
        """`fail`, on another thread, ends the wait in `progress` with its error; later ones do not count."""
        with self.open_ranks(self.size) as ranks, _Bench(self, ranks, step=LIMIT) as bench:
            bench.start(0)
            time.sleep(0.05)  # so that it waits, mostly; the result is the same if it does not yet
            error = CollectiveError("the test says so")
            began = time.monotonic()
            bench.operation(0).fail(error)
            bench.operation(0).fail(CollectiveError("a later error"))
            assert bench.outcome(0) is error
            assert time.monotonic() - began < PROMPTLY
            assert bench.again(0) is error

    def test_a_revoked_call_touches_no_memory(self) -> None:
        """After `revoke`, a rank's arrays are its own, whatever the other ranks do."""
        with self.open_ranks(self.size) as ranks, _Bench(self, ranks) as bench:
            last = bench.case.size - 1
            for rank in range(last):
                bench.start(rank)
            time.sleep(0.05)
            bench.operation(0).fail(CollectiveError("the test says so"))
            assert isinstance(bench.outcome(0), CollectiveError)
            bench.revoke_and_fill(0, 77)
            bench.start(last)
            deadline = time.monotonic() + AFTERWARDS
            bench.until(
                lambda: time.monotonic() > deadline or all(bench.is_over(rank) for rank in range(1, last + 1))
            )
            for rank in range(1, last + 1):
                bench.operation(rank).fail(CollectiveError("the test is over"))
                if bench.outcome(rank) is None:
                    bench.check_result(rank)
            assert (bench.numpy_of(0) == 77).all(), "the memory of a revoked call was written to"

    def test_a_mismatch_is_an_error_on_all_ranks(self) -> None:
        """If the ranks call different things, every rank's error names both sides."""
        with self.open_ranks(self.size) as ranks:
            kinds = _values(ranks.run(lambda group: self._different(group)))[0]

            def body(group: Group) -> Any:
                case = kinds[group.rank == group.size - 1]
                return case.call(group, self.as_array(case.input(group.rank)), timeout=LIMIT)

            for error in ranks.run(_returning_errors(body)):
                assert type(error) is CollectiveMismatchError, repr(error)
                for case in kinds:
                    op = case.arguments.get("op", case.kind)
                    assert f"{op}" in str(error), str(error)

    def test_a_lost_rank_fails_the_calls_of_all_others(self) -> None:
        """The error is a PeerLostError with its number, for calls under way and for later ones."""
        with self.open_ranks(self.size) as ranks, ThreadPoolExecutor(1) as pool:
            case = self._case(ranks)
            others, lost = range(case.size - 1), case.size - 1
            called = threading.Barrier(len(others) + 1)

            def body(group: Group) -> list[Any]:
                x, errors = self.as_array(case.input(group.rank)), []
                called.wait(LIMIT)
                for _ in range(2):
                    try:
                        errors.append(case.call(group, x, timeout=LIMIT))
                    except CollectiveError as error:
                        errors.append(error)
                return errors

            results = pool.submit(ranks.run, body, tuple(others))
            called.wait(LIMIT)
            time.sleep(0.05)
            ranks.kill(lost)
            for first, second in _values(results.result(LIMIT)):
                assert type(first) is PeerLostError, repr(first)
                assert first.rank == lost
                assert isinstance(second, CollectiveError), repr(second)

    # Inside -------------------------------------------------------------------------------------------------

    def _connect(self, group: Group) -> None:
        for _ in range(2):
            group.barrier()

    def _large(self, group: Group) -> Iterator[Case]:
        """Yield the supported calls of large arrays, best for tests first."""
        f4, size = np.dtype("f4"), group.size
        for case in (
            Case("all_reduce", size, (LARGE,), f4, {"op": "max"}),
            Case("all_reduce", size, (LARGE,), f4, {"op": "min"}),
            Case("all_gather", size, (LARGE,), f4),
            *cases(size),
        ):
            if case.is_supported(group, self.name, self.as_array(case.input(group.rank, exact=False))):
                yield case

    def _case(self, ranks: Ranks) -> Case:
        def choose(group: Group) -> Case:
            self._connect(group)
            return next(self._large(group))

        found = _values(ranks.run(choose))
        case = found[0]
        assert isinstance(case, Case)
        assert all(other == case for other in found)
        return case

    def _different(self, group: Group) -> tuple[Case, Case]:
        self._connect(group)
        supported = self._large(group)
        first = next(supported)
        second = next((c for c in supported if c.arguments.get("op") != first.arguments.get("op")), None)
        return first, second or Case("barrier", group.size)


class _FakeRanks:
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def run(self, body: Callable[[Group], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        return self._cluster.run(lambda: _returning_errors(body)(world()), ranks=ranks, check=False)

    def kill(self, rank: int) -> None:
        self._cluster.kill(rank)


class _Call:
    """A call's place among the group's calls; see `Call`."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.sequence = self.order = stream.issue()

    def ask_everybody(self) -> None:
        """Do nothing: no rank answers questions about calls that the group has not made itself."""


class _Bench(AbstractContextManager["_Bench"]):
    """Operations of one call on all ranks, each driven by a thread of its rank once it is started.

    Args:
        suite: The tests.
        ranks: Connected ranks.
        step: Seconds that one `progress` may take.
    """

    def __init__(self, suite: BackendConformance, ranks: Ranks, step: float = 0.01) -> None:
        self._suite, self._ranks, self._step = suite, ranks, step
        self.case = suite._case(ranks)
        size = self.case.size
        self._inputs = [self.case.input(rank, exact=False) for rank in range(size)]
        self._commands = [threading.Event() for _ in range(size)]
        self._started: list[Future[Operation]] = [Future() for _ in range(size)]
        self._outcomes: list[Future[BaseException | None]] = [Future() for _ in range(size)]
        self._agains: list[Future[BaseException | None]] = [Future() for _ in range(size)]
        self._memory: list[tuple[Request, Buffers, Any, Any] | None] = [None] * size
        self._revoking = [threading.Event() for _ in range(size)]
        self._revoked: list[Future[None]] = [Future() for _ in range(size)]
        self._closing = False
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(ranks.run, self._body)

    def __exit__(self, *exception: object) -> None:
        self._closing = True
        for command in (*self._commands, *self._revoking):
            command.set()
        for started in self._started:
            if started.done() and started.exception() is None:
                started.result().fail(CollectiveError("the test is over"))
        found = self._running.result(LIMIT)
        self._pool.shutdown()
        if exception[0] is None:
            _values(found)

    def start(self, rank: int) -> None:
        """Start the operation of a rank; return when it has begun."""
        self._commands[rank].set()
        self._started[rank].result(LIMIT)

    def operation(self, rank: int) -> Operation:
        """Return the operation of a rank, which has been started."""
        return self._started[rank].result(LIMIT)

    def missing(self, rank: int) -> tuple[int, ...]:
        """Return whom the operation of a rank waits for."""
        return self.operation(rank).missing()

    def is_over(self, rank: int) -> bool:
        """Return whether the operation of a rank is complete, or has failed."""
        return self._outcomes[rank].done()

    def outcome(self, rank: int) -> BaseException | None:
        """Wait for the operation of a rank, and return its error; None if it is complete."""
        return self._outcomes[rank].result(LIMIT)

    def again(self, rank: int) -> BaseException | None:
        """Return the error of one more `progress` after the failure."""
        return self._agains[rank].result(LIMIT)

    def revoke_and_fill(self, rank: int, value: int) -> None:
        """Revoke the operation of a rank, and overwrite its arrays."""
        self._revoking[rank].set()
        self._revoked[rank].result(LIMIT)
        _, _, x, out = self._memory[rank] or (None, None, None, None)
        for array in (x, out):
            if array is not None:
                self._suite.overwrite(array, value)

    def numpy_of(self, rank: int) -> Array:
        """Return all arrays of a rank."""
        _, _, x, out = self._memory[rank] or (None, None, None, None)
        found = [self._suite.as_numpy(array).ravel() for array in (x, out) if array is not None]
        return np.concatenate(found)

    def check_result(self, rank: int) -> None:
        """Compare the result of a rank, whose operation is complete."""
        wanted = self.case.expected(rank, self._inputs)
        _, _, _, out = self._memory[rank] or (None, None, None, None)
        if wanted is not None:
            assert self._suite.as_numpy(out).tobytes() == wanted.tobytes(), f"{self.case} on rank {rank}"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + PROMPTLY
        while not condition():
            states = [(rank, self.missing(rank)) for rank, f in enumerate(self._started) if f.done()]
            assert time.monotonic() < deadline, f"{self.case}: started, and missing: {states}"
            time.sleep(0.001)

    def _body(self, group: Group) -> None:
        rank, suite = group.rank, self._suite
        wanted = self.case.expected(rank, self._inputs)
        x = suite.as_array(self._inputs[rank])
        out = None if wanted is None else suite.as_array(np.zeros_like(wanted))
        assert self._commands[rank].wait(LIMIT)
        if self._closing:
            return
        request, backend = self.case.request(group, x, out), group.backend(suite.name)
        assert request is not None
        assert backend is not None
        call, buffers = _Call(collectives(group)), request.allocate()
        self._memory[rank] = (request, buffers, x, out)
        operation = backend.start(request, buffers, call)
        self._started[rank].set_result(operation)
        error = self._drive(operation)
        if error is None and wanted is not None and request.device is None:
            request.finish(buffers)
        if error is not None:
            self._agains[rank].set_result(self._drive(operation))
        self._outcomes[rank].set_result(error)
        self._revoking[rank].wait(LIMIT)
        operation.revoke()
        self._revoked[rank].set_result(None)
        if error is None:
            call.stream.complete(call.sequence, request.text)

    def _drive(self, operation: Operation) -> BaseException | None:
        try:
            while not operation.progress(self._step):
                pass
        except CollectiveError as error:
            return error
        return None


def _returning_errors(body: Callable[[Group], Any]) -> Callable[[Group], Any]:
    def run(group: Group) -> Any:
        try:
            return body(group)
        except Exception as error:  # noqa: BLE001 -- a rank that raises has died, and others would hear of it
            return error

    return run


def _values(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


__all__ = ["BackendConformance", "check_values", "Ranks"]
