"""What every test of sharded arrays leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dmesh.runtime import context


@pytest.fixture(autouse=True)
def _no_context() -> Iterator[None]:
    """Forgets the devices of this process, which a mesh that a test makes here fixes."""
    yield
    context.clear()
