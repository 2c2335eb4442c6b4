"""Builds the reduction kernels as a library of their own, without Python in it, and calls it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CORE = Path(__file__).parents[2] / "client" / "native" / "core"
SOURCES = ("reduce.c", "copy.c", "wait.c", "kernels_baseline.c", "kernels_avx2.c")
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-ffp-contract=off")
STREAM = 1

Call = Callable[[], object]

NAMES = {
    np.dtype("?"): "BOOL",
    **{np.dtype(f"i{size}"): f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{np.dtype(f"u{size}"): f"U{8 * size}" for size in (1, 2, 4, 8)},
    **{np.dtype(f"f{size}"): f"F{8 * size}" for size in (2, 4, 8)},
    **{np.dtype(f"c{size}"): f"C{8 * size}" for size in (8, 16)},
    np.dtype("m8[ns]"): "TIMEDELTA64",
    np.dtype("M8[ns]"): "DATETIME64",
}
"""How the header calls NumPy's own dtypes."""


def compiler() -> str | None:
    """The C compiler, if this machine has one."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(program: Path, *arguments: str | Path) -> Path:
    """Compiles the kernels, with what is given beside them."""
    command = compiler()
    assert command is not None
    sources = [CORE / name for name in SOURCES]
    subprocess.run([command, *FLAGS, *arguments, "-I", CORE, *sources, "-o", program], check=True)
    return program


def enumerators(name: str) -> dict[str, int]:
    """The constants of one of the header's enumerations, which count from 0."""
    text = re.sub(r"/\*.*?\*/", "", (CORE / "reduce.h").read_text(), flags=re.S)
    body = re.search(rf"enum {name} {{(.*?)}}", text, re.S)
    assert body is not None
    names = [part.strip().removeprefix("DMESH_") for part in body[1].split(",") if part.strip()]
    return {constant: number for number, constant in enumerate(names)}


class Kernel:
    """One op for one dtype, for one kind of CPU."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self._library = library
        self._address = address
        self.input_size = int(library.dmesh_kernel_input_size(address))
        self.output_size = int(library.dmesh_kernel_output_size(address))

    def __call__(
        self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]], count: int, flags: int = 0
    ) -> None:
        self.prepare(inputs, outputs, count, flags)()

    def prepare(
        self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]], count: int, flags: int = 0
    ) -> Call:
        """Returns a call without arguments, which does not convert any."""
        assert all(array.nbytes >= count * self.input_size for array in inputs)
        assert all(array.nbytes >= count * self.output_size for array in outputs)
        ins = (ctypes.c_void_p * len(inputs))(*(array.ctypes.data for array in inputs))
        outs = (ctypes.c_void_p * len(outputs))(*(array.ctypes.data for array in outputs))
        reduce = self._library.dmesh_reduce
        arguments = (self._address, ins, len(inputs), outs, len(outputs), count, flags)

        return lambda: reduce(*arguments)


class Kernels:
    """The library."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(os.fspath(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.dmesh_kernel_for.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
        library.dmesh_kernel_for.restype = pointer
        for function in (library.dmesh_kernel_input_size, library.dmesh_kernel_output_size):
            function.argtypes, function.restype = [pointer], size
        library.dmesh_reduce.argtypes = [
            pointer,
            pointer,
            ctypes.c_uint,
            pointer,
            ctypes.c_uint,
            size,
            ctypes.c_uint,
        ]
        library.dmesh_reduce.restype = None
        library.dmesh_row_sums_for.argtypes = [ctypes.c_int, ctypes.c_int]
        library.dmesh_row_sums_for.restype = ctypes.CFUNCTYPE(None, pointer, size, size, pointer)
        for copy in (library.dmesh_copy, library.dmesh_copy_stream):
            copy.argtypes, copy.restype = [pointer, pointer, size], None
        self._dtypes = enumerators("dmesh_dtype")
        self._ops = enumerators("dmesh_op")
        self._isas = enumerators("dmesh_isa")

    def find(self, op: str, dtype: np.dtype[Any], isa: str = "ISA_BEST") -> Kernel | None:
        """Returns a kernel, or None if there is none."""
        name = "BF16" if dtype.name == "bfloat16" else NAMES[dtype]
        address = self._library.dmesh_kernel_for(self._dtypes[name], self._ops[op.upper()], self._isas[isa])
        return None if address is None else Kernel(self._library, address)

    def row_sums(self, rows: NDArray[Any], isa: str = "ISA_BEST") -> NDArray[Any] | None:
        """Returns the sum of each row of a matrix in C order, or None if there is no kernel for its dtype."""
        add = self._library.dmesh_row_sums_for(self._dtypes[NAMES[rows.dtype]], self._isas[isa])
        if not add:
            return None
        assert rows.flags.c_contiguous
        sums = np.empty(len(rows), np.result_type(rows.dtype, np.float32))
        add(rows.ctypes.data, *rows.shape, sums.ctypes.data)
        return sums

    def copy(self, to: NDArray[Any], source: NDArray[Any], *, stream: bool = False) -> None:
        """Copies, into the caches or past them."""
        self.prepare_copy(to, source, stream=stream)()

    def prepare_copy(self, to: NDArray[Any], source: NDArray[Any], *, stream: bool = False) -> Call:
        """Returns a call without arguments that copies."""
        assert to.nbytes == source.nbytes
        copy = self._library.dmesh_copy_stream if stream else self._library.dmesh_copy
        arguments = (to.ctypes.data, source.ctypes.data, to.nbytes)
        return lambda: copy(*arguments)
