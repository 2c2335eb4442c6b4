"""Collectives of objects: plain values of any size, which may differ between ranks. `api` has all rules.

Objects are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, dates and times,
and NumPy arrays and scalars, also inside one another. They are encoded with MessagePack: nothing is pickled,
and decoding runs no code of the sender's. What arrives is equal, of the same type, and a copy. `serializer=`
takes another encoding, which all ranks must name alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from dmesh.collectives.api import ProcessGroup, collective, resolve
from dmesh.collectives.futures import then
from dmesh.collectives.object_encoding import decode, encode
from dmesh.collectives.object_requests import ObjectCall
from dmesh.collectives.point_to_point import Peer, Source, Status, Tag
from dmesh.collectives.request import Array, describe_dtype, describe_type
from dmesh.collectives.validation import check_position
from dmesh.errors import CollectiveTypeError, CollectiveValueError


class Serializes(Protocol):
    """An object, or a module such as `json`, that makes bytes of objects and objects of bytes."""

    def dumps(self, value: Any, /) -> bytes | str:
        """Return an object as bytes, or as text."""

    def loads(self, data: bytes, /) -> Any:
        """Return the object of some bytes."""


_OBJECT = np.dtype([("object", np.uint8)])
"""Dtype of an object under way between two ranks, by which it differs from an array of bytes."""
Serializer: TypeAlias = Serializes | tuple[Callable[[Any], bytes | str], Callable[[bytes], Any]]
"""Encoding of objects: something with `dumps` and `loads`, or these two functions."""


@collective
def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the root's object to every rank.

    Args:
        value: On the root, the object; ignored on the others.
        root: Position of the rank whose object it is.

    Returns:
        A copy of the root's object; on the root, the object itself.
    """
    codec, members = Codec("broadcast_object", serializer), resolve(group)
    size, rank = members.requests.size, members.requests.rank
    root = check_position(root, size, "root", codec.what)
    payloads = dict.fromkeys(range(size), codec.encode(value)) if rank == root else {}
    call = ObjectCall("broadcast", codec.text(f"root={root}"), size, rank, root, payloads, (root,))
    return _carry_out(
        members, call, lambda found: value if rank == root else codec.decode(found[root]), timeout, async_op
    )


@collective
def all_gather_object(
    value: Any,
    *,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the objects of all ranks to every rank.

    Args:
        value: This rank's object.

    Returns:
        A list of the objects in the order of ranks.
    """
    codec, members = Codec("all_gather_object", serializer), resolve(group)
    size, rank = members.requests.size, members.requests.rank
    payloads = dict.fromkeys(range(size), codec.encode(value))
    call = ObjectCall("all_gather", codec.text(), size, rank, 0, payloads, tuple(range(size)))
    return _carry_out(members, call, codec.decode_all, timeout, async_op)


@collective
def gather_object(
    value: Any,
    root: int = 0,
    *,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the objects of all ranks to the root.

    Args:
        value: This rank's object.
        root: Position of the rank that gets them.

    Returns:
        On the root a list of the objects in the order of ranks; None on the others.
    """
    codec, members = Codec("gather_object", serializer), resolve(group)
    size, rank = members.requests.size, members.requests.rank
    root = check_position(root, size, "root", codec.what)
    payloads = {root: codec.encode(value)}
    sources = tuple(range(size)) if rank == root else ()
    call = ObjectCall("gather", codec.text(f"root={root}"), size, rank, root, payloads, sources)
    return _carry_out(
        members, call, lambda found: codec.decode_all(found) if rank == root else None, timeout, async_op
    )


@collective
def scatter_object(
    values: Sequence[Any] | None = None,
    root: int = 0,
    *,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Distribute the root's objects: each rank gets one.

    Args:
        values: On the root, a list or tuple of one object for each rank; ignored on the others.
        root: Position of the rank that has them.

    Returns:
        A copy of this rank's object.
    """
    codec, members = Codec("scatter_object", serializer), resolve(group)
    size, rank = members.requests.size, members.requests.rank
    root = check_position(root, size, "root", codec.what)
    payloads = codec.encode_all(values, size) if rank == root else {}
    call = ObjectCall("scatter", codec.text(f"root={root}"), size, rank, root, payloads, (root,))
    return _carry_out(members, call, lambda found: codec.decode(found[root]), timeout, async_op)


@collective
def all_to_all_object(
    values: Sequence[Any],
    *,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an object to each rank, and receive one of each.

    Args:
        values: A list or tuple of one object for each rank.

    Returns:
        A list of the objects for this rank, in the order of the ranks that they come from.
    """
    codec, members = Codec("all_to_all_object", serializer), resolve(group)
    size, rank = members.requests.size, members.requests.rank
    payloads = codec.encode_all(values, size)
    call = ObjectCall("all_to_all", codec.text(), size, rank, 0, payloads, tuple(range(size)))
    return _carry_out(members, call, codec.decode_all, timeout, async_op)


@collective
def send_object(
    value: Any,
    dst: Peer,
    *,
    tag: int = 0,
    synchronous: bool = False,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an object to one rank, which must call `recv_object`.

    It goes as an array does, with `send`: sends and receives match in their order, also with those of arrays;
    a small object is buffered, and a larger one waits for the receiver.

    Args:
        value: The object.
        dst: Position of the receiver; or `NULL_PEER`.
        tag: A number from 0 to 2147483647, which the receiver can ask for.
        synchronous: True to wait for the receiver in any case; needs a tag of at least 1.
    """
    data = np.frombuffer(Codec("send_object", serializer).encode(value), np.uint8).view(_OBJECT)
    members: Any = resolve(group)  # an overload cannot be chosen by a bool
    more = {"tag": tag, "synchronous": synchronous} if synchronous else {"tag": tag}
    return members.send(data, dst, timeout=timeout, async_op=async_op, **more)


@collective
def recv_object(
    src: Source,
    *,
    tag: Tag = 0,
    status: Status | None = None,
    serializer: Serializer | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive an object from one rank, or from any, which must call `send_object`.

    Args:
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        tag: Tag of the object; or `ANY_TAG`.
        status: Takes source and tag of what has come.

    Returns:
        The object that came; None from `NULL_PEER`.
    """
    codec = Codec("recv_object", serializer)
    members: Any = resolve(group)  # an overload cannot be chosen by a bool
    found = members.recv(None, src, tag=tag, status=status, timeout=timeout, async_op=async_op)

    def finish(array: Array | None) -> Any:
        if array is not None and array.dtype != _OBJECT:
            raise CollectiveTypeError(
                f"recv_object got an array of {describe_dtype(array.dtype)}, shape {array.shape}, which must "
                "be received with `recv`"
            )
        return None if array is None else codec.decode(array.tobytes())

    return then(found, finish) if async_op else finish(found)


class Codec:
    """Encoding of the objects of one call."""

    def __init__(self, what: str, serializer: Serializer | None) -> None:
        self.what = what
        self._name = ""
        self._dumps: Callable[[Any], bytes | str] = encode
        self._loads: Callable[[bytes], Any] = decode
        if serializer is None:
            return
        pair: tuple[Any, ...] = (getattr(serializer, "dumps", None), getattr(serializer, "loads", None))
        if isinstance(serializer, tuple):
            pair = serializer
        dumps, loads = pair if len(pair) == 2 else (None, None)
        if not callable(dumps) or not callable(loads):
            raise CollectiveTypeError(
                f"serializer= of {what} needs the functions dumps and loads, as a pair or in an object, not "
                f"{describe_type(serializer)}"
            )
        self._dumps, self._loads = dumps, loads
        named = dumps if isinstance(serializer, tuple) else serializer
        self._name = getattr(named, "__name__", type(named).__qualname__)

    def text(self, *arguments: str) -> str:
        """Return the wire descriptor of the call."""
        more = (*arguments, f"serializer={self._name}") if self._name else arguments
        return f"{self.what}({', '.join(more)})"

    def encode(self, value: object) -> bytes:
        """Return an object as bytes."""
        data = self._dumps(value)
        if isinstance(data, str):
            return data.encode()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise CollectiveTypeError(
                f"dumps of the serializer of {self.what} must return bytes, not {describe_type(data)}"
            )
        return bytes(data)

    def encode_all(self, values: Sequence[Any] | None, size: int) -> dict[int, bytes]:
        """Return one object for each rank as bytes."""
        if not isinstance(values, list | tuple):
            raise CollectiveTypeError(
                f"{self.what} needs a list or tuple of one object for each of the group's {size} ranks, got "
                f"{describe_type(values)}"
            )
        if len(values) != size:
            raise CollectiveValueError(
                f"{self.what} needs one object for each of the group's {size} ranks, got {len(values)}"
            )
        return {target: self.encode(value) for target, value in enumerate(values)}

    def decode(self, data: bytes) -> Any:
        """Return the object of some bytes."""
        return self._loads(data)

    def decode_all(self, found: Mapping[int, bytes]) -> list[Any]:
        """Return the objects of all ranks, in their order."""
        return [self.decode(found[source]) for source in sorted(found)]


def _carry_out(
    members: ProcessGroup,
    call: ObjectCall,
    finish: Callable[[Mapping[int, bytes]], Any],
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Carry out a call, and make its result of what came.

    That is no part of the call: if an object cannot be decoded on one rank, the group goes on.
    """
    found = members.call(call.request(), timeout, async_op)
    return then(found, finish) if async_op else finish(found)
