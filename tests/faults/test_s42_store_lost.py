"""Scenario 42: the server is restarted with a store that is empty, older, or of another cluster.

No program goes on as if nothing had happened: the next key-value call, every blocked read and every watch of
a client that was there before raises a `StoreLostError`. After that the client uses the store that there is,
with its owned keys set again; only where another cluster holds its place, the error is final.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.processes import ClientProcess, RemoteError, ServerProcess, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

Make = Callable[..., ServerProcess]
Cluster = Callable[..., list[ClientProcess]]

READ = "agent.key_value_try_get('step')"


def lost(client: ClientProcess, source: str = READ) -> RemoteError:
    """Lets a client make a call that must say that the store was lost; returns what it says."""
    with pytest.raises(RemoteError) as caught:
        client.do(source)
    assert caught.value.kind == "StoreLostError", caught.value
    assert {"CoordinationError", "LookupError"} <= set(caught.value.kinds)
    return caught.value


def fill(clients: list[ClientProcess]) -> None:
    clients[0].do("agent.key_value_set('step', '17')")
    for client in clients:
        client.do("agent.key_value_increment('counter')")


@pytest.mark.parametrize("kept", ["memory", "directory"])
def test_an_empty_store(kept: str, make_server: Make, make_cluster: Cluster, tmp_path: Path) -> None:
    where = {} if kept == "directory" else {"data_dir": None}
    server = make_server(**where).start()
    clients = make_cluster(3, server.address)
    fill(clients)
    for index, client in enumerate(clients):
        client.do(f"agent.key_value_set('address/{index}', 'host-{index}', owned=True)")
    blocked = clients[1].submit("agent.key_value_get('never')")
    clients[2].do("watch = agent.watch('')")
    watched = clients[2].submit("next(watch)")
    server.kill()
    if server.data_dir is not None:
        server.data_dir.rename(tmp_path / "moved away")
    server.start()
    for waiting in (blocked, watched):
        with pytest.raises(RemoteError) as caught:
            waiting.result(90)
        assert caught.value.kind == "StoreLostError", caught.value
    told = lost(clients[0])
    assert f"the coordination server at {server.address}" in told.message
    assert "empty" in told.message
    assert "1 key that this process owns was set again" in told.message
    # From here on each goes on with the new store, in which everybody's own keys are. The second was told by
    # its blocked read; a watch may be read by another part of the program than the one that makes calls.
    lost(clients[2], "agent.key_value_list('')")
    found = "sorted(agent.key_value_list('address/').text().items())"
    wanted = [[f"address/{index}", f"host-{index}"] for index in range(3)]
    for client in clients:
        eventually(lambda client=client: client.do(found) == wanted, "the owned keys")
        assert client.do(READ) is None
    assert clients[0].do("agent.key_value_increment('counter')") == 1
    with pytest.raises(RemoteError, match="StoreLostError"):
        clients[2].do("next(watch)")  # this watch belongs to the store that is gone
    assert [client.told("departed") for client in clients] == [[], [], []]
    for future in [client.submit("agent.barrier('after', timeout=60)") for client in clients]:
        future.result(90)


def test_an_older_store(make_server: Make, make_cluster: Cluster, tmp_path: Path) -> None:
    server = make_server().start()
    clients = make_cluster(3, server.address)
    fill(clients)
    assert server.data_dir is not None
    assert server.terminate() == 0
    shutil.copytree(server.data_dir, tmp_path / "copy")
    server.start()
    clients[0].do("agent.key_value_set('step', '18', allow_overwrite=True)")
    assert clients[1].do("agent.key_value_increment('counter')") == 4
    before = [client.do("agent.epoch") for client in clients]
    server.kill()
    shutil.rmtree(server.data_dir)
    shutil.copytree(tmp_path / "copy", server.data_dir)
    server.start()
    # The third one was told nothing that the copy does not have; it learns from the others' word.
    for client in clients:
        told = lost(client)
        assert "older" in told.message
        assert server.address in told.message
    assert clients[2].do(READ) == "17"
    assert clients[1].do("agent.key_value_increment('counter')") == 4
    assert min(client.do("agent.epoch") for client in clients) > max(before)
    for future in [client.submit("agent.barrier('after', timeout=60)") for client in clients]:
        future.result(90)
    # And it stays noticed, or rather is not noticed again, when this store is kept.
    server.restart()
    assert [client.do(READ) for client in clients] == ["17"] * 3


@pytest.mark.parametrize("place", ["taken", "free", "unknown"])
def test_the_store_of_another_cluster(
    place: str,
    make_server: Make,
    make_client: Callable[..., ClientProcess],
    make_cluster: Cluster,
    tmp_path: Path,
) -> None:
    theirs = make_server(data_dir=tmp_path / "theirs").start()
    name = "other" if place == "unknown" else "default"
    others = [
        make_client(index, 3, theirs.address, cluster=name).join()
        for index in range(2 if place == "free" else 3)
    ]
    others[0].do("agent.key_value_set('step', 'theirs')")
    theirs.kill()
    for client in others:
        client.kill()
    server = make_server(data_dir=tmp_path / "ours").start()
    clients = make_cluster(3, server.address)
    fill(clients)
    server.kill()
    server.data_dir = tmp_path / "theirs"
    server.start()
    for client in clients:
        told = lost(client)
        assert server.address in told.message
        if place == "unknown":
            assert client.do(READ) is None
        else:
            assert "another cluster" in told.message
            assert lost(client).message == told.message, "final: the place is not this client's any more"
