"""Groups of 64 and 128 real processes: values, bits, and the connections that each rank needs."""

from __future__ import annotations

import math
import time

import pytest
from tests.collectives import test_processes
from tests.collectives.test_processes import Pool

from dmesh import native

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["messages", *(["dedicated"] if native.core() is not None else [])])
def pool(request):
    """128 processes; groups of more than 64 have dedicated connections for large arrays, in cells."""
    previous, test_processes.LIMIT = test_processes.LIMIT, 600.0
    made = Pool(128, request.param)
    yield made
    made.end()
    test_processes.LIMIT = previous


@pytest.mark.parametrize("size", [64, 96, 128])
def test_all_kinds_with_few_connections(pool, size):
    began = time.monotonic()
    pool.cluster(size)
    answers = pool.all(size, "check many")
    peers = [answer["peers"] for answer in answers]
    if pool.way == "dedicated" and size > 64:
        assert all(answer["backends"][:2] == ["hierarchical", "messages"] for answer in answers)
    print(f"{pool.way}, {size} processes: {time.monotonic() - began:.1f} s, {max(peers)} peers at most")
    if pool.way == "messages" or size > 64:  # or all members tell each other of themselves
        assert max(peers) <= 4 * math.log2(size)
