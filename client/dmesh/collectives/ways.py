"""The ways in which a call reaches the other members: messages, an arena, wires, a pipe. All take the same.

Arrays on GPUs have their own, which begins with one of these.

A group's first call goes by messages, and finds out whether there is an arena, or wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh._log import logger
from dmesh.collectives.arena.introduction import FIRST_STEP, Introduction, introduce
from dmesh.collectives.arena.introduction import STEPS as STEPS_TO_MEET
from dmesh.collectives.arena.meeting import Meeting
from dmesh.collectives.arena.neighbourhood import MOST_MEMBERS, Neighbourhood
from dmesh.collectives.arena.port import Port, open_pipe, open_port
from dmesh.collectives.arena.taking import Read
from dmesh.collectives.arena.titles import KINDS, Title
from dmesh.collectives.call import Call
from dmesh.collectives.gpu import passage
from dmesh.collectives.gpu.planner import GpuPlan
from dmesh.collectives.hierarchy import Hierarchy, find_hierarchy
from dmesh.collectives.medium import Medium
from dmesh.collectives.plan import Array, Plan
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.collectives.wiring import STEPS as STEPS_TO_CONNECT
from dmesh.collectives.wiring import connect, open_wires


def carry_out(call: Call, plan: Plan | GpuPlan) -> Any:
    """Carries out a call that Python has planned; returns its result."""
    if isinstance(plan, GpuPlan):
        return passage.carry_out(call, plan, _agree)
    return _take_best(call, plan)


def _agree(call: Call, plan: Plan) -> Array | None:
    """Carries out the small call that comes before one of GPU arrays."""
    if call.lane.pair is None:
        result: Array | None = _take_best(call, plan)
        return result
    # By messages, which go in both directions: neither may begin before the other has come.
    members = tuple(call.group.ranks[position] for position in call.lane.pair)
    # One may have heard of the group's tuning, in its first call, and the other not yet.
    return plan.by_messages(members, lambda: _open(call), SHIPPED)


def _take_best(call: Call, plan: Plan) -> Any:
    """Carries out a call of NumPy arrays."""
    if call.group.size > 1:
        group = call.group
        group.worker.catch_up(lambda: call.lane.ready(call.sequence))
        call.await_turn()
        port = call.lane.port
        if port is not None and call.lane.by_port(call.sequence):
            if call.lane.pair is not None:
                return _transfer(call, port, plan)
            if not port.wired:
                return _meet(call, port, plan)
            title = plan.subject.title
            if title is not None and port.performs(title):
                hierarchy = call.term.hierarchy
                if hierarchy is not None and hierarchy.suits(plan.subject):
                    return _climb(call, port, plan, title, hierarchy)
                return _exchange(call, port, plan)
    return plan.by_messages(call.group.ranks, lambda: _open(call), call.term.tuning)


def _open(call: Call) -> Call:
    """Opens the channel of a call that goes by messages."""
    group = call.group
    if group.size == 1:
        return call
    transport = group.communicator.transport
    signature = call.signature.encode()
    call.begin(transport.open(call.lane.number, call.sequence, signature, call.term.generation))
    if call.sequence == 1 and call.lane.pair is None:
        _find_arena(call)
    return call


def _find_arena(call: Call) -> None:
    group = call.group
    communicator = group.communicator
    neighbourhood = communicator.neighbourhood
    if neighbourhood is None:
        call.term.settle(None, communicator.tuning)
        return
    if group.size > MOST_MEMBERS:  # its members do not hear of each other's tuning
        call.term.settle(None)
        return
    met = introduce(call, group.ranks, group.rank, neighbourhood, call.term.freeze)
    tuning = SHIPPED
    if met.arena is None:
        medium, tuning = _find_wires(call, met, neighbourhood)
        if medium is None:
            call.term.settle(None, tuning)
            return
    else:
        crowded = communicator.neighbours > neighbourhood.cores
        me = group.rank
        medium = Medium(
            met.sends_from,
            met.receives_from,
            partial(open_port, met.arena, me, crowded, neighbourhood),
            partial(open_pipe, met.arena, position=me, crowded=crowded, neighbourhood=neighbourhood),
        )
    call.term.settle(medium, tuning)
    communicator.flight.watch(group)
    for listener in communicator.flight.listeners:
        listener.watch(group)
    communicator.observer.watch(group)


def _find_wires(call: Call, met: Introduction, neighbourhood: Neighbourhood) -> tuple[Medium | None, Tuning]:
    """Returns the wires of a group, if it has some, and by which tuning its members go in any case."""
    group = call.group
    communicator, core = group.communicator, neighbourhood.core
    wires = communicator.transport.wires
    step = FIRST_STEP + STEPS_TO_MEET
    found = connect(call, group.ranks, group.rank, wires, core, step, communicator.tuning)
    tuning = found.tuning
    tuned = "" if tuning == SHIPPED else f" with the tuning of rank {group.ranks[0]} ({tuning})"
    if found.refusal:
        reason = f"It shares no memory: {met.refusal}. It has no wires: {found.refusal}"
        logger.info("%s exchanges messages%s. %s", group.label, tuned, reason)
        return None, tuning
    assert core is not None
    port, open_pipe = open_wires(core, group.rank, found)
    crowded = communicator.neighbours > neighbourhood.cores
    step += STEPS_TO_CONNECT
    hierarchy = find_hierarchy(call, group.ranks, group.rank, neighbourhood, wires, crowded, step, tuning)
    medium = partial(Medium, met.sends_from, met.receives_from, lambda: port, open_pipe)
    if isinstance(hierarchy, str):
        reason = f"It shares no memory: {met.refusal}. It has no rows: {hierarchy}"
        logger.info("%s is wired%s. %s", group.label, tuned, reason)
        return medium(), tuning
    port.left_from = hierarchy.large
    logger.info("%s is wired%s, in rows of %d that share memory", group.label, tuned, len(hierarchy.row))
    return medium(hierarchy), tuning


def _meet(call: Call, port: Port, plan: Plan) -> Any:
    """Carries out a collective in an arena, in one beat or piece by piece."""
    group = call.group
    meeting = Meeting(port, group.ranks, call.ask)
    number, nbytes = plan.subject.number, plan.subject.contribution

    def beat(step: int, mine: memoryview | None = None) -> None:
        if step == 0:
            call.begin(meeting)
        port.contribute((number + step) & (2**64 - 1), mine)
        call.meet(meeting)

    def meet(mine: memoryview | None) -> Read:
        beat(0, mine)
        return lambda member: np.frombuffer(port.contribution(member, nbytes), np.uint8)

    if nbytes <= port.room:
        return plan.by_meeting(group.rank, group.size, meet)

    def stages(source: NDArray[np.uint8] | None, result: NDArray[np.uint8] | None) -> bool:
        subject = plan.subject
        if subject.title is None:
            return False
        call.begin(meeting)
        block = nbytes if subject.kind in ("all_gather", "gather") else nbytes // group.size
        if port.perform(subject.title, 0, nbytes, block, source, result) is NotImplemented:
            return False
        call.meet(meeting)
        return True

    return plan.by_stages(group.rank, group.size, port, stages, beat)


def _exchange(call: Call, port: Port, plan: Plan) -> Any:
    """Carries out a collective on wires."""
    group = call.group
    meeting = Meeting(port, group.ranks, call.ask)

    def perform(source: NDArray[np.uint8] | None, result: NDArray[np.uint8] | None) -> None:
        subject = plan.subject
        nbytes = subject.contribution
        call.begin(meeting)
        block = nbytes if subject.kind in ("all_gather", "gather") else nbytes // group.size
        port.perform(subject.title, 0, nbytes, block, source, result)
        call.meet(meeting)

    return plan.by_wires(group.rank, perform)


def _climb(call: Call, port: Port, plan: Plan, title: Title, hierarchy: Hierarchy) -> Any:
    """Carries out a large all-reduce up and down a hierarchy."""
    number = plan.subject.number

    def through(
        at: Port, ranks: Sequence[int], step: Title, source: NDArray[Any], target: NDArray[Any]
    ) -> None:
        meeting = Meeting(at, ranks, call.ask)
        call.begin(meeting)
        nbytes = int(source.nbytes)
        block = nbytes // len(ranks) if KINDS[step.kind] == "reduce_scatter" else nbytes
        at.perform(step, number, nbytes, block, source.view(np.uint8), target.view(np.uint8))
        call.meet(meeting)

    def flat(step: Title, source: NDArray[Any], target: NDArray[Any]) -> None:
        through(port, call.group.ranks, step, source, target)

    def perform(source: NDArray[np.uint8] | None, result: NDArray[np.uint8] | None) -> None:
        assert source is not None
        assert result is not None
        hierarchy.all_reduce(title, source, result, through, flat)

    return plan.by_wires(call.group.rank, perform)


def _transfer(call: Call, port: Port, plan: Plan) -> Any:
    """Carries out this rank's half of a transfer through a pipe."""
    group = call.group
    assert call.lane.pair is not None
    meeting = Meeting(port, [group.ranks[position] for position in call.lane.pair], call.ask)
    sends = call.lane.pair[0] == group.rank

    def carry(data: memoryview) -> None:
        call.begin(meeting)
        (port.push if sends else port.pull)(plan.subject.number, data)
        call.meet(meeting)

    return plan.by_pipe(carry, sends=sends)
