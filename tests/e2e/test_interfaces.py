"""What a client listens on: nothing that the user has not named, or that was not open anyway."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from dmesh.config.interfaces import look_at
from dmesh.config.settings import Settings
from dmesh.errors import ConfigurationError
from dmesh.runtime import data_plane
from dmesh.runtime.data_plane import DataPlane

pytestmark = pytest.mark.skipif(isinstance(look_at("lo"), str), reason="no loopback in /sys")


def listens_at(address="127.0.0.2:0", **settings):
    """Returns HOST:PORT of the client's own listener, and of those of its interfaces."""
    own = Settings(jobs=(address,), own_address=address, **settings)
    with closing(DataPlane(own, 0, time.monotonic() + 60)) as plane:
        sockets = [address.listener for address in plane._addresses if address.listener is not None]
        names = [sock.getsockname() for sock in (plane._listener, *sockets)]
        offered = [(str(address.address), address.port) for address in plane._addresses]
    assert all(sock.fileno() == -1 for sock in sockets)
    return names, offered


def test_without_the_setting_only_the_own_address_is_open():
    names, offered = listens_at()
    assert [host for host, _ in names] == ["127.0.0.2"]
    assert offered == []


def test_a_named_interface_is_open_at_the_same_port():
    names, offered = listens_at(interfaces=("lo",))
    assert [host for host, _ in names] == ["127.0.0.2", "127.0.0.1"]
    assert names[0][1] == names[1][1]
    assert offered == [("127.0.0.1/8", names[0][1])]


@pytest.mark.parametrize(
    "settings", [{"address": "127.0.0.1:0"}, {"bind_host": "0.0.0.0"}, {"bind_host": "::"}]
)
def test_where_it_listens_anyway_nothing_is_opened(settings):
    names, offered = listens_at(interfaces=("lo",), **settings)
    assert len(names) == 1
    assert offered == [("127.0.0.1/8", names[0][1])]


def test_none_but_the_own_address_by_a_zero():
    assert listens_at(interfaces=(), bind_host="0.0.0.0")[1] == []


def test_an_interface_that_is_not_there_is_refused_before_anything_is_opened():
    with pytest.raises(ConfigurationError, match="DMESH_INTERFACES names nic9"):
        listens_at(interfaces=("lo", "nic9"))


def test_what_was_opened_is_closed_if_an_interface_cannot_be_used(monkeypatch):
    opened, open_one = [], data_plane._open

    def fail_the_third(host, port):
        if len(opened) == 2:
            raise KeyboardInterrupt
        opened.append(open_one(host, port))
        return opened[-1]

    monkeypatch.setattr(data_plane, "_open", fail_the_third)
    with pytest.raises(KeyboardInterrupt):
        listens_at("127.0.0.2:0", interfaces=("lo", "lo"))
    assert [listener.fileno() for listener in opened] == [-1, -1]
