"""Hierarchical backend: large arrays of groups with several members on at least one of several hosts.

A byte crosses the network once for each host that needs it, not once for each rank. A group that is too large
for connections of all pairs, and has no such hosts, is divided into *cells* instead, whose members have
connections with each other. What follows is true of cells, too, but for the shared memory.

An array is cut into as many blocks as the host with the fewest members has members. On each host, each of as
many *leaders* has one block. In an all-reduce the ranks of a host reduce their arrays in shared memory, to
the leaders; the leaders of one block reduce it over dedicated connections; then those of each host share
their blocks in shared memory. A reduce goes the same way up to the root's host, and a broadcast the same way
down from it. In a reduce-scatter and an all-gather, the rows of each host are cut into blocks in this way.
Gathers, scatters and all-to-alls are not hierarchical: each of their bytes crosses the network once at most
in any case.

Elements are folded host by host: all ranks have the same bits, in every run, but not always those of a fold
in the order of ranks. Partial results of bfloat16, folded in 32 bits, are rounded twice; sums, products and
means of float16, whose range is small, do not go this way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.base import (
    Call,
    Capabilities,
    Exchange,
    Operation,
    Sequence,
    Steps,
    Stream,
)
from dmesh.collectives.backends.endpoints import EndpointBackend, EndpointOperation, layout_bytes
from dmesh.collectives.backends.shm.setup import SharedMemoryGroup, share_memory
from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.collectives.backends.tcp.dedicated import Connections, TcpEndpoints, open_connections
from dmesh.collectives.request import DTYPES, KINDS, OPS, Buffers, Descriptor, Request, hash_of
from dmesh.collectives.schedules.blocks import Blocks, Span, exchange_of, join, lay_out, spans_of
from dmesh.collectives.schedules.program import bounds
from dmesh.collectives.services import Members
from dmesh.collectives.tuning import Tuning
from dmesh.native import Endpoint

_BARRIER, _ALL_REDUCE, _REDUCE, _REDUCE_SCATTER, _BROADCAST, _ALL_GATHER, _ALL_TO_ALL = map(
    KINDS.index,
    ("barrier", "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all"),
)
_KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")

_Part = tuple[tuple[int, ...], Endpoint]
"""Ranks that carry out a step together, and this rank's endpoint among them."""
_Step = Callable[..., Operation]
"""Begins a step: `HierarchicalBackend._step` for one call."""


class HierarchicalBackend(EndpointBackend):
    """Intra-host steps in shared memory, inter-host steps over connections.

    `hosts` has the positions of each host's members, `intra` this host's ranks, and `inter` the leaders with
    this rank's block, None if it is no leader. `minimum`: bytes of the arrays from which on this is faster
    than dedicated connections alone.
    """

    name = "hierarchical"
    capabilities = Capabilities(
        media="shared memory on each host, dedicated TCP connections between hosts; or these alone",
        arrays="NumPy",
        operations="all_reduce, reduce, broadcast, all_gather and reduce_scatter of large arrays",
        dtypes="native dtypes; float16 not for sum, prod, mean",
        condition="up to 256 members, two on one of 2 to 64 hosts, or more than 64",
    )

    def __init__(
        self, hosts: Items[list[int]], intra: _Part, inter: _Part | None, members: Members, minimum: int
    ) -> None:
        super().__init__(members.ranks, members.rank)
        self.minimum = minimum
        self.largest_host = max(map(len, hosts))
        """Number of members on the host that has the most."""
        self.endpoints = (intra[1],) if inter is None else (intra[1], inter[1])
        self._intra = intra
        self._inter = inter
        self._hosts = hosts
        self._blocks = min(map(len, hosts))
        self._host = next(at for at, host in enumerate(hosts) if members.rank in host)
        self._place = hosts[self._host].index(members.rank)
        positions = [position for host in hosts for position in host]
        self._order = None if positions == sorted(positions) else positions
        """Positions host by host, if that is not their order."""

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether it is a large array of a suitable dtype; see `Backend.supports`."""
        joins = request.kind == "all_gather"
        whole = request.nbytes_per_rank * (len(self._ranks) if joins else 1)
        if request.kind not in _KINDS or request.blocks is not None or whole < self.minimum:
            return False
        descriptor = request.descriptor
        if descriptor is None or request.device is not None or not stream.uses_endpoint(sequence):
            return False
        if request.reduction is not None and not self._intra[1].supports(descriptor):
            return False
        # Partial results must fit into the dtype, and float16 ends at 65504: others go on folding in 32 bits.
        narrow = request.reduction is not None and DTYPES[descriptor.dtype] == np.float16
        return not (narrow and OPS[descriptor.op] in ("sum", "prod", "mean"))

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin with the step on this host, or on the root's; see `Backend.start`."""
        return Sequence(self._steps(request, buffers, call))

    def _steps(self, request: Request, buffers: Buffers, call: Call) -> Steps:
        descriptor, flat = request.descriptor, call.stream.endpoint
        mine, total = buffers.source, buffers.result
        assert descriptor is not None
        step = partial(self._step, request, descriptor.dtype, total.itemsize, call)
        if request.kind == "broadcast":
            yield from self._broadcast(request.root, mine, total, step)
            return
        assert mine is not None
        if request.kind == "all_gather":
            yield from self._all_gather(mine, total, step)
            return
        is_mean = OPS[descriptor.op] == "mean"
        op = OPS.index("sum") if is_mean else descriptor.op
        divisor = len(self._ranks) if is_mean else 1
        if request.kind == "reduce_scatter":
            yield from self._reduce_scatter(mine, total, op, divisor, step)
        elif request.kind == "reduce":
            yield from self._reduce(mine, total, op, divisor, step, self._host_of(request.root))
            yield from self._meet(step)
        else:
            # With equally large hosts, all ranks take part in each step; the rest of the array is reduced
            # flat.
            count = mine.size // self._blocks * self._blocks
            even = self._blocks > 1 and len(set(map(len, self._hosts))) == 1
            if even and flat is not None and count < mine.size:
                yield from self._reduce_evenly(mine[:count], total[:count], op, divisor, step)
                all_clients = self._ranks, flat
                yield step(all_clients, _ALL_REDUCE, mine[count:], total[count:], descriptor.op)
            elif even and count == mine.size:
                yield from self._reduce_evenly(mine, total, op, divisor, step)
            else:
                yield from self._reduce(mine, total, op, divisor, step, None)

    def _step(
        self,
        request: Request,
        dtype: int,
        itemsize: int,
        call: Call,
        part: _Part,
        kind: int,
        source: NDArray[Any] | None,
        target: NDArray[Any] | None,
        op: int = 0,
        root: int = 0,
        number: int = 0,
        blocks: Blocks | None = None,
    ) -> Operation:
        """Begin a collective of some of the ranks; `number` tells it from others of the same call."""
        ranks, endpoint = part
        operation = EndpointOperation(endpoint, ranks, call.ask_everybody)
        given = source if source is not None else target
        nbytes = 0 if given is None else int(given.nbytes)
        block = nbytes // len(ranks) if kind == _REDUCE_SCATTER else nbytes
        # All members must agree on the whole call, too.
        agreed = hash_of(Descriptor(kind, op, number, dtype, (root,))) ^ request.hash
        layout = None
        if blocks is not None:
            nbytes, layout = blocks.total * itemsize, layout_bytes(blocks, itemsize)
        octets, into = (None if a is None or not a.size else a.view(np.uint8) for a in (source, target))
        endpoint.start(kind, op, dtype, root, agreed, nbytes, block, octets, into, layout)
        return operation

    def _reduce_evenly(
        self, mine: NDArray[Any], total: NDArray[Any], op: int, divisor: int, step: _Step
    ) -> Steps:
        part = np.empty(mine.size // self._blocks, mine.dtype)
        yield step(self._intra, _REDUCE_SCATTER, mine, part, op)
        assert self._inter is not None
        yield step(self._inter, _ALL_REDUCE, part, part, op)
        _divide(part, divisor)
        yield step(self._intra, _ALL_GATHER, part, total)

    def _reduce(
        self,
        mine: NDArray[Any],
        total: NDArray[Any],
        op: int,
        divisor: int,
        step: _Step,
        above: int | None,
    ) -> Steps:
        """Reduce to host `above`, or to all ranks if it is None."""
        gets_result = above in (None, self._host)
        part = np.empty_like(mine[self._cut(mine.size, self._place)])  # empty, if it is no leader
        for block in range(self._blocks):
            into = part if block == self._place else None
            yield step(self._intra, _REDUCE, mine[self._cut(mine.size, block)], into, op, block, block)
        if self._inter is not None:
            kind, root = (_ALL_REDUCE, 0) if above is None else (_REDUCE, above)
            yield step(self._inter, kind, part, part if gets_result else None, op, root)
            _divide(part, divisor)
        if gets_result:
            # The root's neighbors keep nothing of it.
            result = total if total.size else np.empty(mine.size, mine.dtype)
            for block in range(self._blocks):
                source = part if block == self._place else None
                into = result[self._cut(mine.size, block)]
                yield step(self._intra, _BROADCAST, source, into, 0, block, block)

    def _meet(self, step: _Step) -> Steps:
        """Return when all ranks have arrived: within each host, among the leaders, within each host again."""
        yield step(self._intra, _BARRIER, None, None)
        if self._inter is not None:
            yield step(self._inter, _BARRIER, None, None)
        yield step(self._intra, _BARRIER, None, None, number=1)

    def _broadcast(self, root: int, mine: NDArray[Any] | None, total: NDArray[Any], step: _Step) -> Steps:
        above = self._host_of(root)
        if above == self._host:
            yield step(self._intra, _BROADCAST, mine, total, 0, self._hosts[above].index(root))
        if self._inter is not None:
            own = total[self._cut(total.size, self._place)]
            yield step(self._inter, _BROADCAST, own if above == self._host else None, own, 0, above)
        if above != self._host:
            for block in range(self._blocks):
                part = total[self._cut(total.size, block)]
                source = part if block == self._place else None
                yield step(self._intra, _BROADCAST, source, part, 0, block, block)
        yield from self._meet(step)

    def _all_gather(self, mine: NDArray[Any], total: NDArray[Any], step: _Step) -> Steps:
        order, each, own = self._order, mine.size, self._host
        whole = total if order is None else np.empty_like(total)
        segments = self._segments(each)
        yield step(self._intra, _ALL_GATHER, mine, whole[slice(*segments[own])])
        if self._inter is not None:
            shares = [self._pieces(segment)[self._place] for segment in segments]
            blocks = join(tuple(shares), own)
            yield step(self._inter, _ALL_GATHER, whole[slice(*shares[own])], whole, blocks=blocks)
        for host, segment in enumerate(segments):
            if host != own:
                shares = self._pieces(segment)
                blocks = join(tuple(shares), self._place)
                source = whole[slice(*shares[self._place])]
                yield step(self._intra, _ALL_GATHER, source, whole, number=host, blocks=blocks)
        if order is not None:
            total.reshape(-1, each)[order] = whole.reshape(-1, each)

    def _reduce_scatter(
        self,
        mine: NDArray[Any],
        total: NDArray[Any],
        op: int,
        divisor: int,
        step: _Step,
    ) -> Steps:
        each, size, place = total.size, len(self._hosts[self._host]), self._place
        rows = mine if self._order is None else mine.reshape(-1, each)[self._order].reshape(-1)
        segments = self._segments(each)
        # The leaders of this host reduce one piece each of every host's rows.
        cuts = [self._pieces(segment) for segment in segments]
        lengths = tuple(cut[place][1] - cut[place][0] for cut in cuts)
        parts = np.empty(sum(lengths), mine.dtype)
        for host, (segment, cut, at) in enumerate(zip(segments, cuts, spans_of(lengths, 1), strict=True)):
            widths = tuple(stop - start for start, stop in cut)
            blocks = lay_out("reduce_scatter", size, place, 0, widths, 1, True)
            yield step(
                self._intra, _REDUCE_SCATTER, rows[slice(*segment)], parts[slice(*at)], op, 0, host, blocks
            )
        # Between hosts, each leader goes on with its piece of its own host's rows.
        begin = segments[self._host][0]
        own = tuple((start - begin, stop - begin) for start, stop in cuts[self._host])
        wanted = spans_of((each,) * size, 1)
        part = total if own == wanted else np.empty(lengths[self._host], mine.dtype)
        if self._inter is not None:
            blocks = lay_out("reduce_scatter", len(segments), self._host, 0, lengths, 1, True)
            yield step(self._inter, _REDUCE_SCATTER, parts, part, op, blocks=blocks)
            _divide(part, divisor)
        if part is not total:
            yield step(self._intra, _ALL_TO_ALL, part, total, blocks=exchange_of(own, wanted, place))

    def _segments(self, each: int) -> list[Span]:
        """Return the elements of each host's rows, which follow each other host by host."""
        return list(spans_of([len(host) for host in self._hosts], each))

    def _pieces(self, segment: Span) -> list[Span]:
        """Return the piece of a host's rows of each leader, and nothing for this host's other ranks."""
        begin, end = segment
        cut = [bounds(end - begin, self._blocks, block) for block in range(self._blocks)]
        nothing = [(end, end)] * (len(self._hosts[self._host]) - self._blocks)
        return [(begin + start, begin + stop) for start, stop in cut] + nothing

    def _host_of(self, position: int) -> int:
        return next(at for at, host in enumerate(self._hosts) if position in host)

    def _cut(self, count: int, block: int) -> slice:
        """Return the elements of a block."""
        return slice(*bounds(count, self._blocks, block))


def _divide(array: NDArray[Any], divisor: int) -> None:
    if divisor > 1:
        with np.errstate(all="ignore"):  # what overflows on one rank is no error on that rank alone
            np.divide(array, np.array(divisor, array.dtype), out=array)


def cells_of(places: Items[list[int]]) -> list[list[int]]:
    """Divide a group into about as many cells as a cell has members, equally large ones if possible.

    Members of one host are in neighboring cells. There are none in a group of less than 4 members.
    """
    positions = [position for place in places for position in place]
    side = math.isqrt(len(positions))
    if side < 2:
        return []
    count = next((n for n in range(side, side // 2, -1) if len(positions) % n == 0), side)
    return [positions[slice(*bounds(len(positions), count, cell))] for cell in range(count)]


def find_hierarchy(
    exchange: Exchange, members: Members, places: Items[list[int]], tuning: Tuning, *, shares: bool
) -> Waits[HierarchicalBackend | str]:
    """Return the backend, or why the group has none. All members call this.

    They can have dedicated connections; `places` has the positions of each host's members, which share memory
    (`shares`), or of each cell's.
    """
    services, ranks, position = members.services, members.ranks, members.rank
    shared_memory, connector = services.shared_memory, services.transport.connector
    assert shared_memory is not None
    assert shared_memory.core is not None
    place = next(place for place in places if position in place)
    block = place.index(position)
    leads = block < min(map(len, places))
    # A rank that is no leader takes as many rounds by itself.
    column = [other[block] for other in places] if leads else [position]
    # A failure's traceback would keep them open.
    with contextlib.ExitStack() as unused:
        memory: SharedMemoryGroup | Connections | str
        if shares:
            memory = yield from share_memory(exchange.among(place), shared_memory, services.neighbours)
        else:
            memory = yield from open_connections(exchange.among(place), connector, tuning, transfers=False)
            if not isinstance(memory, str):
                unused.callback(memory.close)
        found = yield from open_connections(exchange.among(column), connector, tuning, transfers=False)
        if not isinstance(found, str):
            unused.callback(found.close)
        able = not isinstance(memory, str) and not isinstance(found, str)
        verdict = yield from exchange.among(range(len(ranks))).agree(able)
        problem = next((each for each in (memory, found) if isinstance(each, str)), "")
        if problem or not verdict.level:
            return problem or f"rank {verdict.against} has no shared memory, or no connections, that it needs"
        assert not isinstance(found, str)
        assert not isinstance(memory, str)
        inter = None
        if leads:
            between = TcpEndpoints(shared_memory.core, column.index(position), found)
            inter = tuple(ranks[member] for member in column), between.collectives
        if isinstance(memory, Connections):
            within = TcpEndpoints(shared_memory.core, block, memory).collectives
        else:
            within = memory.open_collectives()
        unused.pop_all()
    minimum = tuning.rows * (max(map(len, places)) if shares else 1)
    return HierarchicalBackend(
        places, (tuple(ranks[member] for member in place), within), inter, members, minimum
    )
