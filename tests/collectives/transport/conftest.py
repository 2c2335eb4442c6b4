"""Clusters for the tests of transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.collectives.transport.harness import MAKERS, Cluster


@pytest.fixture(params=sorted(MAKERS))
def make_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Make clusters of each kind of transport, and close them."""
    yield from _making(MAKERS[request.param])


@pytest.fixture
def make_local() -> Iterator[Callable[..., Cluster]]:
    yield from _making(MAKERS["local"])


@pytest.fixture
def make_tcp() -> Iterator[Callable[..., Cluster]]:
    yield from _making(MAKERS["tcp"])


@pytest.fixture(params=["tcp", "tls"])
def make_dedicated(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Make clusters that can have dedicated connections."""
    yield from _making(MAKERS[request.param])


@pytest.fixture
def make_tls() -> Iterator[Callable[..., Cluster]]:
    yield from _making(MAKERS["tls"])


def _making(maker: Callable[..., Cluster]) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*args: object, **kwargs: object) -> Cluster:
        made.append(maker(*args, **kwargs))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
