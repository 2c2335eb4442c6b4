"""What `from mpi4py import MPI` imports in mpi4py's tests: its names, over dmesh."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from tests.mpi4py_suite import comm, requests
from tests.mpi4py_suite.buffers import BOTTOM, IN_PLACE, Absent, Datatype
from tests.mpi4py_suite.comm import Comm, Op

from dmesh import collectives

_DATATYPES = {
    "BYTE": "B", "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q",
    "UNSIGNED_CHAR": "B", "UNSIGNED_SHORT": "H", "UNSIGNED_INT": "I", "UNSIGNED_LONG": "L",
    "UNSIGNED_LONG_LONG": "Q", "FLOAT": "f", "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?",
    "C_FLOAT_COMPLEX": "F", "C_DOUBLE_COMPLEX": "D", "C_LONG_DOUBLE_COMPLEX": "G", "DATATYPE_NULL": None,
}  # fmt: skip
_OPS = {
    "SUM": comm.SUM,
    "PROD": Op("prod", lambda x, y: x * y, np.multiply),
    "MAX": Op("max", max, np.maximum),
    "MIN": Op("min", min, np.minimum),
    "MAXLOC": Op("max_location", lambda x, y: max(x, y, key=lambda pair: (pair[0], -pair[1]))),
    "MINLOC": Op("min_location", min),
    "REPLACE": Op("", lambda x, y: y),
    "NO_OP": Op("", lambda x, y: x),
    "OP_NULL": None,
}
_NAMES = {
    "ANY_SOURCE": requests.ANY, "ANY_TAG": requests.ANY, "PROC_NULL": comm.PROC_NULL,
    "UNDEFINED": requests.UNDEFINED, "SUCCESS": requests.SUCCESS, "ERR_ROOT": comm.ERR_ROOT,
    "IN_PLACE": IN_PLACE, "BOTTOM": BOTTOM, "BSEND_OVERHEAD": 0, "THREAD_SINGLE": 0, "COMM_NULL": None,
    "Status": requests.Status, "Request": requests.Request, "Prequest": requests.Prequest,
    "Message": requests.Message, "MESSAGE_NULL": requests.MESSAGE_NULL,
    "MESSAGE_NO_PROC": requests.MESSAGE_NO_PROC, "REQUEST_NULL": requests.REQUEST_NULL,
    "Exception": comm.Error, "Datatype": Datatype,
    "Get_version": lambda: (4, 1), "get_vendor": lambda: ("dmesh", (0, 0, 0)), "Query_thread": lambda: 3,
    "Alloc_mem": bytearray, "Free_mem": lambda memory: None, "Attach_buffer": lambda memory: None,
    "Detach_buffer": comm.detach_buffer, "Get_address": lambda memory: 0,
}  # fmt: skip


_ABSENT = {"pickle": "objects sent as buffers of pickled bytes", "_comm_lock_table": "mpi4py's locks"}


class Module(ModuleType):
    """A module, all of whose other names are absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Absent(_ABSENT.get(name, name))


def install() -> ModuleType:
    """Make `mpi4py.MPI` this module; return it."""
    package, module = ModuleType("mpi4py"), Module("mpi4py.MPI")
    vars(module).update(_NAMES | _OPS | {name: Datatype(code) for name, code in _DATATYPES.items()})
    vars(module).update(COMM_WORLD=Comm(), COMM_SELF=Comm())
    package.MPI = module  # type: ignore[attr-defined]
    sys.modules.update({"mpi4py": package, "mpi4py.MPI": module})
    begin(module, "import")
    return module


def begin(module: ModuleType, test: str, first_tag: int = 0) -> None:
    """Give a test groups of its own: those of an earlier one may have failed on some ranks."""
    requests.first_tag = first_tag
    comm.made.clear()
    comm.substitutes.clear()
    world = collectives.world()
    module.COMM_WORLD.__init__(collectives.new_group(world.ranks, f"world of {test}"))  # type: ignore[misc]
    module.COMM_SELF.__init__(collectives.new_group([world.rank], f"self of {test}"))  # type: ignore[misc]
