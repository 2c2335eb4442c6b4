"""The public conformance tests pass for the backend of docs/backends.md, and fail for broken ones."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster
from tests.repo.documents import ROOT, programs_of

from dmesh.collectives import backends
from dmesh.errors import CollectiveError
from dmesh.testing import backends as suite
from dmesh.testing.backends import BackendConformance


@pytest.fixture(scope="module")
def example():
    [program] = programs_of(ROOT / "docs" / "backends.md")
    names = {"__name__": "example"}
    exec(compile(program.source(), "docs/backends.md", "exec"), names)
    return names


def suite_of(backend):
    class Suite(BackendConformance):
        name = "dict"

        def make_backend(self, membership):
            return backend(membership)

    return Suite()


TESTS = [name for name in dir(BackendConformance) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
def test_the_documented_backend_passes(example, test):
    getattr(suite_of(example["DictBackend"]), test)()


def broken(example, how):
    """Return the documented backend with one fault."""
    correct, operation = example["DictBackend"], example["DictOperation"]
    revoked = []

    class Broken(correct):
        def supports(self, request, stream, sequence):
            if how == "differs by rank" and request.kind == "broadcast":
                return request.contributes
            return super().supports(request, stream, sequence)

        def start(self, request, buffers, call):
            return Faulty(self.membership, request, buffers, call)

    class Faulty(operation):
        def __init__(self, *arguments):
            self.driver = threading.get_ident()
            super().__init__(*arguments)

        def progress(self, seconds):
            if revoked and revoked[0] is not self.buffers:
                revoked[0].result[...] = 5
            if not super().progress(seconds):
                return False
            if how == "wrong bit" and self.buffers.result.size:
                self.buffers.result.view(np.uint8)[-1] ^= 1
            return True

        def missing(self):
            asked = threading.get_ident() != self.driver  # by another thread than the one that drives it
            return () if how == "names nobody" and asked else super().missing()

        def fail(self, error):
            if how != "ignores failures" or "is over" in str(error):
                super().fail(error)

        def revoke(self):
            if how == "writes after revoke" and self.error is not None:
                revoked.append(self.buffers)

    return Broken


@pytest.mark.parametrize(
    ("how", "caught_by"),
    [
        ("wrong bit", "test_results_are_those_of_numpy"),
        ("differs by rank", "test_all_ranks_support_the_same_calls"),
        ("names nobody", "test_a_started_call_names_the_ranks_that_have_not_come"),
        ("ignores failures", "test_a_failure_ends_a_pending_call_promptly"),
        ("writes after revoke", "test_a_revoked_call_touches_no_memory"),
    ],
)
def test_a_broken_backend_is_caught(example, how, caught_by, monkeypatch):
    monkeypatch.setattr(suite, "LIMIT", 2.0)
    monkeypatch.setattr(suite, "PROMPTLY", 0.5)
    with pytest.raises((AssertionError, TimeoutError)):
        getattr(suite_of(broken(example, how)), caught_by)()


def test_it_asks_for_what_is_missing():
    with pytest.raises(NotImplementedError, match="make_backend"):
        BackendConformance().make_backend(None)


# Registration -----------------------------------------------------------------------------------------------


@pytest.fixture
def registered(example):
    backends.register("dict", example["DictBackend"])
    yield
    backends.unregister("dict")


def test_a_name_is_registered_once(registered, example):
    for name in ("dict", ""):
        with pytest.raises(ValueError, match="must be new"):
            backends.register(name, example["DictBackend"])


@pytest.mark.parametrize("shm", [(), ("native",), ("dedicated",)])
def test_a_group_uses_registered_backends_from_its_second_call(registered, shm):
    def body(communicator):
        group = communicator.world
        assert group.backend("dict") is None
        for _ in range(3):
            assert (group.all_gather(np.array([group.rank])).ravel() == [0, 1, 2]).all()
            assert (group.all_reduce(np.array([group.rank])) == 3).all()  # by messages
        return [backend.name for backend in group._generation.backends]

    with cluster(3, shm=shm) as ranks:
        assert ranks.all(body) == [["dict", "messages", "loopback", "nccl"]] * 3


def test_a_factory_that_raises_fails_the_group(example):
    def factory(membership):
        if membership.position == 1:
            raise OSError("no such device")
        return example["DictBackend"](membership)

    backends.register("dict", factory)
    try:
        with cluster(2) as ranks:
            errors = ranks.run(two_barriers)
    finally:
        backends.unregister("dict")
    assert type(errors[1]) is OSError
    assert isinstance(errors[0], CollectiveError)
    assert "no such device" in str(errors[0])


def two_barriers(communicator):
    for _ in range(2):
        communicator.world.barrier()
    return communicator.world.backend("dict")


def test_members_that_have_registered_different_backends_use_none(example, caplog):
    """Processes have registries of their own; here the registry changes between the ranks' first calls."""
    with caplog.at_level(logging.WARNING), cluster(2) as ranks, ThreadPoolExecutor(1) as pool:
        backends.register("dict", example["DictBackend"])
        try:
            first = pool.submit(ranks.run, two_barriers, (0,))
            waits = lambda: [c.waits_for() for c in ranks.communicators[0].world.streams[0].calls.values()]  # noqa: E731
            assert ranks.wait_until(lambda: waits() == [(1,)])
            backends.register("other", example["DictBackend"])
            assert ranks.run(two_barriers, (1,)) == [None]
            assert first.result(LIMIT) == [None]
        finally:
            backends.unregister("dict")
            backends.unregister("other")
    assert caplog.text.count("uses no registered backend: rank 0 and rank 1") == 2
