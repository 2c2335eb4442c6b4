"""As much of CuPy as the client uses, without a GPU: devices, memory, streams, events and arrays.

The memory of arrays is ordinary memory at its true address, so that `fake_nccl` works with pointers as NCCL
does. Streams are threads: whatever touches an array is queued on the current stream and done later, in order,
so that a forgotten dependency between streams shows as a wrong value. Arguments are checked as CuPy 14 checks
them; `test_against_cupy` compares the names and signatures with the real package.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

DEVICES = 8
PATIENCE = 60.0

_local = threading.local()
_numbers = itertools.count(1)
_allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_nulls: dict[int, Stream] = {}


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for CUDA's errors."""


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = current_device() if device is None else device
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __enter__(self) -> Device:
        stack = _local.__dict__.setdefault("devices", [])
        stack.append(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        _local.devices.pop()

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    __hash__ = None  # type: ignore[assignment]


def current_device() -> int:
    return (_local.__dict__.get("devices") or [0])[-1]


class Allocation:
    """A piece of device memory."""

    def __init__(self, nbytes: int) -> None:
        self.device = current_device()
        self.octets = np.full(nbytes, 0xCD, np.uint8)  # whoever reads what was not written notices
        self.start = self.octets.__array_interface__["data"][0] if nbytes else 0
        _allocations.add(self)


def memory_at(ptr: int, nbytes: int, device: int) -> np.ndarray | None:
    """Returns the bytes at an address of a device; None if nothing that is alive is there."""
    for allocation in list(_allocations):
        offset = ptr - allocation.start
        if allocation.device == device and 0 <= offset <= allocation.octets.size - nbytes:
            return allocation.octets[offset : offset + nbytes]
    return None


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.blocks = block
        self._reached = threading.Event()
        self._reached.set()  # one that was never recorded is done

    @property
    def done(self) -> bool:
        return self._reached.is_set()

    def record(self, stream: Stream | None = None) -> None:
        reached = self._reached = threading.Event()
        (stream or get_current_stream()).submit(reached.set)

    def synchronize(self) -> None:
        assert self.blocks, "a waiter that spins"
        assert self._reached.wait(PATIENCE), "a stream never comes to an event"


class Stream:
    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self.ptr = 0 if null else next(_numbers) << 8
        self.device_id = current_device()
        self.non_blocking = non_blocking
        self.captures = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._work,), name="fake-stream", daemon=True).start()
        if not null:
            _streams[self.ptr] = self

    def __del__(self) -> None:
        self._work.put(None)

    def __enter__(self) -> Stream:
        if self.device_id != current_device():
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the "
                f"current device ({current_device()})"
            )
        stacks = _local.__dict__.setdefault("streams", {})
        stacks.setdefault(self.device_id, []).append(self)
        return self

    def __exit__(self, *args: object) -> None:
        _local.streams[self.device_id].pop()

    def begin_capture(self, mode: Any = None) -> None:
        self.captures = True

    def is_capturing(self) -> bool:
        return self.captures

    def submit(self, work: Callable[[], None]) -> None:
        assert not self.captures, "what is submitted during a capture does not happen"
        self._work.put(work)

    @property
    def idle(self) -> bool:
        return self._work.empty()

    def synchronize(self) -> None:
        event = Event(block=True)
        event.record(self)
        event.synchronize()


def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (item := work.get()) is not None:
        item()
        del item


def null_stream(device: int) -> Stream:
    if device not in _nulls:
        with Device(device):
            _nulls[device] = Stream(null=True)
    return _nulls[device]


def get_current_stream(device_id: int = -1) -> Stream:
    device = current_device() if device_id == -1 else device_id
    stack = _local.__dict__.get("streams", {}).get(device)
    return stack[-1] if stack else null_stream(device)


def stream_at(ptr: int) -> Stream | None:
    return null_stream(current_device()) if ptr == 0 else _streams.get(ptr)


class _Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Flags:
    def __init__(self, c_contiguous: bool) -> None:
        self.c_contiguous = c_contiguous


class ndarray:
    """An array on the current device."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = float) -> None:
        dtype = np.dtype(dtype)
        self._memory = Allocation(int(np.prod(shape)) * dtype.itemsize)
        self._host = self._memory.octets.view(dtype).reshape(shape)

    @classmethod
    def _of(cls, host: np.ndarray, memory: Allocation) -> ndarray:
        self = cls.__new__(cls)
        self._host, self._memory = host, memory
        return self

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    T = property(lambda self: self._of(self._host.T, self._memory))
    device = property(lambda self: Device(self._memory.device))
    flags = property(lambda self: _Flags(self._host.flags.c_contiguous))

    @property
    def data(self) -> _Pointer:
        return _Pointer(self._host.__array_interface__["data"][0] if self._host.size else 0)

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy "
            "array explicitly."
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memory.device

    def __dlpack__(self, **arguments: object) -> object:
        raise BufferError("the fake's arrays stay on their device")

    def _launch(self, kernel: Callable[[], None]) -> None:
        assert self._memory.device == current_device(), "a kernel on an array of another device"
        get_current_stream().submit(kernel)

    def __getitem__(self, index: Any) -> ndarray:
        return self._of(self._host[index], self._memory)

    def __setitem__(self, index: Any, value: Any) -> None:
        target, source = self._host[index, ...] if index is not ... else self._host, value
        if isinstance(value, ndarray):
            source = value._host
            assert value._memory.device == self._memory.device
        keep = (self, value)
        self._launch(lambda: np.copyto(target, source) if keep else None)

    def reshape(self, *shape: int) -> ndarray:
        view = self._host.reshape(*shape)
        if not view.size or np.shares_memory(view, self._host):
            return self._of(view, self._memory)
        copied = ndarray(view.shape, self.dtype)  # as CuPy does where no view has that shape
        self._launch(lambda: np.copyto(copied._host, self._host.reshape(view.shape)))
        return copied

    def transpose(self, *axes: int) -> ndarray:
        return self._of(self._host.transpose(*axes), self._memory)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        assert order == "C"
        result = ndarray(self.shape, dtype)

        def convert() -> None:
            result._host[...] = self._host.astype(dtype)

        self._launch(convert)
        return result

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype, order=order)

    def get(self) -> np.ndarray:
        with self.device:
            get_current_stream().synchronize()
        return self._host.copy()


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> ndarray:
    return ndarray(shape if isinstance(shape, tuple) else (shape,), dtype)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    host = np.array(a, dtype)
    result = ndarray(host.shape, host.dtype)
    result[...] = host
    return result
