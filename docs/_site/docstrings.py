"""Contents of the reference: complete docstrings of collectives, and no internals of classes."""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function

from dmesh.collectives.api import complete

DECORATOR = "dmesh.collectives.api.collective"
INTERNAL = {
    "dmesh.arrays.dtensor.DTensor": {"alias", "blocks", "replace_with", "spec", "writable"},
    "dmesh.collectives.group.Group": {
        "busy", "call", "close", "current", "endpoint", "fail", "generation", "id", "look", "members",
        "refuse_forked_child", "renew", "restart", "streams",
    },
    "dmesh.distribute.coordinator.remote_values.RemoteValue": {"set_error", "set_value"},
    "dmesh.distribute.extended.StrategyExtended": {"check_logical_device", "gather_values", "reduce_values"},
    "dmesh.distribute.replica_context.ReplicaContext": {"exchange", "require_finished", "require_running"},
}  # fmt: skip
"""Members of public classes that only dmesh itself uses."""
WIRE = ("from_proto", "to_proto")
"""The same of all classes of `dmesh.coordination`."""


class CompleteDocstrings(Extension):
    """Shows the docstrings of collectives as `help` does, and leaves out the internals of classes.

    The sources of collectives do not repeat what their docstrings share: `collective` completes them when the
    functions are imported. Here the sources are read.
    """

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Complete the docstring of a function that is decorated with `collective`."""
        if func.docstring and any(found.callable_path == DECORATOR for found in func.decorators):
            func.docstring.value = (
                complete(func.docstring.value, [argument.name for argument in func.parameters]) or ""
            )

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """Leave out a class's internals."""
        of_the_wire = WIRE if cls.path.startswith("dmesh.coordination.") else ()
        for name in (*INTERNAL.get(cls.path, ()), *of_the_wire):
            cls.members.pop(name, None)
