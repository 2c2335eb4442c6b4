"""Examples in docstrings of the functions that programs call first: each runs, on two fake clients."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import dmesh
from dmesh.testing import FakeCluster

EXAMPLES = (
    "initialize_accelerator_system",
    "session",
    "create_mesh",
    "create_distributed_mesh",
    "Mesh",
    "Layout",
    "Variable",
    "rank",
    "size",
    "collectives.all_gather",
    "collectives.all_reduce",
    "collectives.all_to_all",
    "collectives.broadcast",
    "collectives.gather",
    "collectives.new_group",
    "collectives.permute",
    "collectives.recv",
    "collectives.reduce",
    "collectives.reduce_scatter",
    "collectives.scatter",
    "coordination.barrier",
    "coordination.key_value_set",
    "data.Dataset",
    "distribute.MirroredStrategy",
    "distribute.MultiWorkerMirroredStrategy",
)
"""Public names whose docstrings have an example that stands alone."""


def _find(name: str) -> object:
    found: object = dmesh
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.fixture(scope="module")
def cluster():
    with FakeCluster(2) as cluster:
        yield cluster


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_in_a_docstring_runs(cluster, name):
    blocks = re.findall(r"```python\n(.*?)```", inspect.getdoc(_find(name)) or "", re.DOTALL)
    assert blocks, f"dmesh.{name} has an example"

    def program() -> None:
        for block in blocks:
            exec(compile(block, f"<docstring of dmesh.{name}>", "exec"), {"dmesh": dmesh, "np": np})

    cluster.run(program)
