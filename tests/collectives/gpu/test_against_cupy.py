"""The fake has the names, signatures, numbers and errors of the CuPy that is installed. Needs no GPU."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys

import pytest
from tests.collectives.gpu import fake_cuda, fake_nccl

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")

# By itself: importing CuPy where there is no CUDA warns, and the other tests are to find it not imported.
PROBE = """
import inspect, json, warnings
warnings.simplefilter("ignore")
import cupy
from cupy.cuda import nccl
Comm = nccl.NcclCommunicator
null = Comm.__new__(Comm)

def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, getattr(error, "status", None), str(error)]

print(json.dumps({
    "version": cupy.__version__,
    "numbers": {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("NCCL_")},
    "docs": {name: getattr(Comm, name).__doc__ for name in dir(Comm) if not name.startswith("_")},
    "made": Comm.__doc__,
    "errors": [str(nccl.NcclError(number)) for number in range(1, 7)],
    "functions": [name for name in ("get_unique_id", "groupStart", "groupEnd") if hasattr(nccl, name)],
    "null": {
        name: error_of(getattr(null, name)) for name in ("check_async_error", "abort", "destroy", "size")
    },
    "null call": error_of(lambda: null.allReduce(0, 0, 1, 7, 0, 0)),
    "negative": error_of(lambda: null.allReduce(0, 0, -1, 7, 0, 0)),
    "tuple": error_of(lambda: Comm(1, (0,) * 128, 0)),
    "identity": [type(nccl.get_unique_id()).__name__, len(nccl.get_unique_id())],
    "available": nccl.available,
    "cuda": {
        name: list(inspect.signature(getattr(cupy.cuda, name)).parameters) for name in ("Event", "Stream")
    },
    "current": cupy.cuda.get_current_stream.__doc__,
    "package": [name for name in ("ndarray", "empty", "asarray") if hasattr(cupy, name)],
    "array": [name for name in dir(cupy.ndarray)],
    "astype": cupy.ndarray.astype.__doc__,
    "copy": cupy.ndarray.copy.__doc__,
    "event": dir(cupy.cuda.Event),
    "stream": dir(cupy.cuda.Stream),
}))
"""


@pytest.fixture(scope="module")
def real():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_numbers(real):
    assert {name: getattr(fake_nccl, name) for name in real["numbers"]} == real["numbers"]
    assert real["available"]


CALLED = ["allReduce", "reduce", "broadcast", "reduceScatter", "allGather", "send", "recv"]


@pytest.mark.parametrize("name", [*CALLED, "abort", "destroy", "check_async_error"])
def test_the_methods_of_communicators(real, name):
    mine = inspect.signature(getattr(fake_nccl.NcclCommunicator, name))
    theirs = real["docs"][name].splitlines()[0]
    names = [part.split()[-1] for part in theirs[theirs.index("(") + 1 : theirs.index(")")].split(",")]
    assert names == list(mine.parameters)


def test_the_making_of_communicators(real):
    assert real["made"].startswith(
        "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)"
    )
    mine = inspect.signature(fake_nccl.NcclCommunicator)
    assert list(mine.parameters) == ["ndev", "commId", "rank", "config"]
    assert real["identity"] == ["bytes", 128]
    assert real["tuple"][0] == "TypeError"


def test_the_errors(real):
    assert [str(fake_nccl.NcclError(number)) for number in range(1, 7)] == real["errors"]
    assert real["negative"][0] == "OverflowError"
    for error in (real["null"]["check_async_error"], real["null"]["size"], real["null call"]):
        assert error == ["NcclError", 4, str(fake_nccl.NcclError(4))]
    assert real["null"]["abort"] is None
    assert real["null"]["destroy"] is None


def test_the_rest_of_cupy(real):
    assert real["functions"] == ["get_unique_id", "groupStart", "groupEnd"]
    assert real["package"] == ["ndarray", "empty", "asarray"]
    assert real["cuda"]["Event"] == list(inspect.signature(fake_cuda.Event).parameters)
    assert real["cuda"]["Stream"] == list(inspect.signature(fake_cuda.Stream).parameters)
    assert "device_id" in real["current"]
    used = {"shape", "dtype", "ndim", "size", "nbytes", "data", "flags", "device", "reshape", "get", "astype"}
    assert used <= set(real["array"])
    assert {"__dlpack__", "__dlpack_device__"} <= set(real["array"])
    assert real["astype"].startswith("_ndarray_base.astype(self, dtype, order='K', casting=None, subok=None,")
    assert "order" in real["copy"].splitlines()[0]
    assert {"record", "synchronize", "done"} <= set(real["event"])
    assert {"begin_capture", "is_capturing", "synchronize"} <= set(real["stream"])
