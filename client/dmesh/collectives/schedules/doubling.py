"""Recursive doubling and halving: partners at distances 1, 2, 4, ... exchange; for reductions.

If the number of ranks is no power of two, pairs of neighbours among the first ranks count as one: (0, 1),
(2, 3), ..., as few as it takes, and the first of a pair works for both. What remains is a power of two of
*nodes*. All of these schedules fold in one order, a balanced binary tree over the nodes in their order:
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), where the first operand is that of the lower ranks. So all of them
have the same bits, for arrays of any length; but not those of a fold in the order of ranks.
"""

from __future__ import annotations

from dmesh.collectives.schedules.program import (
    ACCUMULATOR,
    INPUT,
    OUTPUT,
    TOKEN,
    Buffer,
    Builder,
    Finish,
    Flush,
    Fold,
    Slice,
    block,
    whole,
)

_OTHER = {ACCUMULATOR: Buffer.PARTIAL, Buffer.PARTIAL: ACCUMULATOR}


class _Nodes:
    """Nodes of a group, and the fold of one of them."""

    def __init__(self, builder: Builder, worker: int = 0) -> None:
        """Count the nodes. Of a pair with the rank `worker`, this rank works, else the first."""
        self.count = 1 << builder.size.bit_length() - 1
        self.pairs = builder.size - self.count
        self.node = self.node_of(builder.rank)
        self._builder = builder
        self._chosen = worker
        self.members = self.members_of(self.node)
        self.worker = self.worker_of(self.node)
        self.works = self.worker == builder.rank
        self.held = ACCUMULATOR
        """Buffer with this node's partial result."""

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def members_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        return (2 * node, 2 * node + 1) if node < self.pairs else (node + self.pairs,)

    def worker_of(self, node: int) -> int:
        """Return the rank that works for a node."""
        members = self.members_of(node)
        return self._chosen if self._chosen in members else members[0]

    def contribute(self, pieces: list[tuple[Slice, int]]) -> None:
        """Add the fold of slices of the members' inputs, each to some place in the accumulator."""
        builder = self._builder
        length = pieces[-1][0].stop
        other = next((member for member in self.members if member != self.worker), None)
        if not self.works:
            builder.send(self.worker, whole(INPUT, length))
            return
        if other is not None:
            builder.wait(builder.receive(other, whole(Buffer.STAGE, length)))
        for piece, start in pieces:
            into = Slice(ACCUMULATOR, start, start + len(piece))
            for member in self.members:
                source = piece if member == self.worker else Slice(Buffer.STAGE, piece.start, piece.stop)
                builder.add(Fold(source, into, first=member == self.members[0]))

    def combine(self, partner: int, start: int, stop: int) -> None:
        """Add the fold of a partner node's partial result, which is in the other buffer, and this node's."""
        mine, theirs = self.held, _OTHER[self.held]
        if partner < self.node:  # the lower ranks' result is the left operand, on all ranks alike
            mine, theirs = theirs, mine
        if stop > start:
            self._builder.add(Fold(Slice(theirs, start, stop), Slice(mine, start, stop)))
        self.held = mine

    def halve(self, cuts: list[int]) -> list[tuple[int, int, int]]:
        """Add exchanges of halves of the partial results, until each node has one part.

        `cuts` has the bounds of the parts. Returns (partner, begin, end of the part before) of each step.
        """
        builder = self._builder
        steps, first, last = [], 0, self.count
        while last - first > 1:
            partner = self.node ^ self.count // (last - first)
            middle = (first + last) // 2
            keeps_low = partner > self.node
            steps.append((partner, first, last))
            kept, given = (
                ((first, middle), (middle, last)) if keeps_low else ((middle, last), (first, middle))
            )
            start, stop = cuts[kept[0]], cuts[kept[1]]
            peer = self.worker_of(partner)
            received = builder.receive(peer, Slice(_OTHER[self.held], start, stop) or TOKEN)
            builder.send(peer, Slice(self.held, cuts[given[0]], cuts[given[1]]) or TOKEN)
            builder.wait(received)
            self.combine(partner, start, stop)
            first, last = kept
        return steps


def all_reduce_doubling(builder: Builder, count: int) -> None:
    """Build an all-reduce of short arrays: partners exchange whole partial results."""
    nodes = _Nodes(builder)
    nodes.contribute([(whole(INPUT, count), 0)])
    distance = 1
    while nodes.works and distance < nodes.count:
        partner = nodes.node ^ distance
        peer = nodes.worker_of(partner)
        received = builder.receive(peer, whole(_OTHER[nodes.held], count))
        builder.send(peer, whole(nodes.held, count))
        builder.wait(received)
        builder.add(Flush())
        nodes.combine(partner, 0, count)
        distance *= 2
    if nodes.works:
        builder.add(Finish(whole(nodes.held, count), whole(OUTPUT, count), builder.size))
    _hand_out(builder, nodes, count)


def all_reduce_halving(builder: Builder, count: int) -> None:
    """Build an all-reduce of long arrays (Rabenseifner): by halving, then by doubling."""
    nodes = _Nodes(builder)
    nodes.contribute([(whole(INPUT, count), 0)])
    if nodes.works:
        cuts = [index * count // nodes.count for index in range(nodes.count + 1)]
        steps = nodes.halve(cuts)
        start, stop = _own(nodes, cuts)
        if stop > start:
            builder.add(Finish(Slice(nodes.held, start, stop), Slice(OUTPUT, start, stop), builder.size))
        for partner, first, last in reversed(steps):
            low, high = cuts[first], cuts[last]
            rest = Slice(OUTPUT, stop, high) if partner > nodes.node else Slice(OUTPUT, low, start)
            peer = nodes.worker_of(partner)
            received = builder.receive(peer, rest or TOKEN)
            builder.send(peer, Slice(OUTPUT, start, stop) or TOKEN)
            builder.wait(received)
            start, stop = low, high
    _hand_out(builder, nodes, count)


def reduce_scatter_halving(builder: Builder, count: int) -> None:
    """Build a reduce-scatter by recursive halving.

    The blocks are laid out by the reversed bits of their nodes, so that a half of them is in one piece.
    """
    nodes = _Nodes(builder)
    order = sorted(range(nodes.count), key=lambda node: _reversed(node, nodes.count))
    cuts = [0]
    for node in order:
        cuts.append(cuts[-1] + count * len(nodes.members_of(node)))
    blocks = ((member, node) for node in range(nodes.count) for member in nodes.members_of(node))
    starts = {node: cuts[at] for at, node in enumerate(order)}
    nodes.contribute(
        [
            (block(INPUT, member, count), starts[node] + count * nodes.members_of(node).index(member))
            for member, node in blocks
        ]
    )
    if not nodes.works:
        builder.wait(builder.receive(nodes.worker, whole(OUTPUT, count)))
        return
    nodes.halve(cuts)
    for at, member in enumerate(nodes.members):
        start = starts[nodes.node] + at * count
        into = whole(OUTPUT if member == builder.rank else Buffer.RELAY, count)
        builder.add(Finish(Slice(nodes.held, start, start + count), into, builder.size))
        if member != builder.rank:
            builder.send(member, into)


def reduce_tree(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of short arrays through a binomial tree over the nodes."""
    nodes = _Nodes(builder, root)
    above = nodes.node_of(root)
    nodes.contribute([(whole(INPUT, count), 0)])
    distance = 1
    while nodes.works and distance < nodes.count:
        partner = nodes.node ^ distance
        peer = nodes.worker_of(partner)
        if (nodes.node ^ above) & distance:
            builder.send(peer, whole(nodes.held, count))
            break
        builder.wait(builder.receive(peer, whole(_OTHER[nodes.held], count)))
        nodes.combine(partner, 0, count)
        distance *= 2
    if builder.rank == root:
        builder.add(Finish(whole(nodes.held, count), whole(OUTPUT, count), builder.size))
    builder.barrier()


def _hand_out(builder: Builder, nodes: _Nodes, count: int) -> None:
    """Add the way of the result from a pair's worker to the other."""
    for member in nodes.members:
        if member != nodes.worker and nodes.works:
            builder.send(member, whole(OUTPUT, count))
    if not nodes.works:
        builder.wait(builder.receive(nodes.worker, whole(OUTPUT, count)))


def _own(nodes: _Nodes, cuts: list[int]) -> tuple[int, int]:
    """Return begin and end of the part that a node has after halving."""
    at = _reversed(nodes.node, nodes.count)
    return cuts[at], cuts[at + 1]


def _reversed(number: int, count: int) -> int:
    """Return a number below `count`, a power of two, with its bits reversed."""
    width = count.bit_length() - 1
    return int(f"{number:0{width}b}"[::-1], 2) if width else 0
