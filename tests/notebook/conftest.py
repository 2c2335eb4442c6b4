"""Fixtures with kept clients, whose output is collected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dmesh.launcher.labels import Output
from dmesh.notebook.clients import KeptClients


@dataclass
class Shown(Output):
    """What the notebook shows; calls a function when a text has come."""

    text: str = ""
    when: dict[str, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.colored = self.closed = False
        self.lines = 0

    def write(self, data: bytes) -> None:
        self.text += data.decode()
        for awaited in [awaited for awaited in self.when if awaited in self.text]:
            self.when.pop(awaited)()

    def take(self) -> list[str]:
        lines, self.text = self.text.splitlines(), ""
        return lines


@dataclass
class Kept:
    """Kept clients, and what they wrote."""

    clients: KeptClients
    out: Shown
    err: Shown


Start = Callable[..., Kept]


def start_kept(count: int, **options: object) -> Kept:
    out, err = Shown(), Shown()
    quick = {"timeout_after_failure": 0.0, "terminate_grace": 60.0, **options}
    return Kept(KeptClients(count, out, err, environment=dict(os.environ), **quick), out, err)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts clients; none is left after the test."""
    started: list[Kept] = []

    def begin(count: int, **options: object) -> Kept:
        started.append(start_kept(count, **options))
        return started[-1]

    yield begin
    for one in started:
        one.clients.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Kept]:
    """Three clients, members of a cluster, that a file's tests share."""
    kept = start_kept(3)
    kept.clients.run(
        "import numpy as np, dmesh\ndmesh.initialize_accelerator_system()\nme = dmesh.client_id()",
        name="<first>",
    )
    yield kept
    kept.clients.close()


@pytest.fixture
def kept(shared: Kept) -> Kept:
    """The shared clients, with nothing shown yet."""
    shared.out.take()
    shared.err.take()
    return shared
