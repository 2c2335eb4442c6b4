"""The native core: the decision whether this process uses it, and the interfaces of its types.

The extension module `dmesh._native` is optional: it makes dmesh faster. Without it, ranks of one host
exchange messages over TCP instead of sharing memory. No other module imports `dmesh._native`, and
`import dmesh` does not load it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from dmesh.config.settings import read_native
from dmesh.errors import NativeCoreError
from dmesh.runtime.context import environment

if TYPE_CHECKING:
    from mmap import mmap

    from numpy.typing import NDArray


ABI = 13
"""`DMESH_NATIVE_ABI` of client/native/python/module.h: the module that this Python code was written for."""

_MODULE = "dmesh._native"


class BuildInfo(TypedDict):
    """Facts about the build of the native core."""

    compiler: str
    """Name and version of the compiler."""
    simd: str
    """The widest vector instructions that all of its code may use: `sse2`, `neon`, ..."""
    sanitizers: tuple[str, ...]
    """Sanitizers that it was built with: `address`, `undefined`, `thread`. Empty in ordinary builds."""


class RegisteredMemory(Protocol):
    """Registry of shared segments with arrays: this process's, and mapped ones of others."""

    def add(self, memory: mmap, nonce: bytes, descriptor: int, own: bool, /) -> None:
        """Register a segment. It stays mapped until it is dropped."""

    def drop(self, nonce: bytes, /) -> None:
        """Remove a segment; the oldest one, if it was mapped again in the meantime."""

    def contains(self, array: NDArray[Any], /) -> bool:
        """Return whether an array is in a segment of this process."""

    def can_read(self, process: int, address: int, expected: bytes, /) -> bool:
        """Return whether this process may read another one's memory, and finds these bytes there."""


class Endpoint(Protocol):
    """One rank's end of a group, or of one pair of ranks, in shared memory or over TCP.

    The methods that are named after collectives take a whole call. They return its result; or
    `NotImplemented`, if they cannot carry it out and nothing has happened; or the endpoint itself, if the
    call has begun and others have not come yet. Then `progress` goes on with it.
    """

    issued: int
    """Number of the last call that was made."""
    completed: int
    """Number of the last completed call."""
    others: int
    """Transfers to the same receiver over other media."""
    held: int
    """Not 0 if no call is taken whole."""
    on_complete: Callable[[], object] | None
    """Called when a call that the endpoint took whole is complete."""
    keep_alive: object
    """Object that lives as long as the endpoint."""
    max_flat: int
    """Bytes from which an all-reduce is left to Python."""
    single_copy_from: int
    """Bytes from which peers read private arrays in this process; by default, the paths are measured."""
    single_copies: int
    """Kinds and sizes of arrays that go by a single copy, as measured: a bit for each; see `shm.c`."""

    def __init__(
        self,
        regions: Sequence[tuple[Any, int]],
        salts: Sequence[int],
        position: int,
        slot_bytes: int,
        staging_bytes: int,
        oversubscribed: bool,
        pipe: bool = False,
    ) -> None:
        """Make an endpoint in shared memory; see `shm.h` and `p2p.h`.

        Args:
            regions: Writable buffer and offset of each member's region.
            salts: 64 bits that each member mixes into its hashes.
            position: This member's.
            slot_bytes: Size of each slot of a region.
            staging_bytes: Size of each staging buffer of a region.
            oversubscribed: There are more ranks than cores.
            pipe: It is for transfers from member 0 to member 1.
        """

    @classmethod
    def over_sockets(
        cls,
        descriptors: list[int],
        position: int,
        receipts: int = -1,
        piece_bytes: int = 0,
        owns: bool = True,
        one_step_bytes: int = 0,
        streams: int = 1,
        secure: dict[int, Any] = ...,
        /,
    ) -> Endpoint:
        """Make an endpoint over TCP connections; see `tcp.h`.

        Args:
            descriptors: `streams` connections with each member; -1 for this member's position.
            position: This member's.
            receipts: Connection for the receiver's answers, if it is for transfers from member 0 to 1; or -1.
            piece_bytes: Bytes of a piece; 0 for the default. The same on all members, as are the last two.
            owns: The connections are closed with the endpoint, once it is made.
            one_step_bytes: Bytes that one rank sends in all, up to which a call takes one step.
            streams: Connections with each member.
            secure: By descriptor, objects with `sendmsg`, `recvmsg_into` and `hidden` that encrypt the
                connections, all of them or none; see `SecureSocket`. They must not wait.
        """

    @property
    def slot_bytes(self) -> int:
        """Bytes that a rank can contribute in one epoch; over TCP, of a piece."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of a staging buffer."""

    @property
    def one_step_bytes(self) -> int:
        """Bytes that one rank sends in all, up to which a call over TCP takes one step."""

    @property
    def streams(self) -> int:
        """TCP connections with each member; 0 in shared memory."""

    @property
    def over_tcp(self) -> bool:
        """True if it is over TCP."""

    @property
    def can_read_peers(self) -> bool:
        """True if members may read the memory of each other's processes."""

    @property
    def pending(self) -> bool:
        """True while a call is under way."""

    @property
    def pending_sequence(self) -> int:
        """Number of the pending call, if the endpoint took it whole."""

    @property
    def completed_at(self) -> int:
        """Completion of the last call that the endpoint took whole, in ns of the monotonic clock."""

    @property
    def mismatched(self) -> bool:
        """True if `culprit` has made another call."""

    @property
    def corrupt(self) -> bool:
        """True if `culprit` has written or sent invalid data."""

    @property
    def disconnected(self) -> bool:
        """True if the connection with `culprit` has ended, or its memory is not readable."""

    @property
    def cause(self) -> OSError | None:
        """Error of the system or of OpenSSL that ended an encrypted connection."""

    @property
    def culprit(self) -> int:
        """Position of a member."""

    def barrier(self) -> Any:
        """Take a whole call, as the other methods of such names do."""

    def all_reduce(self, x: Any, op: str, out: Any, /) -> Any:
        """Take a whole call."""

    def reduce(self, x: Any, op: str, root: int, out: Any, /) -> Any:
        """Take a whole call."""

    def reduce_scatter(self, x: Any, op: str, axis: int | None, out: Any, /) -> Any:
        """Take a whole call."""

    def broadcast(self, x: Any, root: int, out: Any, /) -> Any:
        """Take a whole call."""

    def all_gather(self, x: Any, axis: int | None, out: Any, /) -> Any:
        """Take a whole call."""

    def gather(self, x: Any, root: int, out: Any, /) -> Any:
        """Take a whole call."""

    def all_to_all(self, x: Any, out: Any, /) -> Any:
        """Take a whole call."""

    def send(self, x: Any, /) -> Any:
        """Take a whole transfer, at its first end."""

    def recv(self, like: Any, out: Any, /) -> Any:
        """Take a whole transfer, at its second end."""

    def supports(self, descriptor: Any, /) -> bool:
        """Return whether `start` can carry a call out: a reduction only if there is a kernel for it."""

    def start(
        self,
        kind: int,
        op: int,
        dtype: int,
        root: int,
        hash_: int,
        nbytes: int,
        block: int,
        source: Any,
        target: Any,
        layout: bytes | None = None,
        /,
    ) -> None:
        """Begin a collective between flat buffers of bytes; `progress` goes on with it.

        Args:
            kind: Index into `descriptor.KINDS`.
            op: Index into `descriptor.OPS`.
            dtype: Index into `descriptor.DTYPES`; used in reductions only.
            root: The root.
            hash_: 64 bits that must be the same on all members.
            nbytes: Bytes of each contribution; with a layout, of the largest one.
            block: Bytes of one rank's block, in collectives that have blocks.
            source: Contribution; None if there is none.
            target: Memory of the result; None if there is none.
            layout: Blocks of different lengths, in 64-bit words of bytes: for each member how much it gets of
                this rank's source, and where that begins; how much comes from it, where that begins in the
                target, and where in the member's source. Then the size of the largest block of any member.
                A permutation must have one.
        """

    def start_send(
        self,
        hash_: int,
        data: memoryview,
        order: int = 0,
        dtype: int = -1,
        shape: tuple[int, ...] = (),
        text: str = "",
        /,
    ) -> None:
        """Begin to send bytes; `progress` goes on with it.

        Args:
            hash_: 64 bits that the receiver must have, too.
            data: The bytes.
            order: Its place among all transfers to the receiver.
            dtype: Index into `descriptor.DTYPES`; -1 if `text` describes the array.
            shape: Of the array.
            text: Descriptor of an array that the native core does not know.
        """

    def start_recv(
        self,
        hash_: int,
        into: memoryview,
        order: int = 0,
        dtype: int = -1,
        shape: tuple[int, ...] = (),
        text: str = "",
        /,
    ) -> None:
        """Begin to receive bytes, of the same description; `progress` goes on with it."""

    def arrival(self, seconds: float, /) -> tuple[int, int, tuple[int, ...], str] | None:
        """Return order, dtype, shape and text of the array that the sender has begun to send.

        None if there is none after so many seconds, or a call is under way. `order` counts the sender's
        transfers to this receiver over all media.
        """

    def progress(self, seconds: float, /) -> Any:
        """Wait for the members; return the result (None for a started call), or the endpoint itself."""

    def missing(self) -> list[int]:
        """Return the positions of the members that the last call waits for. Any thread."""

    def advertise(
        self,
        registered: RegisteredMemory | None,
        attach: Callable[[int, bytes, int, int], None],
        retire: Callable[[tuple[object, ...]], None],
        processes: list[int],
        /,
    ) -> None:
        """Let peers access large arrays in registered memory in place; all members must do so, or none.

        Args:
            registered: Segments with arrays.
            attach: Registers a member's segment: position, nonce, size, descriptor.
            retire: Keeps arrays of a failed call that peers may still access, when the endpoint goes.
            processes: Process of each member, if each may read the memory of all others; else empty.
        """

    def next_sequence(self) -> int:
        """Count a call that Python makes, and return its number."""

    def recent(self, most: int = 256, /) -> list[Any]:
        """Return the last calls that were taken whole, oldest first.

        Each is (number, descriptor, nbytes, began, completed, waited), times in ns of the monotonic clock:
        0 for not yet; `waited` is the time spent waiting for others, -1 if unknown.
        """

    def totals(self) -> tuple[int, int, int]:
        """Return how many calls in `recent` are complete, and the ns that they took and waited in all."""

    def forget(self, number: int, /) -> None:
        """Leave a call out of `recent`: its record is kept elsewhere."""

    def close(self) -> None:
        """Let no more calls begin; a pending one goes on."""

    def abort(self) -> None:
        """Close it, and make `progress` return at once. Any thread."""


class PlannedCall(Protocol):
    """Base of a plan: calls without arguments, or with another array like the planned one, run natively.

    A subclass has a method `_call` for all others, with the same arguments.
    """

    def prepare(self, group: object, endpoint: Endpoint, name: str, arguments: tuple[object, ...], /) -> bool:
        """Let the endpoint of a group take calls like this one; return whether it does.

        The arguments are x, op, root, axis, dst, src and out; those that the function lacks do not matter.
        """


class Core(Protocol):
    """Contents of the module `dmesh._native`."""

    abi: int
    """Changes when Python code for another version would misuse the module."""
    build: BuildInfo
    """Facts about its build."""
    Endpoint: type[Endpoint]
    """Type of endpoints."""
    RegisteredMemory: Callable[[], RegisteredMemory]
    """Makes an empty table of segments."""
    FastPath: Callable[[str, Callable[..., Any], ContextVar[Any], type], Any]
    """Makes a public function whose usual calls run natively; see `dmesh.collectives.api`."""
    PlannedCall: type[PlannedCall]
    """Base of plans whose calls run natively; see `dmesh.collectives.persistent`."""

    def sum_rows(self, rows: NDArray[Any], /) -> NDArray[Any] | None:
        """Return the sum of each row of a matrix in C order, of float16, float32 or float64.

        Sums are pairwise, as accurate as NumPy's, and have the same bits on every CPU. Those of float16 are
        float32. None if one is infinite or NaN. Other threads run in the meantime.
        """


def core() -> Core | None:
    """Return the native core, or None if it is not used; `reason()` says why.

    The environment is read at every call, the module loaded at most once.

    Raises:
        NativeCoreError: `DMESH_NATIVE` is 1, but there is no native core, or it cannot be loaded.
        ConfigurationError: `DMESH_NATIVE` is none of 0, 1 and auto.
    """
    wanted = read_native(environment())
    if wanted is False:
        return None
    module, problem = _load()
    if module is None and wanted:
        raise NativeCoreError(
            f"DMESH_NATIVE asks for the native core, but {problem}. Build it (in a checkout: `make native`; "
            "otherwise, with the path of one: `DMESH_BUILD_NATIVE=require python -m pip install "
            "--force-reinstall --no-deps PATH`, which says what is missing), or unset DMESH_NATIVE to run "
            "without it"
        )
    return module


def reason() -> str | None:
    """Return why `core()` does not return the native core; None if it does.

    Raises:
        ConfigurationError: `DMESH_NATIVE` is none of 0, 1 and auto.
    """
    if read_native(environment()) is False:
        return "DMESH_NATIVE turns it off"
    return _load()[1]


@functools.cache
def _load() -> tuple[Core | None, str | None]:
    """Return the module, or None and the reason why it cannot be used."""
    try:
        # By its name: a checker of imports would take `from dmesh import` for one of the whole package.
        module = cast(Core, importlib.import_module(_MODULE))
    except ModuleNotFoundError as error:
        if error.name == _MODULE:
            return None, "this installation was built without it"
        return None, f"it cannot be loaded: {error}"
    except (ImportError, RuntimeError) as error:  # RuntimeError: NumPy is older than what it was built for
        return None, f"it cannot be loaded: {error}"
    abi = getattr(module, "abi", None)
    if abi != ABI:
        return None, f"it is from another version of dmesh: its abi is {abi}, expected {ABI}"
    return module, None
