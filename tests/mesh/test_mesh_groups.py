"""`Mesh.group`: the clients along a dimension."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mesh.meshes import devices, grid

from dmesh.errors import MeshError, NotInitializedError
from dmesh.mesh import Mesh, create_distributed_mesh, create_mesh
from dmesh.mesh.ownership import group_along, owners


def ranks(dims, clients, axis):
    """What each client's group along a dimension is, by the clients' equal shares of the mesh."""
    return [
        group_along(grid(dims, clients, c)._fields, list(dims).index(axis), c, clients, "worker")
        for c in range(clients)
    ]


def test_the_group_is_asked_of_the_collectives(join):
    communicator = join(1, cpus=[2, 2, 2, 2])
    mesh = create_distributed_mesh([("batch", 4), ("model", 2)])
    assert mesh.group("batch") == ("group", "batch", (0, 1, 2, 3))
    assert mesh.group("model") == ("group", "model", (1,))
    assert mesh.group("batch") == ("group", "batch", (0, 1, 2, 3))
    assert communicator.asked[0] == communicator.asked[2] == (mesh.fingerprint, "batch", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("dims", "clients", "axis", "expected"),
    [
        ({"batch": 2, "model": 4}, 4, "batch", [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ({"batch": 2, "model": 4}, 4, "model", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ({"batch": 8}, 4, "batch", [(0, 1, 2, 3)] * 4),
        ({"batch": 8, "model": 1}, 4, "model", [(0,), (1,), (2,), (3,)]),
        ({"a": 2, "b": 2, "c": 2}, 4, "a", [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ({"a": 2, "b": 2, "c": 2}, 4, "b", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ({"a": 2, "b": 2, "c": 2}, 4, "c", [(0,), (1,), (2,), (3,)]),
        ({"x": 4, "y": 2}, 2, "x", [(0, 1), (0, 1)]),
        ({"x": 4, "y": 2}, 1, "x", [(0,)]),
    ],
)
def test_who_is_along_a_dimension(dims, clients, axis, expected):
    assert ranks(dims, clients, axis) == expected


@pytest.mark.parametrize(("client", "lines"), [(0, r"\[0\] and \[0, 1\]"), (1, r"\[0, 1\] and \[1\]")])
def test_a_dimension_that_cuts_through_a_client(join, client, lines):
    """Client 0 has row 0 and half of row 1, client 1 the rest: along y, each is alone and with the other."""
    join(client, cpus=[6, 6])
    mesh = create_distributed_mesh([("x", 3), ("y", 4)], mesh_name="m")
    message = (
        r"there is no single group of clients along 'y' of mesh 'm' \(shape \[3, 4\]\): the devices of "
        rf"client {client} lie on lines of different clients, such as {lines}\. Choose sizes or an order"
    )
    with pytest.raises(MeshError, match=message):
        mesh.group("y")
    assert mesh.group("x") == ("group", "x", (0, 1))


def test_one_clients_trouble_is_refused_on_all_that_would_wait_for_it():
    """Each line meets two clients, and client 1 is on two lines: nobody may start a collective."""
    fields = [grid({"x": 3, "y": 4}, 4, c)._fields for c in range(4)]  # three devices each: 0001 1122 2333
    for client in range(4):
        with pytest.raises(MeshError, match="there is no single group of clients along 'y'"):
            group_along(fields[client], 1, client, 4, "worker")


def test_the_order_is_the_dimensions():
    everybody = devices(1, 2) + devices(1, 0) + devices(1, 1)
    for client in range(3):
        own = [2, 0, 1].index(client)
        mesh = Mesh(["x"], np.arange(3), [own], [everybody[own]], global_devices=everybody)
        assert group_along(mesh._fields, 0, client, 3, "worker") == (2, 0, 1)


def test_a_clients_own_mesh(join):
    join(2, cpus=[2, 2, 2])
    assert create_mesh().group("x") == ("group", "x", (2,))


def test_local_mode(alone):
    alone(cpus=2)
    assert create_mesh([("x", 2)]).group("x") == ("group", "x", (0,))


def test_it_needs_an_initialized_system():
    with pytest.raises(NotInitializedError, match=r"call dmesh\.initialize_accelerator_system"):
        grid({"x": 2}).group("x")


def test_meshes_of_others(join):
    join(0, cpus=[1, 1])
    with pytest.raises(
        MeshError, match="the local devices of mesh '' belong to client 1, but this is client 0"
    ):
        grid({"x": 2}, clients=2, client=1).group("x")
    others = devices(1, 1)
    remote = Mesh(["x"], np.arange(1), [], [], "r", global_devices=others)
    with pytest.raises(
        MeshError, match=r"client 0 has no device in mesh 'r', whose clients are \[1\]; only they"
    ):
        remote.group("x")
    with pytest.raises(MeshError, match=r"has devices of client 3, but the 2 clients are 0 to 1"):
        grid({"x": 4}, clients=4, client=0).group("x")
    foreign = Mesh(["x"], np.arange(1), [0], devices(1, job="other"))
    with pytest.raises(MeshError, match="over devices of job other, but this client belongs to job worker"):
        foreign.group("x")


@st.composite
def shares(draw):
    dims = {name: draw(st.integers(1, 4)) for name in draw(st.sampled_from(["a", "ab", "abc"]))}
    size = int(np.prod(list(dims.values())))
    return (
        dims,
        draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])),
        draw(st.sampled_from(list(dims))),
    )


@given(shares())
def test_groups_are_the_same_for_all_their_members(case):
    """Whoever gets a group is in it, and its other members get the very same one: nobody waits in vain."""
    dims, clients, axis = case
    got = {}
    for client in range(clients):
        try:
            got[client] = ranks_of(dims, clients, client, axis)
        except MeshError:
            got[client] = None
    for client, group in got.items():
        if group is not None:
            assert client in group
            assert all(got[other] == group for other in group)


@given(shares())
def test_a_group_is_who_shares_the_other_coordinates(case):
    dims, clients, axis = case
    position = list(dims).index(axis)
    for client in range(clients):
        mesh = grid(dims, clients, client)
        try:
            group = ranks_of(dims, clients, client, axis)
        except MeshError:
            continue
        holders = np.array(owners(mesh._fields)).reshape(mesh.shape())
        for place in (tuple(where.values()) for where in mesh.local_device_locations()):
            line = holders[(*place[:position], slice(None), *place[position + 1 :])].tolist()
            assert tuple(dict.fromkeys(line)) == group


def ranks_of(dims, clients, client, axis):
    return group_along(grid(dims, clients, client)._fields, list(dims).index(axis), client, clients, "worker")
