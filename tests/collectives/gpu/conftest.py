"""A cupy that needs no GPU."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator

import pytest
from tests.collectives.gpu import fake_cuda, fake_nccl


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The fake, in the place of the package; ends with what NCCL would not have allowed."""
    package, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    for name in ("ndarray", "empty", "asarray"):
        setattr(package, name, getattr(fake_cuda, name))
    for name in ("Device", "Event", "Stream", "get_current_stream"):
        setattr(cuda, name, getattr(fake_cuda, name))
    package.cuda = cuda
    cuda.nccl = fake_nccl
    for name, module in (("cupy", package), ("cupy.cuda", cuda), ("cupy.cuda.nccl", fake_nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    fake_nccl.reset()
    yield package
    fake_nccl.let_go()
    deadline = time.monotonic() + fake_cuda.PATIENCE
    while any(communicator.comm for communicator in fake_nccl.communicators):
        assert time.monotonic() < deadline, f"a communicator is never ended: {fake_nccl.log}"
        time.sleep(0.001)
    violations = list(fake_nccl.violations)
    fake_nccl.reset()
    assert not violations


@pytest.fixture
def nccl(cupy: types.ModuleType) -> types.ModuleType:
    """What a test can see of the fake NCCL, and ask of it."""
    return fake_nccl
