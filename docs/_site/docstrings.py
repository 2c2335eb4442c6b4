"""Docstrings of the collectives as `help` shows them: the sources do not repeat what they share.

`dmesh.collectives.api.collective` completes them when the functions are imported; here the sources are read.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension, Function

from dmesh.collectives.api import complete

DECORATOR = "dmesh.collectives.api.collective"


class CompleteDocstrings(Extension):
    """Completes the docstrings of the functions that are decorated with `collective`."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Completes one, if it is such a function's."""
        if func.docstring and any(found.callable_path == DECORATOR for found in func.decorators):
            func.docstring.value = (
                complete(func.docstring.value, [argument.name for argument in func.parameters]) or ""
            )
