"""`Optional`: an element, or the news that there is none."""

from __future__ import annotations

from typing import Any

from dmesh.errors import DatasetError

__all__ = ["Optional"]


class Optional:
    """Result of `get_next_as_optional`: an element, or nothing after the last one.

    Made by `from_value` and `empty`.
    """

    def __init__(self, values: tuple[Any, ...], element_spec: Any) -> None:
        self._values = values
        self._spec = element_spec

    @staticmethod
    def from_value(value: Any, element_spec: Any = None) -> Optional:
        """Returns one with a value.

        Args:
            value: The value.
            element_spec: Its spec, if it is known.
        """
        return Optional((value,), element_spec)

    @staticmethod
    def empty(element_spec: Any = None) -> Optional:
        """Returns one without a value.

        Args:
            element_spec: Spec of the value that it could have had.
        """
        return Optional((), element_spec)

    @property
    def element_spec(self) -> Any:
        """Spec of the value, if it is known."""
        return self._spec

    def has_value(self) -> bool:
        """Returns whether there is a value."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Returns the value.

        Raises:
            DatasetError: There is none.
        """
        if not self._values:
            raise DatasetError("this Optional has no value; ask has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional.from_value({self._values[0]!r})" if self._values else "Optional.empty()"
