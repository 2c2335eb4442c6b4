"""Hierarchical backend: large all-reduces of groups with several members on each of several hosts.

The ranks of a host reduce their arrays in shared memory, and each of them gets a block of the result. The
ranks with the same place on their hosts reduce these blocks over dedicated connections. Then the ranks of
each host gather the blocks in shared memory. So a block crosses the network once for each host, not once for
each rank.

Elements are folded host by host: all ranks have the same bits, in every run, but not always those of a fold
in the order of ranks. Partial results of bfloat16, folded in 32 bits, are rounded twice; sums, products and
means of float16, whose range is small, do not go this way.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
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
from dmesh.collectives.backends.endpoints import EndpointBackend, EndpointOperation
from dmesh.collectives.backends.shm.setup import share_memory
from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.collectives.backends.tcp.dedicated import TcpEndpoints, open_connections
from dmesh.collectives.request import DTYPES, KINDS, OPS, Buffers, Descriptor, Request, hash_of
from dmesh.collectives.services import Members
from dmesh.collectives.tuning import Tuning
from dmesh.native import Endpoint

_REDUCE_SCATTER, _ALL_REDUCE, _ALL_GATHER = map(KINDS.index, ("reduce_scatter", "all_reduce", "all_gather"))

_Part = tuple[tuple[int, ...], Endpoint]
"""Ranks that reduce together, and this rank's endpoint among them."""


class HierarchicalBackend(EndpointBackend):
    """Intra-host reduction in shared memory, inter-host reduction over connections.

    `minimum`: bytes of the arrays from which on this is faster than one flat all-reduce.
    """

    name = "hierarchical"
    capabilities = Capabilities(
        media="shared memory on each host, dedicated TCP connections between hosts",
        arrays="NumPy",
        operations="all_reduce of large arrays",
        dtypes="native dtypes; float16 not for sum, prod, mean",
        condition="equally many members, at least two, on each of at least two hosts",
    )

    def __init__(self, intra: _Part, inter: _Part, members: Members, minimum: int) -> None:
        super().__init__(members.ranks, members.rank)
        self.minimum = minimum
        self.intra_ranks = intra[0]
        self.endpoints = intra[1], inter[1]
        self._intra = intra
        self._inter = inter

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether it is a large all-reduce of a suitable dtype; see `Backend.supports`."""
        if request.kind != "all_reduce" or request.nbytes_per_rank < self.minimum:
            return False
        descriptor = request.descriptor
        if descriptor is None or not super().supports(request, stream, sequence):
            return False
        # Partial results must fit into the dtype, and float16 ends at 65504: others go on folding in 32 bits.
        narrow = DTYPES[descriptor.dtype] == np.float16
        return not (narrow and OPS[descriptor.op] in ("sum", "prod", "mean"))

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin with the reduction on this host; see `Backend.start`."""
        return Sequence(self._steps(request, buffers, call))

    def _steps(self, request: Request, buffers: Buffers, call: Call) -> Steps:
        descriptor, flat = request.descriptor, call.stream.endpoint
        assert descriptor is not None
        assert flat is not None
        assert buffers.source is not None
        dtype, op = descriptor.dtype, OPS[descriptor.op]
        mine, total = buffers.source, buffers.result
        places, members = len(self.intra_ranks), len(self._ranks)
        count = mine.size // places
        whole = count * places
        folds = OPS.index("sum") if op == "mean" else descriptor.op
        part = np.empty(count, mine.dtype)

        def step(at: _Part, inner: Descriptor, source: NDArray[Any], target: NDArray[Any]) -> Operation:
            ranks, endpoint = at
            operation = EndpointOperation(endpoint, ranks, call.ask_everybody)
            nbytes = int(source.nbytes)
            block = nbytes // len(ranks) if inner.kind == _REDUCE_SCATTER else nbytes
            # All members must agree on the whole call, too.
            agreed = hash_of(inner) ^ request.hash
            data = source.view(np.uint8), target.view(np.uint8)
            endpoint.start(inner.kind, inner.op, inner.dtype, 0, agreed, nbytes, block, *data)
            return operation

        scattered = Descriptor(_REDUCE_SCATTER, folds, 0, dtype, (places, count))
        yield step(self._intra, scattered, mine[:whole], part)
        yield step(self._inter, Descriptor(_ALL_REDUCE, folds, 0, dtype, (count,)), part, part)
        if op == "mean":
            with np.errstate(all="ignore"):  # what overflows on one rank is no error on that rank alone
                np.divide(part, np.array(members, mine.dtype), out=part)
        yield step(self._intra, Descriptor(_ALL_GATHER, 0, 0, dtype, (count,)), part, total[:whole])
        if whole < mine.size:  # the last elements, too few for the ranks of a host
            last = Descriptor(_ALL_REDUCE, descriptor.op, 0, dtype, (mine.size - whole,))
            yield step((self._ranks, flat), last, mine[whole:], total[whole:])


def find_hierarchy(
    exchange: Exchange, members: Members, places: Items[list[int]], tuning: Tuning
) -> Waits[HierarchicalBackend | str]:
    """Return the backend of a group with dedicated connections, or why it has none. All members call this.

    `places` has the positions of each host's members, equally many.
    """
    services, ranks, position = members.services, members.ranks, members.rank
    shared_memory = services.shared_memory
    assert shared_memory is not None
    host = next(place for place in places if position in place)
    column = [other[host.index(position)] for other in places]
    oversubscribed = services.neighbours > shared_memory.cores
    memory = yield from share_memory(exchange.among(host), shared_memory, oversubscribed)
    found = yield from open_connections(
        exchange.among(column), services.transport.connector, tuning, transfers=False
    )
    able = not isinstance(memory, str) and not isinstance(found, str)
    verdict = yield from exchange.among(range(len(ranks))).agree(able)
    if isinstance(memory, str):
        if not isinstance(found, str):
            found.close()
        return memory
    if isinstance(found, str):
        return found
    if not verdict.level:
        found.close()
        return f"rank {verdict.against} shares no memory on its host, or has no connections between hosts"
    assert shared_memory.core is not None
    between = TcpEndpoints(shared_memory.core, column.index(position), found)
    intra, inter = (tuple(ranks[member] for member in part) for part in (host, column))
    within = memory.open_collectives()
    minimum = tuning.rows * len(intra)
    return HierarchicalBackend((intra, within), (inter, between.collectives), members, minimum)
