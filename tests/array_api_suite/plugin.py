"""pytest plugin that runs the array API's own test suite on sharded arrays.

Use: `pytest -p tests.array_api_suite.plugin`, as `make array-api-tests` does.

Arrays are created on a row of all devices, cut along their first dimension. Several clients run the suite in
step: each draws the same examples. Health checks and shrinking depend on the clock, and are off.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

import dmesh

os.environ.setdefault("ARRAY_API_TESTS_MODULE", "dmesh.array_api")  # which the suite's conftest.py imports
_contexts = contextlib.ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Make the default mesh before the suite is imported, which creates arrays then."""
    dmesh.initialize_accelerator_system("CPU")
    row = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))], device_type="CPU")
    _contexts.enter_context(dmesh.default_mesh(row))
    _contexts.enter_context(dmesh.implicit_gather("allow"))


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Load a profile of the suite's settings whose examples depend on nothing but the test."""
    settings.register_profile(
        "dmesh", settings.default, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )  # fmt: skip
    settings.load_profile("dmesh")
    # Constants of imported modules are among what Hypothesis draws, and client 0 imports the server's, too.
    none: Any = providers.Constants()
    providers._get_local_constants = lambda: none


def pytest_runtest_setup() -> None:
    """Seed what `strategy.example()` picks its example with."""
    random.seed(0)


def pytest_unconfigure() -> None:
    """Leave the default mesh."""
    _contexts.close()
