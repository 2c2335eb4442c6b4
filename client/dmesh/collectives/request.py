"""Validated, immutable description of one call: its wire descriptor, its reduction, and this rank's memory.

`validation` makes it in the caller's thread. Backends read it; none of them changes it.

The wire descriptor is everything that all ranks must agree on. As text it names the operation, its
arguments, dtype and shape: `all_reduce(sum, float32, shape (3, 4))`. The text is compared byte by byte and
shown to people as it is. Calls whose dtype and number of dimensions the native core knows have a descriptor
in numbers, too; native endpoints compare a hash of that, the same on all machines, or of the text. The
numbers are those of the native core's headers.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.schedules.blocks import Blocks
from dmesh.errors import CollectiveValueError

Array = NDArray[Any]

_BYTE = np.dtype(np.uint8)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Types of arguments that are the same call if they are equal, as 1, True and 1.0 are not.
_EXACT = frozenset((int, str, NoneType))
_MOST_KNOWN = 256
_UNKNOWN: tuple[None, None] = (None, None)

LABEL = " @ "
"""Separator between a descriptor's text and the position in the program, which may differ between ranks."""
MAX_LENGTH = 1000
"""Characters of the text. A longer one (a structured dtype can be) ends in a hash of the whole."""
TRANSFER = "transfer"
SYNCHRONOUS = ", synchronous"
"""Suffix of the tag in the descriptor of a synchronous send."""
"""Kind of a `send` and of its `recv`, which have one descriptor."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
"""Kinds that fold contributions."""
ROOTED = ("reduce", "broadcast", "gather", "scatter")
"""Kinds with a root."""
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    TRANSFER,
    "permute",
)
"""By number: the kinds that the native core knows."""
OPS = ("sum", "prod", "min", "max", "mean", "any", "all", "bitwise_and", "bitwise_or", "bitwise_xor")
"""By number."""
_CODES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", BFLOAT16, "f4", "f8", "c8", "c16")
DTYPES: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, _CODES))
"""By number."""
MOST_DIMENSIONS = 8
"""Largest number of dimensions of a descriptor in numbers."""

_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduction of one dtype: canonical name; dtypes that travel, are folded, and are returned."""

    op: str
    wire: np.dtype[Any]
    accumulator: np.dtype[Any]
    result: np.dtype[Any]
    _ufunc: np.ufunc = field(repr=False)

    @property
    def undivided(self) -> bool:
        """True if whole arrays must be folded, not one piece after the other."""
        return False

    @property
    def commutative(self) -> bool:
        """True if the order of contributions does not matter, except for rounding."""
        return self.op in OPS

    @property
    def identity(self) -> Any:
        """Value that changes nothing, as NumPy's; None if there is none."""
        return None if self.op == "mean" else self._ufunc.identity

    def of_shape(self, shape: tuple[int, ...]) -> Reduction:
        """Return the reduction of arrays of a shape."""
        del shape
        return self

    def contribution(self, array: Any, rank: int) -> Any:
        """Return a rank's array as it travels."""
        del rank
        if array.dtype == self.wire:
            return array
        with np.errstate(all="ignore"):  # what is no number on one rank is no error on that rank alone
            return array.astype(self.wire, order="C")

    def fold(self, contribution: NDArray[Any], accumulator: NDArray[Any], first: bool) -> None:
        """Fold the next rank's contribution into the accumulator, in place."""
        with np.errstate(all="ignore"):
            if first:
                np.copyto(accumulator, contribution, casting="unsafe")
                return
            if contribution.dtype != accumulator.dtype:
                contribution = contribution.astype(accumulator.dtype)
            if accumulator.size == 1:
                # In place, NumPy takes one element for a reduction and multiplies complex numbers in another
                # way, with other last bits than the same element has in a longer array.
                accumulator[...] = self._ufunc(accumulator, contribution)
            else:
                self._ufunc(accumulator, contribution, out=accumulator)

    def finish(self, accumulator: NDArray[Any], result: NDArray[Any], contributions: int) -> None:
        """Write the result of a fold; `result` may be the accumulator, which is overwritten in any case."""
        with np.errstate(all="ignore"):
            if self.op == "mean":
                np.true_divide(accumulator, contributions, out=accumulator)
            if result is not accumulator:
                np.copyto(result, accumulator, casting="unsafe")


class Pattern(NamedTuple):
    """Arrays that a receive takes, if it is not exactly the next one of its sender."""

    source: int | None
    """Position of the sender; None for any."""
    tag: int | None
    """Tag; None for any."""
    template: tuple[np.dtype[Any], tuple[int, ...]] | None = None
    """Dtype and shape that must come; None for any that `out`, if there is one, has room for."""
    probes: bool = False
    """True if the array is described, and not received."""


@dataclass(slots=True)
class Buffers:
    """Memory of one call: flat, contiguous arrays of the request's dtypes."""

    source: Array | None
    """This rank's contribution; None if it has none."""
    result: Array
    """Output; empty on a rank that gets no result."""
    in_place: bool
    """True if the output is the input's memory, or a part of it."""


@dataclass(frozen=True, eq=False)
class Request:
    """Validated call of one rank: what all ranks must agree on, and this rank's arrays."""

    kind: str
    text: str
    """Wire descriptor as text: everything that all ranks must agree on."""
    descriptor: Descriptor | None = None
    """Wire descriptor in numbers; None for dtypes and shapes that the native core does not know."""
    nbytes_per_rank: int = 0
    """Bytes that each contributing rank contributes."""
    count: int = 0
    """Elements of one rank's contribution to one other rank; 0 if nothing has to travel."""
    root: int = 0
    """Position of the root, or of the other rank of a transfer."""
    pairs: tuple[tuple[int, int], ...] = ()
    """(source, target) positions of a permutation."""
    reduction: Reduction | None = None
    """Reduction of the contributions; None if they are only moved."""
    contributes: bool = False
    dtype: np.dtype[Any] = _BYTE
    """Dtype of the output buffer."""
    source: Any = None
    """Input: contiguous, of native byte order, of the dtype that travels."""
    shape: tuple[int, ...] | None = None
    """Shape of the result; None if this rank gets none."""
    out: Any = None
    returns: Any = None
    """`out` as the caller passed it, if that is no NumPy array; None otherwise."""
    arrange: Callable[[Any], Any] | None = None
    """Makes the result of the flat output buffer, if that takes more than a reshape."""
    aliased: bool = False
    """True if `source` and `out` share memory."""
    needs_copy: bool = False
    """True if an aliased source must be copied first: data arrives over elements that are still needed."""
    fill: Any = None
    """Values of the output if nothing is sent to this rank: a number, or one for each element."""
    blocks: Blocks | None = None
    """Layout of the blocks, if their lengths differ."""
    exchange: Request | None = None
    """Call that tells the lengths of the blocks, if this rank does not know all of them."""
    resolve: Callable[[Array], Request] | None = None
    """Makes the request whose blocks are known of the result of `exchange`."""
    precedes: bool = False
    """True if this is another request's `exchange`: a second request of the same call follows."""
    messages_only: bool = False
    """True if only those ranks take part that have something to move, which are not known to all."""
    device: int | None = None
    """GPU of the arrays; None for NumPy's."""
    ready: Any = None
    """CUDA event after which the arrays may be used."""
    tag: int = 0
    """Tag of a send."""
    synchronous: bool = False
    """True for a transfer whose sender waits for the receiver, however small it is."""
    pattern: Pattern | None = None
    """For a receive without a matched message; its text is for display."""
    status: Any = None
    """An `envelope.Status`, to be filled by a receive."""
    prepared: Buffers | None = None
    """Memory, if it had to be allocated on the caller's CUDA stream."""

    @property
    def hash(self) -> int:
        """Descriptor as 64 bits, by which native endpoints compare calls."""
        if self.descriptor is not None and LABEL not in self.text:
            return hash_of(self.descriptor)
        digest = hashlib.blake2b(agreed(self.text).encode(), digest_size=8, person=b"dmesh call").digest()
        return int.from_bytes(digest, "big")

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of input and output."""
        source = 0 if self.source is None else int(self.source.nbytes)
        return max(source, 0 if self.shape is None else math.prod(self.shape) * self.dtype.itemsize)

    def labeled(self, operation: str, place: str) -> Request:
        """Return the same call, made by an operation, which must be the same on all ranks, at a place."""
        made = object.__new__(Request)
        text = _shortened(f"{operation}: {self.text}", MAX_LENGTH - 200) + f"{LABEL}{place[-150:]}"
        made.__dict__.update(self.__dict__, text=text)
        return made

    def of(self, source: Any) -> Request:
        """Return the same call of another array."""
        made = object.__new__(Request)
        made.__dict__.update(self.__dict__, source=source)  # much faster than `replace`
        return made

    def allocate(self, empty: Callable[..., Any] = np.empty) -> Buffers:
        """Return the memory that the call works on; the result is made of it by `finish`."""
        if self.prepared is not None:
            return self.prepared
        source = None if self.source is None or not self.contributes else self.source.reshape(-1)
        into_out = self._into_out()
        aliased = self.aliased and into_out
        if aliased and self.needs_copy and source is not None:
            source, aliased = source.copy(), False
        if into_out:
            result = self.out.reshape(-1)
        else:
            result = empty(0 if self.shape is None else math.prod(self.shape), self.dtype)
        if self.fill is not None:
            result[...] = self.fill
        return Buffers(source, result, aliased)

    def finish(self, buffers: Buffers) -> Any:
        """Return the caller's result, after the output buffer is complete."""
        if self.shape is None:
            return None
        if self._into_out():
            return self.out if self.returns is None else self.returns
        flat = buffers.result
        shaped = flat.reshape(self.shape) if self.arrange is None else self.arrange(flat)
        if self.out is None:
            return shaped
        self.out[...] = shaped
        return self.out if self.returns is None else self.returns

    def _into_out(self) -> bool:
        """Return whether the output buffer is `out` itself."""
        out = self.out
        if out is None or self.arrange is not None or self.shape is None:
            return False
        return bool(out.flags.c_contiguous and (self.device is not None or out.flags.aligned))


class Requests:
    """Requests of the calls of one rank of a group.

    A repeated call of a plain NumPy array without `out` is not validated again. Its request is that of the
    first such call, with another array: all that validation depends on is in the key, but for the array's
    flags, which are looked at each time.

    Args:
        size: Number of ranks in the group.
        rank: This rank's position.
    """

    validate: Callable[..., Request]
    """Makes a request of the same arguments as `make`, after checking all of them."""
    convert: Callable[..., Request]
    """The same of arrays of any library."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self._known: dict[tuple[object, ...], tuple[np.dtype[Any], Request]] = {}

    def make(self, kind: str, x: Any = None, out: Any = None, **arguments: Any) -> Request:
        """Return the request of a call of a function, or refuse it; `root` is a transfer's peer, too."""
        is_plain = type(x) is np.ndarray and out is None and x.flags.c_contiguous and x.flags.aligned
        if not is_plain or not _EXACT.issuperset(map(type, arguments.values())):
            return self.convert(kind, x, out, **arguments)
        key = (kind, x.dtype, x.shape, *arguments.items())
        dtype, known = self._known.get(key, _UNKNOWN)
        if known is not None and dtype is x.dtype:
            return known.of(x if known.contributes else None)
        request = self.validate(kind, x, out, **arguments)
        is_known = request.source is x or not request.contributes
        if is_known and request.descriptor is not None and request.arrange is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = x.dtype, request.of(None)
        return request


class Descriptor(NamedTuple):
    """Wire descriptor of a call in numbers."""

    kind: int
    """Index into `KINDS`."""
    op: int
    """Index into `OPS`; 0 where nothing is folded."""
    argument: int
    """The root; of a reduce-scatter the axis + 1, or 0 without one."""
    dtype: int
    """Index into `DTYPES`; 0 for a barrier."""
    shape: tuple[int, ...]
    """Of the array that is passed (a scatter's: of a row)."""


@lru_cache(maxsize=512)
def describe(
    kind: str,
    dtype: np.dtype[Any] | None = None,
    shape: tuple[int, ...] = (),
    op: str = "",
    root: int = 0,
    axis: int | None = None,
    pairs: tuple[tuple[int, int], ...] = (),
    where: str = "",
) -> tuple[str, Descriptor | None]:
    """Return the descriptor of a call as text and numbers; None for calls that the native core lacks.

    Arguments that calls of the kind do not have are ignored.
    """
    arguments, number = [], 0
    if kind in REDUCING:
        arguments.append(op)
    if kind in ROOTED:
        arguments.append(f"root={root}")
        number = root
    elif kind == "reduce_scatter" and axis is not None:
        arguments.append(f"axis={axis}")
        number = axis + 1
    elif kind == "permute":
        arguments.append("[" + ", ".join(f"{source}->{target}" for source, target in pairs) + "]")
    text = text_from(kind, arguments, dtype, shape, where)
    if dtype is None:
        return text, Descriptor(KINDS.index(kind), 0, 0, 0, ())
    # By value: NumPy has two types of 8 bytes on many systems, and compares them as equal.
    is_native = kind in KINDS and kind != "permute" and (kind not in REDUCING or op in OPS)
    if where or not is_native or dtype not in DTYPES or len(shape) > MOST_DIMENSIONS:
        return text, None
    code = OPS.index(op) if kind in REDUCING else 0
    return text, Descriptor(KINDS.index(kind), code, number, DTYPES.index(dtype), shape)


def text_from(
    kind: str, arguments: Sequence[str], dtype: np.dtype[Any] | None, shape: tuple[int, ...], where: str = ""
) -> str:
    """Return the text of a call; see `describe`."""
    parts = list(arguments)
    if dtype is not None:
        parts += [describe_dtype(dtype), f"shape {shape}"]
    if where:
        parts.append(where)
    # A structured dtype's field may be called anything.
    return _shortened(f"{kind}({', '.join(parts)})".replace(LABEL, " \\x40 "), MAX_LENGTH)


def _shortened(text: str, length: int) -> str:
    """Return a text, or if it is longer than that its beginning and a hash of the whole."""
    if len(text) <= length:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return f"{text[: length - 30]}... #{digest}"


@lru_cache(maxsize=512)
def describe_dtype(dtype: np.dtype[np.generic]) -> str:
    """Return a dtype as text; equal texts mean equal memory."""
    if dtype.kind in "SUV" and dtype.type.__module__ == "numpy":
        return str(dtype)  # the name of a structured dtype says nothing of its fields
    swapped = sys.byteorder == "big" and dtype.itemsize > 1
    return f"{dtype.name} (big-endian)" if swapped else dtype.name


@lru_cache(maxsize=512)
def text_of(descriptor: Descriptor) -> str:
    """Return the text of a call of a descriptor in numbers; the same as that of `describe`."""
    kind, op, number, dtype, shape = descriptor
    if KINDS[kind] == "barrier":
        return describe("barrier")[0]
    return describe(KINDS[kind], DTYPES[dtype], shape, OPS[op], number, number - 1 if number else None)[0]


def hash_of(descriptor: Descriptor) -> int:
    """Return the 64 bits that members compare; the same as `dmesh_descriptor_hash` in `collective.h`."""
    number = 0x9E3779B97F4A7C15
    for word in (
        descriptor.kind | descriptor.op << 32,
        descriptor.argument | descriptor.dtype << 32,
        len(descriptor.shape),
        *descriptor.shape,
    ):
        number = ((number ^ word) * 0xBF58476D1CE4E5B9) & _WORD
        number ^= number >> 29
    return number


def agreed(text: str) -> str:
    """Return the part of a call's text that is the same on all ranks: not its place in the program."""
    return text.partition(LABEL)[0]


def as_called(text: str, is_sender: bool | None) -> str:
    """Return a call's text as its caller wrote it: a transfer is a `send` or a `recv`."""
    if is_sender is None or not text.startswith(TRANSFER + "("):
        return text
    return ("send" if is_sender else "recv") + text[len(TRANSFER) :]


def describe_type(x: object) -> str:
    """Return the type of something as its user knows it: `list`, `cupy.ndarray`."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_timeout(timeout: Any, default: float) -> float:
    """Return how many seconds a collective may take."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise CollectiveValueError(f"timeout must be a number of seconds, got {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds) or seconds <= 0:
        raise CollectiveValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
    return seconds
