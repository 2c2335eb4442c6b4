"""Cost model of the schedules: what each costs its busiest rank, and so how long it takes.

A message takes a latency on its way, and time of its sender and its receiver; each byte takes time on a
rank's connections, one after the other, and each byte that is folded or copied takes time on a processor
(LogGP). A pair of ranks that exchanges nothing else needs a connection for it. All is counted in whole
numbers, so that all ranks come to the same choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dmesh.collectives.schedules import bruck, chain, direct, doubling, ring, trees


class Model(NamedTuple):
    """Time that the parts of a schedule take; `tuning.Tuning` has the fields, measured by `dmesh tune`."""

    latency: int
    """Nanoseconds from the begin of a send until the receiver goes on, for no bytes."""
    message: int
    """Nanoseconds of processor time for each message."""
    byte: int
    """Picoseconds for each byte that is sent."""
    local: int
    """Picoseconds for each byte that is folded or copied."""
    connection: int
    """Nanoseconds for each peer: a part of what opening the connection took."""


class Cost(NamedTuple):
    """Cost of a schedule along its critical path."""

    hops: int
    """Messages of which each cannot begin before the one before it has arrived."""
    messages: int
    """Messages that the busiest rank sends, or those on the longest way if they are more."""
    elements: int
    """Elements in these messages."""
    local: int
    """Elements that are folded or copied on that way."""
    peers: int
    """Largest number of peers that a rank has."""

    def picoseconds(self, model: Model, width: int) -> int:
        """Return the time for elements of `width` bytes."""
        overheads = self.hops * model.latency + self.messages * model.message + self.peers * model.connection
        return 1000 * overheads + width * (self.elements * model.byte + self.local * model.local)


def cost(schedule: Callable[..., None], size: int, count: int, pieces: int = 1) -> Cost:
    """Return the cost of a schedule in a group of at least two ranks.

    `count` has the meaning that it has for the schedule; `pieces` is the number of those in which a pipelined
    one cuts the array, or each block.
    """
    return COSTS[schedule](size, count, min(pieces, count))


def _rounds(size: int) -> int:
    """Return the number of rounds of a dissemination: the logarithm, rounded up."""
    return (size - 1).bit_length()


def _forwarded(size: int) -> int:
    """Return the number of blocks that a rank sends in the rounds of Bruck's all-to-all."""
    total, distance = 0, 1
    while distance < size:
        cycles, rest = divmod(size, 2 * distance)
        total += cycles * distance + max(0, rest - distance)
        distance *= 2
    return total


def _rooted(of: Cost, size: int) -> Cost:
    """Add the barrier that ends the calls with a root."""
    rounds = _rounds(size)
    return of._replace(
        hops=of.hops + rounds, messages=of.messages + rounds, peers=min(size - 1, of.peers + 2 * rounds)
    )


def _exchange(p: int, n: int, _: int) -> Cost:
    return Cost(1, p - 1, (p - 1) * n, n, p - 1)


def _all_reduce_flat(p: int, n: int, _: int) -> Cost:
    return Cost(1, p - 1, (p - 1) * n, p * n, p - 1)


def _all_reduce_scattered(p: int, n: int, _: int) -> Cost:
    part = -(-n // p)
    return Cost(2, 2 * (p - 1), 2 * (p - 1) * part, p * part, p - 1)


def _chain(steps: int, units: int, piece: int, both: int, peers: int) -> Cost:
    """Return the cost of a pipeline of `steps`; each rank sends `both` messages for each unit."""
    messages = steps + both * (units - 1)
    return Cost(steps, messages, messages * piece, (steps // both + units) * piece, peers)


def _all_reduce_chain(p: int, n: int, k: int) -> Cost:
    return _chain(2 * (p - 1), k, -(-n // k), 2, min(2, p - 1))


def _reduce_scatter_chain(p: int, n: int, k: int) -> Cost:
    return _chain(2 * (p - 1), p * k, -(-n // k), 2, min(2, p - 1))


def _reduce_chain(p: int, n: int, k: int) -> Cost:
    return _rooted(_chain(p, k, -(-n // k), 1, 1), p)


def _broadcast_chain(p: int, n: int, k: int) -> Cost:
    return _rooted(_chain(p - 1, k, -(-n // k), 1, 0), p)


def _broadcast_binary(p: int, n: int, k: int) -> Cost:
    levels = p.bit_length() - 1
    made = _chain(2 * levels, k, -(-n // k), 2, 3)
    return _rooted(made._replace(hops=levels), p)


def _broadcast_tree(p: int, n: int, _: int) -> Cost:
    rounds = _rounds(p)
    return _rooted(Cost(rounds, rounds, rounds * n, n, 0), p)


def _broadcast_scattered(p: int, n: int, _: int) -> Cost:
    part = -(-n // (p - 1))
    return _rooted(Cost(2, 2 * p - 3, (2 * p - 3) * part, n, p - 1), p)


def _rooted_flat(p: int, n: int, k: int) -> Cost:
    return _rooted(_all_reduce_flat(p, n, k), p)


def _rooted_exchange(p: int, n: int, k: int) -> Cost:
    return _rooted(_exchange(p, n, k), p)


def _rooted_scattered(p: int, n: int, k: int) -> Cost:
    return _rooted(_all_reduce_scattered(p, n, k), p)


def _rooted_tree(p: int, n: int, _: int) -> Cost:
    rounds = _rounds(p)
    return _rooted(Cost(rounds, rounds, (p - 1) * n, 2 * p * n, 0), p)


def _gather_bruck(p: int, n: int, _: int) -> Cost:
    rounds = _rounds(p)
    return Cost(rounds, rounds, (p - 1) * n, (p + 1) * n, min(p - 1, 2 * rounds))


def _spread_bruck(p: int, n: int, _: int) -> Cost:
    rounds, blocks = _rounds(p), _forwarded(p)
    return Cost(rounds, rounds, blocks * n, (2 * blocks + 2 * p) * n, min(p - 1, 2 * rounds))


def _all_reduce_bruck(p: int, n: int, k: int) -> Cost:
    part = -(-n // p)
    pairs = zip(_spread_bruck(p, part, k), _gather_bruck(p, part, k), strict=True)
    return Cost(*map(sum, pairs))._replace(peers=min(p - 1, 2 * _rounds(p)))


def _doubling(p: int, n: int, halves: bool) -> Cost:
    rounds = p.bit_length() - 1
    nodes = 1 << rounds
    pairs = int(p > nodes)
    steps = (2 if halves else 1) * rounds + 2 * pairs
    sent = 2 * (n - n // nodes) if halves else rounds * n
    folded = n - n // nodes if halves else rounds * n
    return Cost(steps, steps, sent + 2 * pairs * n, folded + (1 + pairs) * n, rounds + pairs)


def _all_reduce_doubling(p: int, n: int, _: int) -> Cost:
    return _doubling(p, n, halves=False)


def _all_reduce_halving(p: int, n: int, _: int) -> Cost:
    return _doubling(p, n, halves=True)


def _reduce_scatter_halving(p: int, n: int, _: int) -> Cost:
    rounds = p.bit_length() - 1
    pairs = int(p > 1 << rounds)
    sent = (p - 1) * n + pairs * (p + 1) * n
    return Cost(rounds + 2 * pairs, rounds + 2 * pairs, sent, (2 + pairs) * p * n, rounds + pairs)


def _reduce_tree(p: int, n: int, _: int) -> Cost:
    rounds = p.bit_length() - 1
    steps = rounds + int(p > 1 << rounds)
    return _rooted(Cost(steps, steps, steps * n, (steps + 1) * n, steps), p)


def _all_gather_ring(p: int, n: int, _: int) -> Cost:
    return Cost(p - 1, p - 1, (p - 1) * n, n, min(2, p - 1))


def _reduce_scatter_ring(p: int, n: int, _: int) -> Cost:
    return Cost(p - 1, p - 1, (p - 1) * n, p * n, min(2, p - 1))


def _all_reduce_ring(p: int, n: int, _: int) -> Cost:
    part = -(-n // p)
    return Cost(2 * (p - 1), 2 * (p - 1), 2 * (p - 1) * part, p * part, min(2, p - 1))


COSTS: dict[Callable[..., None], Callable[[int, int, int], Cost]] = {
    direct.all_gather: _exchange,
    ring.all_gather_ring: _all_gather_ring,
    bruck.all_gather_bruck: _gather_bruck,
    direct.all_to_all: _exchange,
    bruck.all_to_all_bruck: _spread_bruck,
    direct.gather: _rooted_exchange,
    trees.gather_tree: _rooted_tree,
    direct.scatter: _rooted_exchange,
    trees.scatter_tree: _rooted_tree,
    trees.broadcast_tree: _broadcast_tree,
    trees.broadcast_scattered: _broadcast_scattered,
    trees.broadcast_binary: _broadcast_binary,
    chain.broadcast_chain: _broadcast_chain,
    direct.all_reduce_flat: _all_reduce_flat,
    direct.all_reduce_scattered: _all_reduce_scattered,
    chain.all_reduce_chain: _all_reduce_chain,
    bruck.all_reduce_gathered: _gather_bruck,
    bruck.all_reduce_bruck: _all_reduce_bruck,
    doubling.all_reduce_doubling: _all_reduce_doubling,
    doubling.all_reduce_halving: _all_reduce_halving,
    ring.all_reduce_ring: _all_reduce_ring,
    direct.reduce_scatter_equal: _all_reduce_flat,
    chain.reduce_scatter_chain: _reduce_scatter_chain,
    bruck.reduce_scatter_bruck: _spread_bruck,
    doubling.reduce_scatter_halving: _reduce_scatter_halving,
    ring.reduce_scatter_ring: _reduce_scatter_ring,
    direct.reduce_flat: _rooted_flat,
    direct.reduce_scattered: _rooted_scattered,
    chain.reduce_chain: _reduce_chain,
    trees.reduce_gathered: _rooted_tree,
    doubling.reduce_tree: _reduce_tree,
}
"""Functions of ranks, elements and pieces, by schedule."""
