"""The history checker itself: it accepts what a correct store can answer, and refuses what it cannot."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.history import (
    Event,
    Operation,
    Violation,
    Watching,
    check_keys,
    check_revisions,
    check_watch,
    linearizable,
    load,
    step,
)


def op(kind, *arguments, at, answer=None, key="k", revision=0):
    called, returned = at
    return Operation("c", kind, key, arguments, called, returned, answer, revision)


NEVER = math.inf

GOOD = {
    "nothing": [],
    "one after the other": [op("set", "a", at=(0, 1), answer="ok"), op("get", at=(2, 3), answer="a")],
    "a read at the same time as a write sees either": [
        op("set", "a", at=(0, 9), answer="ok"),
        op("get", at=(1, 2), answer=None),
        op("get", at=(3, 4), answer="a"),
    ],
    "a lost answer to something that was done": [
        op("set", "a", at=(0, NEVER)),
        op("get", at=(5, 6), answer="a"),
    ],
    "a lost answer to something that never was": [
        op("set", "a", at=(0, NEVER)),
        op("get", at=(5, 6), answer=None),
    ],
    "a lost answer to something that was done much later": [
        op("set", "a", at=(0, NEVER)),
        op("get", at=(5, 6), answer=None),
        op("get", at=(7, 8), answer="a"),
    ],
    "increments at the same time": [
        op("increment", 1, at=(0, 9), answer=2),
        op("increment", 1, at=(0, 9), answer=3),
        op("increment", 1, at=(0, 9), answer=1),
    ],
    "one of two creates is refused": [
        op("create", "a", at=(0, 9), answer="KeyExistsError"),
        op("create", "b", at=(0, 9), answer="ok"),
        op("get", at=(10, 11), answer="b"),
    ],
    "compare and set": [
        op("cas", None, "a", at=(0, 1), answer=[True, "a"]),
        op("cas", None, "b", at=(2, 3), answer=[False, "a"]),
        op("cas", "a", "c", at=(4, 5), answer=[True, "c"]),
        op("delete", at=(6, 7), answer=1),
        op("delete", at=(8, 9), answer=0),
    ],
}
BAD = {
    "stale read": [
        op("set", "a", at=(0, 1), answer="ok"),
        op("set", "b", at=(2, 3), answer="ok"),
        op("get", at=(4, 5), answer="a"),
    ],
    "lost write": [op("set", "a", at=(0, 1), answer="ok"), op("get", at=(2, 3), answer=None)],
    "read of what nobody wrote": [op("get", at=(0, 1), answer="x")],
    "a value that comes back": [
        op("set", "a", at=(0, 9), answer="ok"),
        op("get", at=(1, 2), answer="a"),
        op("get", at=(3, 4), answer=None),
    ],
    "an increment done twice": [
        op("increment", 1, at=(0, 1), answer=1),
        op("increment", 1, at=(2, 3), answer=3),
    ],
    "the same sum twice": [
        op("increment", 1, at=(0, 9), answer=1),
        op("increment", 1, at=(0, 9), answer=1),
    ],
    "two creates": [op("create", "a", at=(0, 9), answer="ok"), op("create", "b", at=(0, 9), answer="ok")],
    "two owners of a compare and set": [
        op("cas", None, "a", at=(0, 9), answer=[True, "a"]),
        op("cas", None, "b", at=(0, 9), answer=[True, "b"]),
    ],
    "done before it was called": [
        op("get", at=(0, 1), answer="a"),
        op("set", "a", at=(2, NEVER)),
    ],
    "a lost answer to something that was done, and undone": [
        op("set", "a", at=(0, NEVER)),
        op("get", at=(1, 2), answer="a"),
        op("get", at=(3, 4), answer=None),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_accepts(name):
    assert linearizable(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    assert not linearizable(BAD[name])
    with pytest.raises(Violation, match="'k'"):
        check_keys(BAD[name])


def brute_force(operations):
    """Tries all orders of all subsets that have everything with a known outcome."""
    unknown = [one for one in operations if not one.known]
    known = [one for one in operations if one.known]
    for count in range(len(unknown) + 1):
        for chosen in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *chosen]):
                if any(b.returned < a.called for i, a in enumerate(order) for b in order[i + 1 :]):
                    continue
                state = None
                for one in order:
                    state, answer = step(state, one)
                    if one.known and answer != one.answer:
                        break
                else:
                    return True
    return False


@st.composite
def random_histories(draw):
    """Short histories with answers that may or may not be true."""
    operations = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["set", "create", "get", "cas", "increment", "delete"]))
        value = st.sampled_from(["1", "x"])
        arguments = {
            "set": st.tuples(value),
            "create": st.tuples(value),
            "get": st.just(()),
            "cas": st.tuples(st.none() | value, value),
            "increment": st.just((1,)),
            "delete": st.just(()),
        }[kind]
        called = draw(st.integers(0, 8))
        one = op(kind, *draw(arguments), at=(called, called + draw(st.integers(0, 8)) + 0.5))
        _, answer = step(draw(st.sampled_from([None, "1", "x", "2"])), one)
        one = replace(one, answer=answer)
        if draw(st.integers(0, 3)) == 0:
            one = replace(one, returned=NEVER, answer=None)
        operations.append(one)
    return operations


@given(random_histories())
def test_agrees_with_trying_all_orders(operations):
    assert linearizable(operations) == brute_force(operations)


def simulate(seed, clients=5, length=60):
    """A history of a correct store: every operation takes effect at a random instant of its time."""
    chance = random.Random(seed)
    plan = []
    for client in range(clients):
        now = chance.random()
        for number in range(length // clients):
            called, effect = now, now + chance.random()
            returned = effect + chance.random()
            kind = chance.choice(["set", "create", "get", "get", "cas", "increment", "delete"])
            value = chance.choice(["1", "2", f"{client}-{number}"])
            arguments = {
                "set": (value,),
                "create": (value,),
                "cas": (chance.choice([None, "1", "2"]), value),
                "increment": (1,),
            }.get(kind, ())
            plan.append((effect, op(kind, *arguments, at=(called, returned))))
            now = returned + chance.random() / 10
    state, history = None, []
    for _, one in sorted(plan, key=lambda entry: entry[0]):
        lost = chance.random() < 0.1
        if lost and chance.random() < 0.5:
            history.append(replace(one, returned=NEVER))
            continue
        state, answer = step(state, one)
        history.append(replace(one, returned=NEVER) if lost else replace(one, answer=answer))
    return history


@given(st.integers(0, 10_000))
def test_accepts_what_a_correct_store_answers(seed):
    assert linearizable(simulate(seed))


@given(st.integers(0, 10_000))
def test_refuses_a_read_of_what_was_never_written(seed):
    history = simulate(seed)
    reads = [one for one in history if one.kind == "get" and one.known]
    if reads:
        wrong = random.Random(seed).choice(reads)
        assert not linearizable([replace(one, answer="nobody's") if one is wrong else one for one in history])


def test_names_the_shortest_beginning_that_is_wrong():
    wrong = [*BAD["lost write"], *(op("get", at=(10 + n, 10.5 + n), answer=None) for n in range(50))]
    with pytest.raises(Violation) as told:
        check_keys(wrong)
    assert len(told.value.operations) == 2


JOURNAL = [
    Event(1, "a", "1"),
    Event(2, "b", "x"),
    Event(3, "a", None),
    Event(3, "b", None),
    Event(4, "a", "2"),
]


def test_watch_that_saw_everything():
    check_watch(Watching("w", 1, JOURNAL), 4)
    check_watch(Watching("w", 3, JOURNAL[2:]), 4)
    check_watch(Watching("w", 5, []), 4)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (JOURNAL[:1] + JOURNAL[2:], "without 2"),
        ([*JOURNAL, JOURNAL[-1]], "again"),
        ([JOURNAL[1], JOURNAL[0], *JOURNAL[2:]], "without 1"),
        (JOURNAL[:2], "nothing after revision 2, of 4"),
        ([*JOURNAL[:3], *JOURNAL[2:]], "again"),
    ],
)
def test_watch_that_did_not(events, words):
    with pytest.raises(Violation, match=words):
        check_watch(Watching("w", 1, events), 4)


def test_revisions_that_are_true():
    check_revisions(
        [
            op("set", "1", key="a", at=(0, 1), answer="ok", revision=1),
            op("cas", None, "x", key="b", at=(2, 3), answer=[True, "x"], revision=2),
            op("list", key="", at=(2, 4), answer={"a": "1"}, revision=1),
            op("list", key="b", at=(4, 5), answer={"b": "x"}, revision=2),
            op("set", "2", key="a", at=(5, 6), answer="ok", revision=4),
        ],
        JOURNAL,
    )


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([op("set", "z", key="a", at=(0, 1), answer="ok", revision=1)], "journal"),
        ([op("set", "1", key="a", at=(0, 1), answer="ok", revision=5)], "journal"),
        ([op("list", key="", at=(0, 1), answer={"a": "1"}, revision=2)], "not what the store was"),
        ([op("list", key="", at=(0, 1), answer={}, revision=9)], "never was"),
        ([op("set", "1", key="a", at=(0, 1), answer="ok", revision=1)] * 2, "one revision|back in time"),
        (
            [
                op("set", "2", key="a", at=(0, 1), answer="ok", revision=4),
                op("list", key="", at=(2, 3), answer={"a": "1"}, revision=1),
            ],
            "back in time",
        ),
    ],
)
def test_revisions_that_are_not(operations, words):
    operations = [replace(one) for one in operations]
    with pytest.raises(Violation, match=words):
        check_revisions(operations, JOURNAL)


def test_reads_what_a_killed_client_wrote_down(tmp_path):
    lines = [
        {"id": 1, "kind": "set", "key": "k", "arguments": ["a"], "at": 1.0},
        {"id": 1, "answer": "ok", "revision": 1, "at": 2.0},
        {"id": 2, "kind": "get", "key": "k", "arguments": [], "at": 3.0},
        {"id": 2, "unknown": "CoordinatorUnavailableError", "at": 9.0},
        {"watch": 0, "first": 1},
        {"event": [1, "k", "a"]},
        {"id": 3, "kind": "set", "key": "k", "arguments": ["b"], "at": 4.0},
    ]
    (tmp_path / "c0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": 3, "ans')
    operations, (watching,) = load([tmp_path / "c0.jsonl"])
    assert [one.known for one in operations] == [True, False, False]
    assert watching == Watching("c0/0", 1, [Event(1, "k", "a")])
