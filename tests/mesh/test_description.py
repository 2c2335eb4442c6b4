"""What is message of a mesh: its axes, whose its devices are, and where this client's own are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.mesh.description import describe, owner_runs, place_runs
from dmesh.mesh.mesh import Mesh
from dmesh.v1 import progress_pb2 as pb


def spread_owners(runs: list[pb.OwnerRun]) -> list[int]:
    return [run.task + run.step * n for run in runs for n in range(run.tasks) for _ in range(run.each)]


def spread_places(runs: list[pb.PlaceRun]) -> list[tuple[int, int]]:
    return [(run.place + run.stride * n, run.device + n) for run in runs for n in range(run.count)]


@pytest.mark.parametrize(
    ("tasks", "runs"),
    [
        ([], []),
        ([3], [(3, 1, 0, 1)]),
        ([0, 0, 1, 1, 2, 2], [(0, 3, 1, 2)]),
        ([4, 4, 2, 2, 0, 0], [(4, 3, -2, 2)]),
        ([0, 1, 2, 0, 1, 2], [(0, 3, 1, 1), (0, 3, 1, 1)]),
        ([0, 0, 1], [(0, 1, 0, 2), (1, 1, 0, 1)]),
    ],
)
def test_owners_are_few_runs(tasks: list[int], runs: list[tuple[int, ...]]) -> None:
    assert [(run.task, run.tasks, run.step, run.each) for run in owner_runs(tasks)] == runs


@given(st.lists(st.integers(0, 9), max_size=60))
def test_owners_come_back(tasks: list[int]) -> None:
    assert spread_owners(owner_runs(tasks)) == tasks


@given(st.dictionaries(st.integers(0, 200), st.integers(0, 9), max_size=60))
def test_places_come_back(places: dict[int, int]) -> None:
    runs = place_runs(places.items())
    assert sorted(spread_places(runs)) == sorted(places.items())
    assert all(run.stride >= 1 and run.count >= 1 for run in runs)


def test_devices_at_even_distances_are_one_run() -> None:
    assert [str(run).split() for run in place_runs([(19, 2), (3, 0), (11, 1)])] == [
        ["place:", "3", "stride:", "8", "count:", "3"]
    ]


def named(*devices: tuple[int, int], job: str = "worker") -> list[str]:
    return [f"/job:{job}/replica:0/task:{task}/device:CPU:{index}" for task, index in devices]


def test_a_mesh_over_some_of_the_devices_of_all_clients() -> None:
    # As client 2 of 1,000 has it, each of which gives two of its devices, in an order of its own.
    mesh = Mesh(["batch", "model"], np.arange(2000).reshape(1000, 2), [4, 5], named((2, 7), (2, 3)), "grid")
    message = describe(mesh._fields, "worker", 2)
    assert (message.name, [(axis.name, axis.size) for axis in message.axes]) == (
        "grid",
        [("batch", 1000), ("model", 2)],
    )
    assert [(run.task, run.tasks, run.step, run.each) for run in message.owners] == [(0, 1000, 1, 2)]
    assert sorted(spread_places(list(message.own))) == [(4, 7), (5, 3)]
    assert message.ByteSize() < 80


def test_a_mesh_whose_devices_are_all_named() -> None:
    names = named((1, 0), (3, 0), (1, 1), (3, 1))
    mesh = Mesh(["x"], np.arange(8, 12), [9, 11], [names[1], names[3]], global_devices=names)
    message = describe(mesh._fields, "worker", 3)
    assert spread_owners(list(message.owners)) == [1, 3, 1, 3]
    assert [(run.place, run.stride, run.device, run.count) for run in message.own] == [(1, 2, 0, 2)]


def test_what_is_not_known_or_too_much_is_left_out() -> None:
    contradicting = Mesh(["x"], np.arange(4), [1, 2], named((1, 0), (1, 1)))
    message = describe(contradicting._fields, "worker", 1)
    assert not message.owners
    assert spread_places(list(message.own)) == [(1, 0), (2, 1)]

    strangers = Mesh(["x"], np.arange(4), [0, 1], named((0, 0), (0, 1), job="ps"))
    message = describe(strangers._fields, "worker", 0)
    assert (len(message.owners), len(message.own), len(message.axes)) == (0, 0, 1)

    rng = np.random.default_rng(7)
    order = rng.permutation(800)
    names = named(*((int(n) % 4, int(n) // 4) for n in order))
    own = [place for place, n in enumerate(order) if n % 4 == 0]
    mixed = Mesh(["x"], np.arange(800), own, [names[place] for place in own], global_devices=names)
    message = describe(mixed._fields, "worker", 0)
    assert (len(message.owners), len(message.own)) == (0, 0)
