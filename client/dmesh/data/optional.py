"""`Optional`: an element, or the end of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmesh.data.elements import as_element, spec_of
from dmesh.errors import DatasetError

__all__ = ["Optional"]


class Optional:
    """Result of `get_next_as_optional`: an element, or nothing after the last one.

    Made by `from_value` and `empty`.

    Args:
        values: The value, or nothing.
        find_spec: Returns the structure of specs; called only when it is needed.
    """

    def __init__(self, values: tuple[Any, ...], find_spec: Callable[[], Any]) -> None:
        self._values = values
        self._find_spec = find_spec

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return an `Optional` with a value.

        Args:
            value: The value, a structure of arrays.
        """
        return Optional((value,), lambda: spec_of(as_element(value)))

    @staticmethod
    def empty(element_spec: Any = None) -> Optional:
        """Return an `Optional` without a value.

        Args:
            element_spec: Spec of the missing value.
        """
        return Optional((), lambda: element_spec)

    @property
    def element_spec(self) -> Any:
        """Structure of specs of the value, or of the missing value.

        Raises:
            DMeshError: The dataset cannot find out its spec.
        """
        return self._find_spec()

    def has_value(self) -> bool:
        """Return whether there is a value."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Return the value.

        Raises:
            DatasetError: There is no value.
        """
        if not self._values:
            raise DatasetError("this Optional has no value. Check has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional.from_value({self._values[0]!r})" if self._values else "Optional.empty()"
