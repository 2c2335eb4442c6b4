"""`dmesh run --bind`: the CPUs of each client, from trees of files as Linux has them; and real clients."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.test_run_hosts import TWO_HOSTS

from dmesh.config.host import cores
from dmesh.errors import ConfigurationError
from dmesh.launcher.binding import cpus_for

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
FIRST, SECOND = "0-3,8-11", "4-7,12-15"


def two_sockets(root: Path) -> Path:
    """Make the tree of a host with two sockets of four cores with two threads, and a node of memory alone."""
    for node, cpus in enumerate((FIRST, SECOND, "")):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu in range(16):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_sockets(tmp_path_factory.mktemp("host"))


def shares(root: Path, binding: str, clients: int, allowed=range(16)) -> list[list[int]]:
    return [list(cpus_for(binding, place, clients, allowed, root)) for place in range(clients)]


def test_neighboring_ranks_are_on_one_node(root: Path) -> None:
    first, second = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    assert shares(root, "numa", 1) == [first]
    assert shares(root, "numa", 2) == [first, second]
    assert shares(root, "numa", 5) == [first, first, first, second, second]


def test_cores_are_shared_out_with_their_threads(root: Path) -> None:
    assert shares(root, "core", 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert shares(root, "core", 8) == [[core, core + 8] for core in range(8)]
    assert shares(root, "core", 3) == [[0, 1, 8, 9], [2, 3, 4, 10, 11, 12], [5, 6, 7, 13, 14, 15]]
    assert shares(root, "core", 16) == [[core, core + 8] for core in range(8) for _ in range(2)]


def test_cpus_that_are_not_allowed_are_left_out(root: Path) -> None:
    """As a cgroup, or the launcher's own binding, says."""
    assert shares(root, "numa", 2, {1, 2, 9}) == [[1, 2, 9]] * 2
    assert shares(root, "core", 2, {1, 2, 9}) == [[1, 9], [2]]
    assert shares(root, "core", 2, {9, 14}) == [[9], [14]]


def test_where_sys_shows_nothing_each_cpu_is_a_core_of_one_node(tmp_path: Path) -> None:
    assert shares(tmp_path, "core", 2, {0, 1, 2, 3}) == [[0, 1], [2, 3]]
    assert shares(tmp_path, "numa", 2, {0, 1, 2, 3}) == [[0, 1, 2, 3]] * 2


@given(st.sampled_from(["core", "numa"]), st.integers(1, 40), st.sets(st.integers(0, 15), min_size=1))
def test_each_client_has_cpus_and_none_is_idle(root: Path, binding: str, clients: int, allowed: set) -> None:
    found = shares(root, binding, clients, allowed)
    assert all(found)
    assert set().union(*found) <= allowed
    units = len(cores(allowed, root)) if binding == "core" else len({cpu % 8 // 4 for cpu in allowed})
    if binding == "core" or clients >= units:
        assert set().union(*found) == allowed
    if clients <= units:
        assert sum(map(len, found)) == len(set().union(*found)), "two clients share one"


@pytest.mark.parametrize(
    ("hosts", "binds"),
    [(("-n", "2"), ((), ("--bind", "core"))), (TWO_HOSTS, (("--bind", "core"),))],
    ids=["here", "over ssh"],
)
def test_clients_are_bound_and_have_the_same_bits(start, script, hosts, binds) -> None:
    path = script("""
        import os, numpy as np, dmesh
        with dmesh.session():
            x = np.random.default_rng(dmesh.rank()).normal(size=100_000).astype("f4")
            total = dmesh.collectives.all_reduce(x)
            if dmesh.rank() == 0:
                print(total.tobytes().hex()[:4000])
        print("cpus", sorted(os.sched_getaffinity(0)))
    """)
    totals = set()
    for bind in binds:
        run = start(*bind, *hosts, path)
        assert run.wait() == 0, run.err
        found = [line.split(" ", 1) for line in run.out]
        allowed = os.sched_getaffinity(0)
        for label, words in found:
            if words.startswith("cpus"):
                cpus = cpus_for("core", int(label[1]) % 2, 2, allowed) if bind else allowed
                assert words == f"cpus {sorted(cpus)}"
        assert sum(words.startswith("cpus") for _, words in found) == (2 if "-n" in hosts else 4)
        totals |= {words for _, words in found if not words.startswith("cpus")}
    assert len(totals) == 1


def test_a_system_that_binds_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, script) -> None:
    from dmesh.launcher import LaunchOptions
    from dmesh.launcher.plan import check_options

    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigurationError, match="--bind needs Linux"):
        check_options(LaunchOptions(clients=1, command=(script(""),), bind="core"), {})
