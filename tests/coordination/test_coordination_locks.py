"""Keys that end with a lease, locks, semaphores, elections and counters, with real agents."""

from __future__ import annotations

import functools
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dmesh import coordination
from dmesh.coordination import Condition, Counter, Election, Get, Lock, Put, Semaphore
from dmesh.coordination.watches import WatchStream
from dmesh.errors import (
    ConfigurationError,
    CoordinatorUnavailableError,
    FencedError,
    KeyExistsError,
    LeaseExpiredError,
    LockLostError,
    LockTimeoutError,
    StoreLostError,
    StoreUnavailableError,
    WatchCompactedError,
)

SECONDS = 60.0


@pytest.fixture
def join(server, join):
    return functools.partial(join, server.address)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def wait_for_queue(agent, kind: str, name: str, length: int) -> None:
    """Returns when so many processes hold it or wait for it."""
    prefix = f"dmesh/{kind}/{name}/"
    with agent.watch(prefix, 1) as watch:
        present: set[str] = set()
        while len(present) != length:
            event = next(watch)
            (present.discard if event.deleted else present.add)(event.key)


# Leases.


def test_a_key_ends_with_its_time(join) -> None:
    agent = join(0, 1)
    lease = agent.lease(0.2, keep_alive=False)
    with agent.watch("k") as watch:
        agent.key_value_set("k", "v", lease=lease.number)
        assert [next(watch).deleted, next(watch).deleted] == [False, True]
    with pytest.raises(LeaseExpiredError, match="there is no lease"):
        agent.key_value_set("k", "v", lease=lease.number)
    with pytest.raises(LeaseExpiredError):
        lease.renew()
    assert lease.lost


def test_a_lease_is_renewed_until_it_is_revoked(join) -> None:
    agent = join(0, 1)
    with agent.lease(1.5) as lease:
        agent.transaction((), [Put("a", "1", lease=lease), Put("b", "2", lease=lease), Put("c", "3")])
        time.sleep(2.0)  # more than its time to live
        assert set(agent.key_value_list("")) == {"a", "b", "c"}
        assert not lease.lost
    assert set(agent.key_value_list("")) == {"c"}
    assert lease.revoke() == 0


def test_ephemeral_keys_end_with_their_process(join) -> None:
    first, second = join(0, 2), join(1, 2)
    second.key_value_set("members/1", "here", ephemeral=True)
    second.transaction((), [Put("members/1b", "here", ephemeral=True)])
    with first.watch("members/") as watch:
        second.leave()
        assert {next(watch).key, next(watch).key} == {"members/1", "members/1b"}
    assert first.key_value_list("members/") == {}


def test_what_a_lease_cannot_be(join) -> None:
    agent = join(0, 1)
    for ttl in (0, -1, "5", float("nan"), 1e12, 0.001):
        with pytest.raises(ConfigurationError):
            agent.lease(ttl)


# Locks.


def test_a_lock_has_one_holder_and_its_tokens_grow(join, pool) -> None:
    agents = [join(index, 4) for index in range(4)]
    inside, tokens, guard = [], [], threading.Lock()

    def work(agent) -> None:
        for _ in range(5):
            lock = Lock("l", agent=agent)
            with lock:
                with guard:
                    inside.append(agent)
                    assert len(inside) == 1
                    tokens.append(lock.token)
                agent.key_value_increment("n")
                with guard:
                    inside.remove(agent)

    for future in [pool.submit(work, agent) for agent in agents]:
        future.result(SECONDS)
    assert tokens == sorted(set(tokens))
    assert agents[0].key_value_get("n") == b"20"
    assert agents[0].key_value_list("dmesh/lock/") == {}


def test_it_goes_to_the_next_when_its_holder_leaves(join, pool) -> None:
    first, second, third = (join(index, 3) for index in range(3))
    Lock("l", agent=first).acquire()
    waiting = pool.submit(Lock("l", agent=second).acquire, SECONDS)
    wait_for_queue(third, "lock", "l", 2)
    last = pool.submit(Lock("l", agent=third).acquire, SECONDS)
    wait_for_queue(third, "lock", "l", 3)
    first.leave()
    token = waiting.result(SECONDS)
    assert not last.done()
    second.report_error("crashed")
    assert last.result(SECONDS) > token


def test_a_lock_that_is_held_is_not_waited_for_longer_than_asked(join) -> None:
    first, second = join(0, 2), join(1, 2)
    held, lock = Lock("l", agent=first), Lock("l", agent=second)
    token = held.acquire(0)
    for timeout in (0, 0.1):
        with pytest.raises(LockTimeoutError, match=r"held by /job:worker/task:0 \(host .*, pid \d+\)"):
            lock.acquire(timeout)
    assert not lock.held
    assert len(first.key_value_list("dmesh/lock/l/")) == 1, "who gave up does not stay in the queue"
    held.release()
    assert lock.acquire(0) > token
    for wrong in (lambda: lock.acquire(), lambda: held.release(), lambda: held.token, lambda: Lock("")):
        with pytest.raises(ConfigurationError):
            wrong()
    with pytest.raises(ConfigurationError):
        held.acquire(-1)


def test_a_lost_lock_is_noticed_and_its_fence_holds(join, pool) -> None:
    first, second = join(0, 2), join(1, 2)
    lease = first.lease(SECONDS, keep_alive=False)
    held, lock = Lock("l", lease=lease, agent=first), Lock("l", agent=second)
    held.acquire()
    assert first.transaction([held.condition], [Put("checkpoint", "1")])
    waiting = pool.submit(lock.acquire, SECONDS)
    wait_for_queue(first, "lock", "l", 2)
    lease.revoke()
    assert waiting.result(SECONDS) > held.token
    assert not first.transaction([held.condition], [Put("checkpoint", "stale")])
    assert second.transaction([lock.condition], [Put("checkpoint", "2")])
    with pytest.raises(LockLostError):
        held.release()
    assert first.key_value_get("checkpoint") == b"2"


def test_who_loses_its_lease_while_it_waits_is_told(join, pool) -> None:
    first, second = join(0, 2), join(1, 2)
    Lock("l", agent=first).acquire()
    lease = second.lease(SECONDS, keep_alive=False)
    waiting = pool.submit(Lock("l", lease=lease, agent=second).acquire, SECONDS)
    wait_for_queue(first, "lock", "l", 2)
    lease.revoke()
    with pytest.raises(LockLostError, match="lock 'l'"):
        waiting.result(SECONDS)


def test_the_queue_is_read_again_if_its_changes_are_forgotten(join, pool, monkeypatch) -> None:
    first, second = join(0, 2), join(1, 2)
    held, watch, forgotten = Lock("l", agent=first), second.watch, queue.SimpleQueue()
    held.acquire()

    def forgetful(prefix: str, revision: int):
        if forgotten.empty():
            forgotten.put(revision)
            held.release()
            raise WatchCompactedError("the server keeps the changes since later")
        return watch(prefix, revision)

    monkeypatch.setattr(second, "watch", forgetful)
    assert pool.submit(Lock("l", agent=second).acquire, SECONDS).result(SECONDS) > 0


def test_names_do_not_run_into_each_other(join) -> None:
    agent = join(0, 1)
    with Lock("a", agent=agent), Lock("a/b", agent=agent), Lock("a%2Fb", agent=agent), Lock("ä", agent=agent):
        assert Election("a", agent=agent).leader() is None
        with Semaphore("a", 1, agent=agent):
            pass


def test_the_error_of_the_body_comes_out(join) -> None:
    agent = join(0, 1)
    with pytest.raises(ZeroDivisionError), Lock("l", agent=agent):
        raise ZeroDivisionError
    assert Lock("l", agent=agent).acquire(0)
    lock = Lock("m", agent=agent)
    with pytest.raises(ZeroDivisionError), lock:
        agent.key_value_delete("dmesh/lock/m/", is_prefix=True)
        raise ZeroDivisionError
    with pytest.raises(LockLostError), lock:
        agent.key_value_delete("dmesh/lock/m/", is_prefix=True)


# Semaphores.


def test_a_semaphore_has_so_many_places(join, pool) -> None:
    agents = [join(index, 6) for index in range(6)]
    guard, inside, most = threading.Lock(), [0], [0]

    def work(agent) -> None:
        for _ in range(4):
            with Semaphore("s", 2, agent=agent):
                with guard:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                agent.key_value_increment("n")
                with guard:
                    inside[0] -= 1

    for future in [pool.submit(work, agent) for agent in agents]:
        future.result(SECONDS)
    assert most[0] <= 2
    first, second, third = (Semaphore("s", 2, agent=agent) for agent in agents[:3])
    both = r"held by /job:worker/task:0 .*, /job:worker/task:1 "
    with first, second, pytest.raises(LockTimeoutError, match=both):
        third.acquire(0)
    assert agents[0].key_value_get("n") == b"24"
    with pytest.raises(ConfigurationError):
        Semaphore("s", 0)


def test_a_semaphore_is_not_held_up_by_one_that_gives_up_or_is_lost(join, pool) -> None:
    agents = [join(index, 5) for index in range(5)]
    held = [Semaphore("s", 2, agent=agents[0]), Semaphore("s", 2, agent=agents[1])]
    for semaphore in held:
        semaphore.acquire()
    first = pool.submit(Semaphore("s", 2, agent=agents[2]).acquire, SECONDS)
    wait_for_queue(agents[0], "semaphore", "s", 3)
    lease = agents[3].lease(SECONDS, keep_alive=False)
    second = pool.submit(Semaphore("s", 2, lease=lease, agent=agents[3]).acquire, SECONDS)
    wait_for_queue(agents[0], "semaphore", "s", 4)
    last = pool.submit(Semaphore("s", 2, agent=agents[4]).acquire, SECONDS)
    wait_for_queue(agents[0], "semaphore", "s", 5)
    lease.revoke()
    with pytest.raises(LockLostError):
        second.result(SECONDS)
    agents[2].report_error("crashed")  # the first in line, before it got a place
    with pytest.raises(FencedError):
        first.result(SECONDS)
    assert not last.done()
    held[0].release()
    assert last.result(SECONDS) > held[1].token


# What waiting costs.


@pytest.mark.parametrize(
    ("kind", "places", "make"),
    [
        ("lock", 1, lambda agent: Lock("q", agent=agent)),
        ("semaphore", 3, lambda agent: Semaphore("q", 3, agent=agent)),
    ],
)
def test_a_release_wakes_no_more_processes_however_many_wait(kind, places, make, join, monkeypatch) -> None:
    agent, waiters = join(0, 1), 50
    held, order, heard, read = [], queue.SimpleQueue(), queue.SimpleQueue(), WatchStream.read

    def counted(stream):
        batch = read(stream)
        heard.put(len(batch))
        return batch

    def wait(number: int) -> None:
        place = make(agent)
        place.acquire(SECONDS)
        order.put((number, place))

    monkeypatch.setattr(WatchStream, "read", counted)
    for _ in range(places):
        held.append(make(agent))
        held[-1].acquire()
    with ThreadPoolExecutor(waiters) as threads:
        for number in range(waiters):  # one after the other, so that their order is known
            threads.submit(wait, number)
            wait_for_queue(agent, kind, "q", places + number + 1)
        while not heard.empty():
            heard.get()
        for number in range(waiters):
            held.pop(0).release()
            found, place = order.get(timeout=SECONDS)
            assert found == number, "first come, first served"
            assert place.token > max((other.token for other in held), default=0)
            held.append(place)
    woken = sum(heard.get() for _ in range(heard.qsize()))
    # A deletion; with several places also what the waiter behind is told, and what the first one overhears.
    assert woken <= waiters * (1 if places == 1 else 4)


# Elections.


def test_an_election(join, pool) -> None:
    first, second = join(0, 2), join(1, 2)
    mine, other = Election("chief", agent=first), Election("chief", agent=second)
    assert mine.leader() is None
    seen = mine.observe()
    assert next(seen) is None
    token = mine.campaign("node0:4000")
    leader = next(seen)
    assert leader is not None
    assert (leader.text(), leader.token) == ("node0:4000", token)
    waiting = pool.submit(other.campaign, "node1:4000", SECONDS)
    wait_for_queue(first, "election", "chief", 2)
    assert other.leader() == leader
    mine.resign()
    assert waiting.result(SECONDS) > token
    leader = next(seen)
    assert leader is not None
    assert leader.text() == "node1:4000"
    other.resign()
    assert next(seen) is None
    seen.close()


# Counters, and the public names.


def test_a_counter(join) -> None:
    first, second = join(0, 2), join(1, 2)
    assert Counter("c", agent=first).value() == 0
    assert Counter("c", agent=first).add(5) == 5
    assert Counter("c", agent=second).add(-7) == -2
    assert Counter("c", agent=first).value() == -2
    with pytest.raises(ConfigurationError):
        Counter("")


def test_the_public_functions(join, monkeypatch) -> None:
    agent = join(0, 1)
    monkeypatch.setattr(coordination, "_agent", lambda: agent)
    coordination.key_value_set("ttl", "1", ttl=SECONDS)
    coordination.key_value_set("ephemeral", "1", ephemeral=True)
    with pytest.raises(ConfigurationError, match="only one lifetime"):
        coordination.key_value_set("k", "1", ttl=1, ephemeral=True)
    with pytest.raises(KeyExistsError):
        coordination.key_value_set("ttl", "2", ttl=SECONDS)
    with coordination.lease(SECONDS) as lease:
        coordination.key_value_set("leased", "1", lease=lease)
        found = coordination.transaction([Condition.exists("leased")], [Get("leased")])
        assert found.results == ({"leased": b"1"},)
    assert coordination.key_value_try_get("leased") is None


@pytest.mark.parametrize("error", [CoordinatorUnavailableError, StoreUnavailableError, StoreLostError])
@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_a_place_is_given_up_even_if_the_coordinator_cannot_do_so_yet(when, error, join, monkeypatch) -> None:
    first, second = join(0, 2), join(1, 2)
    lock, gone = Lock("l", agent=first), error("away")
    monkeypatch.setattr("dmesh.coordination.locks._AGAIN", 0.01)
    put, delete = first.transaction, first.key_value_delete
    # A loss of the store is told once: if it is told again and again, this process is no member any more.
    failures = iter([True] * (1 + (when == "leaving") if error is StoreLostError else 3))

    def set_unanswered(**options):
        put(**options)
        raise gone

    def delete_later(key):
        if next(failures, False):
            raise gone
        return delete(key)

    if when == "leaving":
        lock.acquire()
    else:
        monkeypatch.setattr(first, "transaction", set_unanswered)
    monkeypatch.setattr(first, "key_value_delete", delete_later)
    with pytest.raises(error):
        lock.release() if when == "leaving" else lock.acquire()
    assert Lock("l", agent=second).acquire(timeout=SECONDS)
    assert not lock.held
