"""Restore of keys: in bounded slices, and yet one change."""

from __future__ import annotations

import pytest
from tests.server.core.driving import OBSERVER, Driver

from dmesh_server.core import key_restore
from dmesh_server.core.effects import HeartbeatAck, KeysRestored, KvDeleted, KvRevision, LeaseGranted
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    DropKey,
    GrantLease,
    Heartbeat,
    KvSet,
    RestoreKeys,
    RevokeLease,
    Shutdown,
    Tick,
)
from dmesh_server.core.key_restore import SLICE
from dmesh_server.core.model import Limits

COUNT = 4 * SLICE + 3
KEYS = {f"key/{number * 7919 % COUNT:05}": b"new" for number in range(COUNT)}


@pytest.fixture
def driver() -> Driver:
    driver = Driver(2, Limits(lease=10.0))
    driver.join(0, 1)
    driver.apply(driver.set("key/00000", b"old"))
    driver.apply(driver.set("other", b"old"))
    return driver


def restore(driver: Driver, keys: dict[str, bytes] = KEYS, *, merge: bool = False) -> RestoreKeys:
    return RestoreKeys(driver.token(), OBSERVER, "an operator", keys, merge)


def tick(driver: Driver) -> None:
    """Does what is due next."""
    due = driver.core.next_deadline()
    assert due is not None
    driver.now = max(driver.now, due)
    driver.apply(Tick())


def finish(driver: Driver, event: RestoreKeys) -> KeysRestored | CoreError:
    """Lets the restore go on until it is answered."""
    while event.token not in driver.replies():
        tick(driver)
    answer = driver.replies()[event.token]
    assert isinstance(answer, KeysRestored | CoreError)
    return answer


def values(driver: Driver) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in driver.core._clusters["c"].store.keys.with_prefix("")}


def test_it_is_prepared_in_slices_and_visible_at_once(driver, monkeypatch) -> None:
    handled = []
    decide, check = key_restore.KeyRestore._decide, key_restore.KeyRestore.step

    def counted(self, names, keys):
        handled[-1] += len(names)
        decide(self, names, keys)

    def stepped(self):
        handled.append(0)
        self._check, checks = lambda *key: handled.__setitem__(-1, handled[-1] + 1), self._check
        done = check(self)
        self._check = checks
        return done

    monkeypatch.setattr(key_restore.KeyRestore, "_decide", counted)
    monkeypatch.setattr(key_restore.KeyRestore, "step", stepped)
    watch, wanted = driver.watch("key/"), driver.get("key/00001", None)
    driver.apply(watch)
    driver.apply(wanted)
    event = restore(driver)
    begin = driver.now
    driver.apply(event)
    while event.token not in driver.replies():
        assert values(driver) == {"key/00000": b"old", "other": b"old"}
        driver.apply(Heartbeat(driver.sessions[0], 1))
        assert driver.pushed(0) == [HeartbeatAck(1, driver.core._clusters["c"].epoch)]
        tick(driver)
    assert driver.replies()[event.token] == KeysRestored(len(KEYS), 1, 3)
    assert max(handled) <= SLICE
    assert sum(handled) >= 2 * len(KEYS)
    assert driver.now - begin < 1e-6, "the restore does not wait for time to pass"
    assert values(driver) == KEYS
    (push,) = driver.watched(watch.token)
    assert (push.revision, len(push.events)) == (3, len(KEYS))
    assert [change.kv.key for change in push.events] == sorted(KEYS)
    assert driver.replies()[wanted.token].value == b"new"
    driver.restart()
    assert values(driver) == KEYS


def test_a_crash_in_between_leaves_the_old_keys(driver) -> None:
    driver.apply(restore(driver))
    for _ in range(6):
        tick(driver)
    driver.restart()
    assert values(driver) == {"key/00000": b"old", "other": b"old"}


def test_calls_that_would_change_keys_wait(driver) -> None:
    lease = GrantLease(driver.token(), driver.caller(0), driver.request_id(), 77, 5.0)
    driver.accepted(lease, LeaseGranted)
    driver.apply(KvSet(driver.token(), driver.caller(0), driver.request_id(), "leased", b"x", True, 77))
    first = restore(driver)
    calls = [
        driver.set("key/00001", b"later"),
        driver.increment("n"),
        KvSet(driver.token(), OBSERVER, driver.request_id(), "observed", b"y", True),
        restore(driver, {"key/00002": b"merged"}, merge=True),
    ]
    revoke = RevokeLease(driver.token(), driver.caller(0), driver.request_id(), 77)
    drop = DropKey(driver.token(), OBSERVER, "an operator", "other", 2)
    driver.apply(first)
    tick(driver)
    for call in (*calls[:3], revoke, drop, calls[3]):
        driver.apply(call)
        assert driver.effects == []
    assert isinstance(finish(driver, first), KeysRestored)
    answers = driver.replies()
    assert answers[calls[0].token] == KvRevision(5)
    assert answers[revoke.token] == KvDeleted(0, 7), "the restore had deleted the key with the lease"
    assert not answers[drop.token].changed
    assert finish(driver, calls[3]) == KeysRestored(1, 0, 8)
    expected = {**KEYS, "key/00001": b"later", "n": b"1", "observed": b"y", "key/00002": b"merged"}
    assert values(driver) == expected


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"dmesh/x": b""}, ErrorKind.INVALID_ARGUMENT),
        ({"": b""}, ErrorKind.INVALID_ARGUMENT),
        ({f"large/{n}": bytes(1 << 20) for n in range(3)}, ErrorKind.LIMIT_EXCEEDED),
    ],
)
def test_nothing_changes_if_a_key_is_refused(wrong, kind) -> None:
    driver = Driver(1, Limits(max_store_bytes=2 << 20))
    driver.join(0)
    driver.apply(driver.set("a", b"old"))
    event, later = restore(driver, {**KEYS, **wrong}), driver.set("b")
    driver.apply(event)
    driver.apply(later)
    answer = finish(driver, event)
    assert isinstance(answer, CoreError)
    assert answer.kind is kind
    assert driver.replies()[later.token] == KvRevision(2)
    assert values(driver) == {"a": b"old", "b": b"v"}
    again = restore(driver, {"a": b"1"})
    driver.apply(again)
    assert finish(driver, again) == KeysRestored(1, 1, 3)


def test_keys_that_are_dmesh_s_own_or_equal_stay(driver) -> None:
    driver.apply(driver.set("dmesh/lock/x", b"held"))
    event = restore(driver, {"other": b"old", "key/00000": b"new"})
    driver.apply(event)
    assert finish(driver, event) == KeysRestored(1, 0, 4)
    assert values(driver) == {"dmesh/lock/x": b"held", "other": b"old", "key/00000": b"new"}
    again = restore(driver, {"other": b"old", "key/00000": b"new"})
    driver.apply(again)
    assert finish(driver, again) == KeysRestored(0, 0, 4), "nothing was to be changed"


@pytest.mark.parametrize("losses", [1, 2 * key_restore._ATTEMPTS])
def test_leases_that_end_in_between(driver, losses) -> None:
    for number in range(1, losses + 1):
        grant = GrantLease(driver.token(), driver.caller(0), driver.request_id(), number, 1.0)
        driver.accepted(grant, LeaseGranted)
        key = f"key/0000{number}"
        driver.apply(KvSet(driver.token(), driver.caller(0), driver.request_id(), key, b"x", True, number))
        driver.now += 0.1
    event = restore(driver)
    driver.apply(event)
    for _ in range(losses):
        for _ in range(6):
            if event.token not in driver.replies():
                tick(driver)
        if event.token in driver.replies():
            break
        driver.now = max(driver.now, 101.0) + 0.1
        driver.apply(Tick())
    finish(driver, event)
    assert values(driver) == KEYS
    driver.restart()
    assert values(driver) == KEYS


@pytest.mark.parametrize("ending", ["cluster", "server"])
def test_a_cluster_or_a_server_that_ends_answers_all(driver, ending) -> None:
    event, later = restore(driver), KvSet(driver.token(), OBSERVER, driver.request_id(), "k", b"v", True)
    driver.apply(event)
    tick(driver)
    driver.apply(later)
    if ending == "cluster":
        driver.apply(driver.leave(0))
        driver.apply(driver.leave(1))
    else:
        driver.apply(Shutdown())
    for token in (event.token, later.token):
        answer = driver.replies()[token]
        assert isinstance(answer, CoreError)
        assert answer.kind in (ErrorKind.CLUSTER_ENDING, ErrorKind.SHUTTING_DOWN)
    assert driver.core.next_deadline() is None
