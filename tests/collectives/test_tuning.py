"""Tuning: its file, how the members of a group come to the same, that results do not depend on it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.ranks import cluster

import dmesh
from dmesh import native
from dmesh.collectives import connect as ways
from dmesh.collectives import measurement, tuning
from dmesh.collectives.backends.shm.setup import Sizes
from dmesh.collectives.measurement import Step, Table, best, costs_of, crossover, measure, most_worth
from dmesh.collectives.schedules import program as programs
from dmesh.collectives.schedules.choice import select
from dmesh.collectives.schedules.cost import Model
from dmesh.collectives.schedules.direct import (
    all_reduce_flat,
    all_reduce_scattered,
    reduce_flat,
    reduce_scattered,
)
from dmesh.collectives.schedules.trees import broadcast_scattered, broadcast_tree
from dmesh.collectives.tuning import LARGEST_PIECE, LEAST_ROWS, MOST_BYTES, MOST_STREAMS, SHIPPED, Tuning
from dmesh.collectives.validation import RequestBuilder
from dmesh.errors import CollectiveError, CollectiveValueError, ConfigurationError

needs_core = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")

tunings = st.builds(
    Tuning,
    flat=st.integers(0, MOST_BYTES),
    piece=st.integers(0, LARGEST_PIECE // 64).map(lambda number: number * 64),
    rows=st.integers(LEAST_ROWS, MOST_BYTES),
    message_flat=st.integers(0, MOST_BYTES),
    message_tree=st.integers(0, MOST_BYTES),
    streams=st.integers(1, MOST_STREAMS),
    latency=st.integers(0, 10**9),
    folding=st.sampled_from(["host", "rank", "any"]),
)
GOOD = {"format": 2, **asdict(SHIPPED)}


# The file ---------------------------------------------------------------------------------------------------


@given(tunings)
def test_what_is_written_is_read(tmp_path_factory, made):
    directory = tmp_path_factory.getbasetemp() / "round-trip"
    path = directory / "tuning.json"
    tuning.write(path, made)
    assert tuning.read(path) == made
    assert os.listdir(directory) == ["tuning.json"]  # nothing temporary is left
    assert tuning.find(str(path)) == made


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"9" * 4096, "not a JSON object"),
        (b"9" * 4097, "more than 4096 bytes"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "no field 'byte'"),
        (b'{"flat": 1, "flat": 1}', "the field 'flat' is there twice"),
    ],
)
def test_what_is_no_file_of_this_kind_is_refused(tmp_path, content, says):
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        tuning.read(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "dmesh tune" in str(caught.value)


values = st.none() | st.booleans() | st.text() | st.floats() | st.lists(st.integers(), max_size=2)


@given(
    name=st.sampled_from(sorted(GOOD)), value=values | st.integers(max_value=-1) | st.integers(MOST_BYTES + 1)
)
def test_bad_values_are_refused_with_their_field(tmp_path_factory, name, value):
    path = tmp_path_factory.getbasetemp() / "bad.json"
    path.write_text(json.dumps({**GOOD, name: value}))
    with pytest.raises(ConfigurationError) as caught:
        tuning.read(path)
    assert str(path) in str(caught.value)
    assert f"{name} is " in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_raise_the_one_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "noise.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError):
        tuning.read(path)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_all_fields_are_needed_and_no_others_known(tmp_path, name):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != name}))
    with pytest.raises(ConfigurationError, match=f"has no field '{name}'"):
        tuning.read(path)
    path.write_text(json.dumps({**GOOD, f"{name}2": 1}))
    with pytest.raises(ConfigurationError, match=f"has a field '{name}2'"):
        tuning.read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flat", -1),
        ("piece", 63),
        ("piece", LARGEST_PIECE + 64),
        ("rows", 0),
        ("flat", True),
        ("message_tree", -1),
        ("streams", 0),
        ("streams", MOST_STREAMS + 1),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"{field} is {value}; expected"):
        Tuning(**{field: value})


def test_where_the_file_is_looked_for(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert tuning.find(None, environ) == SHIPPED  # there is none
    path = tmp_path / "dmesh" / "tuning.json"
    tuning.write(path, Tuning(flat=1))
    assert tuning.find(None, environ) == Tuning(flat=1)
    assert tuning.find("0", environ) == SHIPPED
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        tuning.find(None, environ)


def test_files_that_cannot_be_used(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "is not a file"), (".", "cannot be read: Is a directory")):
        with pytest.raises(ConfigurationError, match=says):
            tuning.read(tmp_path / name)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        tuning.find("a\0b")
    with pytest.raises(ConfigurationError, match="cannot be written: Is a directory"):
        tuning.write(tmp_path, SHIPPED)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        tuning.write(tmp_path / "file" / "tuning.json", SHIPPED)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


@pytest.mark.parametrize("use_coordination", [True, False])
def test_a_file_that_was_named_and_is_missing_is_an_error_before_anything_is_sent(
    monkeypatch, tmp_path, use_coordination
):
    """Even before it listens: the address is of no machine, which would be the next error."""
    monkeypatch.setenv("DTENSOR_JOBS", "192.0.2.1:1,192.0.2.2:1")
    monkeypatch.setenv("DMESH_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("DMESH_TUNING", str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match=r"DMESH_TUNING .*missing\) cannot be read: No such file"):
        dmesh.initialize_accelerator_system(enable_coordination_service=use_coordination)


# Groups -----------------------------------------------------------------------------------------------------


def used(group):
    """What a rank's endpoints have of their tuning."""
    endpoint, hierarchy = group._generation.endpoint, group.backend("hierarchical")
    if hierarchy is None:
        return endpoint.one_step_bytes, endpoint.slot_bytes, endpoint.streams
    _, column = hierarchy.endpoints
    assert endpoint.max_flat == hierarchy.minimum
    return (
        endpoint.one_step_bytes,
        endpoint.slot_bytes,
        endpoint.streams,
        column.one_step_bytes,
        column.slot_bytes,
        column.streams,
        hierarchy.minimum,
    )


@needs_core
def test_all_members_take_the_tuning_of_the_first(caplog):
    caplog.set_level("INFO", "dmesh")
    different = tuple(Tuning(flat=1000 * rank, piece=64 * (rank + 1), streams=rank + 1) for rank in range(3))
    with cluster(3, shm=("dedicated",), tuning=different) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert [used(c.world) for c in ranks.communicators] == [(0, 64, 1)] * 3

        def others(communicator):
            group = communicator.new_group([2, 0, 1], "others")
            group.barrier()
            following = (communicator.rank + 1) % 3
            sent = group.send(np.ones(1000), group.ranks.index(following), async_op=True)
            got = group.recv(np.ones(1000), group.ranks.index((communicator.rank - 1) % 3))
            sent.result(30)
            pipes = [
                endpoint
                for endpoint in (*group._generation.outgoing, *group._generation.incoming)
                if endpoint is not None
            ]
            return (
                used(group),
                {(endpoint.slot_bytes, endpoint.streams) for endpoint in pipes},
                got.sum(),
                group.all_reduce(np.ones(999)).sum(),
            )

        for found, rooms, got, total in ranks.all(others):
            assert (found, got, total) == ((2000, 192, 3), 1000, 2997)
            assert rooms == {(192, 3)}
    assert f"group world has dedicated connections with the tuning of rank 0 ({different[0]})." in caplog.text
    assert (
        f"group others has dedicated connections with the tuning of rank 2 ({different[2]})." in caplog.text
    )


@needs_core
def test_shipped_defaults_are_not_worth_a_word(caplog):
    caplog.set_level("INFO", "dmesh")
    with cluster(2, shm=("dedicated",)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert [used(c.world) for c in ranks.communicators] == [(64 * 1024, 256 * 1024, 1)] * 2
    assert "group world has dedicated connections. It shares no memory" in caplog.text


@needs_core
@pytest.mark.parametrize("shm", [("no",), ("dedicated", "dedicated", "without"), ("dedicated",)])
def test_messages_take_the_tuning_of_the_first(caplog, shm):
    """Structured elements always go by messages: schedules that differ would not end."""
    caplog.set_level("INFO", "dmesh")
    different = (Tuning(message_flat=0, message_tree=0), Tuning(message_flat=MOST_BYTES), SHIPPED)
    with cluster(3, shm=shm, tuning=different) as ranks:

        def body(communicator):
            world, own = communicator.world, communicator.new_group([1, 2, 0], "own")
            for group in (world, own):
                group.barrier()
                for count in (1000, 100_000):
                    x = np.arange(count, dtype="f4")
                    assert (group.all_reduce(x) == 3 * x).all()
                    assert group.reduce(x, "sum", 1) is None or group.rank == 1
                    mine = (x if group.rank == 2 else np.zeros_like(x)).view([("only", "f4")])
                    assert (group.broadcast(mine, 2)["only"] == x).all()
            return world._generation.tuning, own._generation.tuning

        assert ranks.all(body) == [different[:2]] * 3
    assert f" with the tuning of rank 1 ({different[1]})." in caplog.text


def test_a_large_group_takes_the_tuning_of_the_first(monkeypatch):
    """It comes through a tree, so that not all members need a connection with all others."""
    monkeypatch.setattr(ways, "MOST_MEMBERS", 2)
    tunings = tuple(Tuning(message_flat=100 * rank, folding="rank") for rank in range(1, 6))
    with cluster(5, shm=("no",), tuning=tunings) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert ranks.all(lambda c: c.world.all_reduce(np.ones(1000)).sum()) == [5000] * 5
        assert [c.world._generation.tuning for c in ranks.communicators] == [tunings[0]] * 5


def test_files_of_format_1_are_read(tmp_path):
    """They have no cost model, and no order of folding."""
    path = tmp_path / "tuning.json"
    new = ("latency", "message", "byte", "local", "connection", "folding")
    path.write_text(json.dumps({**{k: v for k, v in GOOD.items() if k not in new}, "format": 1, "flat": 5}))
    assert tuning.read(path) == Tuning(flat=5)


@given(tunings)
def test_what_is_packed_is_unpacked(made):
    assert ways._unpack(ways._pack(made)) == made


def selected(request, limit):
    model = Model(0, 0, 0, 0, 0)
    elements = (request.count, request.nbytes_per_rank)
    return select(
        request.kind, 4, 3, *elements, request.root, (), request.contributes, limit, limit, 0, model, True
    )


def test_schedules_follow_the_tuning():
    x, make = np.ones(100, "f4"), RequestBuilder(4, 3).make
    for request, *chosen, arguments in (
        (make("all_reduce", x, op="sum"), all_reduce_scattered, all_reduce_flat, [100]),
        (make("reduce", x, op="sum", root=1), reduce_scattered, reduce_flat, [1, 100]),
        (make("broadcast", x, root=1), broadcast_scattered, broadcast_tree, [1, 100]),
    ):
        large, small = (programs.make(schedule, 4, 3, *arguments) for schedule in chosen)
        assert selected(request, 399) == large != small
        assert selected(request, 400) == small


@needs_core
def test_rows_and_columns_take_that_of_the_group():
    different = tuple(
        Tuning(flat=rank, piece=64 * (rank + 1), rows=100 + rank, streams=4 - rank) for rank in range(4)
    )
    with cluster(4, shm=("native@a", "native@b"), tuning=different, sizes=Sizes(128, 2048)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert [used(c.world) for c in ranks.communicators] == [(0, 64, 4, 0, 64, 4, 200)] * 4


EXTREMES = [
    Tuning(flat=0),
    Tuning(flat=MOST_BYTES),
    Tuning(piece=64),
    Tuning(flat=MOST_BYTES, piece=64, streams=2),
    Tuning(flat=0, piece=64, streams=MOST_STREAMS),
    Tuning(flat=0, piece=LARGEST_PIECE),
    Tuning(flat=MOST_BYTES, piece=LARGEST_PIECE),
]


@needs_core
@pytest.mark.parametrize("size", [2, 3])
def test_results_have_the_same_bits_whatever_the_tuning(size):
    counts = (1, 7, 1000, 20_001)
    arrays = {
        (rank, count): np.random.default_rng([rank, count]).normal(size=count).astype("f4") * 100
        for rank in range(size)
        for count in counts
    }

    def body(communicator):
        group, found = communicator.world, []
        group.barrier()
        for count in counts:
            x = arrays[group.rank, count]
            own = x.copy()
            found += [group.all_reduce(x), group.all_reduce(own, out=own), group.all_reduce(x, "mean")]
            if (reduced := group.reduce(x, "prod", size - 1)) is not None:
                found.append(reduced)
            found += [group.broadcast(x, 0), group.reduce_scatter(np.stack([x] * size)), group.all_gather(x)]
        return [result.tobytes() for result in found]

    with cluster(size) as ranks:  # by messages
        expected = ranks.all(body)
    for extreme in EXTREMES:
        with cluster(size, shm=("dedicated",), tuning=(extreme,)) as ranks:
            assert ranks.all(body) == expected, extreme


@needs_core
@pytest.mark.parametrize("rows", [LEAST_ROWS, MOST_BYTES])
def test_rows_have_the_right_results_whatever_the_tuning(rows):
    shm, sizes = ("native@a", "native@b"), Sizes(slot=128, staging=2048)
    with cluster(4, shm=shm, tuning=(Tuning(flat=MOST_BYTES, piece=64, rows=rows),), sizes=sizes) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for count in (0, 1, 3, 31, 32, 33, 1000):
            for dtype in ("u1", "i4", "c16"):
                for result in ranks.all(
                    lambda c, n=count, d=dtype: c.world.all_reduce(np.arange(n).astype(d) + c.rank)
                ):
                    assert (result == (4 * np.arange(count) + 6).astype(dtype)).all()


# Measuring --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), max_size=12))
def test_the_crossover_has_the_least_product_of_times(pairs):
    small, large = [s for s, _ in pairs], [b for _, b in pairs]
    found = crossover(small, large)

    def cost(count):
        return np.log([*small[:count], *large[count:]]).sum()

    assert cost(found) <= min(cost(count) for count in range(len(pairs) + 1)) + 1e-9


def test_one_size_that_was_measured_badly_does_not_move_the_crossover():
    assert crossover([1, 1, 1, 1, 4, 5], [2, 0.9, 2, 2, 2, 2]) == 4
    assert crossover([1, 1], [2, 2]) == 2
    assert crossover([2, 2], [1, 1]) == 0


def test_more_streams_are_taken_only_for_a_clear_gain():
    assert most_worth([[10.0, 10.0], [9.5, 9.5], [9.3, 9.3]], 1.1) == 0
    assert most_worth([[10.0, 10.0], [5.0, 5.0], [4.8, 4.8]], 1.1) == 1
    assert most_worth([[10.0, 10.0], [5.0, 5.0], [2.5, 2.5]], 1.1) == 2
    assert most_worth([[10.0, 10.0], [9.5, 9.5], [8.0, 8.0]], 1.1) == 2
    assert most_worth([[10.0, 10.0], [5.0, 9.5], [2.5, 10.0]], 1.1) == 0


def test_the_first_way_is_left_only_for_one_that_is_clearly_better():
    assert best([[10.0, 10.0], [9.6, 9.6]], 1.05) == 0
    assert best([[10.0, 10.0], [8.0, 11.0]], 1.05) == 0
    assert best([[10.0, 10.0], [9.0, 9.0], [8.0, 9.0]], 1.05) == 2


@pytest.fixture
def _small_arrays(monkeypatch):
    monkeypatch.setattr(measurement, "_LARGE", (1024, 4096))
    monkeypatch.setattr(measurement, "_ROWS", (64, 128, 1024))
    monkeypatch.setattr(measurement, "_TREES", (64, 1024))


@needs_core
@pytest.mark.usefixtures("_small_arrays")
@pytest.mark.parametrize(
    ("shm", "rows"), [(("dedicated",), {SHIPPED.rows}), (("native@a", "native@b"), {64, 128, 1024, 2048})]
)
def test_all_ranks_find_the_same(shm, rows):
    with cluster(4, shm=shm) as ranks:
        told = []
        found = ranks.all(lambda c: measure(c, 0.05, told.append if c.rank == 0 else lambda line: None))
        assert len(set(found)) == 1
        titles = [what.title for what in told if isinstance(what, Table)]
        steps = {what.title for what in told if isinstance(what, Step)}
        assert steps == {*titles, "cost of messages"}
        assert len(titles) >= 5
        assert all(0 <= what.done < what.total for what in told if isinstance(what, Step))
        told = [what for what in told if isinstance(what, str)]
        assert found[0].rows in rows
        assert found[0].flat % 3 == 0  # bytes to three others
        assert any(line.startswith("piece = ") for line in told)
        assert any(line.startswith("flat = ") for line in told)
        assert found[0].streams in {1, 2, 4}
        assert any(line.startswith("streams = ") for line in told)
        for name in ("rows", "message_flat", "message_tree"):
            assert any(line.startswith(f"{name} = ") for line in told)
        assert found[0].message_tree in {0, 64, 1024}
        assert found[0].message_flat in {0, *(1024 << shift for shift in range(8))}
        assert [c.tuning for c in ranks.communicators] == [SHIPPED] * 4
        assert [c.shared_memory is None for c in ranks.communicators] == [False] * 4


@pytest.mark.usefixtures("_small_arrays")
@pytest.mark.parametrize("size", [2, 3])
def test_without_dedicated_connections_messages_are_measured(size):
    """Between two, all ways send the same."""
    with cluster(size, shm=("no",)) as ranks:
        told = []
        found = ranks.all(lambda c: measure(c, 0.05, told.append if c.rank == 0 else lambda line: None))
        assert len(set(found)) == 1
        told = [what for what in told if isinstance(what, str)]
        assert (found[0].flat, found[0].piece, found[0].rows) == (SHIPPED.flat, SHIPPED.piece, SHIPPED.rows)
        assert any("the clients have no dedicated connections" in line for line in told)
        assert (size == 2) == any("between two clients" in line for line in told)
        limits = [(tuning.message_flat, tuning.message_tree) for tuning in (found[0], SHIPPED)]
        assert size > 2 or limits[0] == limits[1]


def test_who_shares_memory_has_nothing_to_measure():
    with cluster(2, shm=("native",)) as ranks:
        for error in ranks.run(lambda c: measure(c, 0.05, lambda line: None)):
            assert isinstance(error, CollectiveError)
            assert "the clients share memory" in str(error)


def test_one_client_has_nothing_to_measure():
    with cluster(1) as ranks:
        [error] = ranks.run(lambda c: measure(c, 0.05, lambda line: None))
        assert isinstance(error, CollectiveValueError)


@given(
    size=st.integers(2, 16),
    latency=st.integers(10, 500),
    message=st.integers(10, 200),
    byte=st.integers(100, 5000),
)
def test_the_cost_model_is_found_again(size, latency, message, byte):
    """Of times that the model itself would give, except between two, where latency and message are one."""
    hop = (latency + message) * 1e-6
    short = (latency + (size - 1) * message) * 1e-6
    long = short + (size - 1) * 2**20 * byte * 1e-12
    found = costs_of(size, (size - 1).bit_length() * hop, short, long, 2**20 * 300e-12)
    assert found["latency"] + found["message"] == pytest.approx(1000 * (latency + message), rel=0.01)
    if size > 2 and 0.05 < message / (latency + message) < 0.95:
        assert found["message"] == pytest.approx(1000 * message, rel=0.01)
    assert found["byte"] == pytest.approx(byte, rel=0.01)
    assert found["local"] == 300
