"""Several TPU slices connected by the data center's network, from the `MEGASCALE_*` variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dmesh.config.addresses import HOST_PATTERN, is_ipv6, shown, split_address
from dmesh.errors import ConfigurationError, ResolverError

_INTEGER = re.compile(r"[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Multislice:
    """Index of a slice among several equal ones."""

    num_slices: int
    """Number of slices; at least 2."""
    slice_id: int
    """Index of this slice."""
    coordinator: str | None
    """Host name or address of the first host of slice 0; None if the variables lack it."""

    @classmethod
    def read(cls, value: Callable[[str], str | None]) -> Multislice | None:
        """Read `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and `MEGASCALE_COORDINATOR_ADDRESS`.

        Args:
            value: Function that returns a variable; None if it is not set.

        Returns:
            The index; None for a single slice.

        Raises:
            ConfigurationError: A variable is malformed.
            ResolverError: The slice's index is missing.
        """
        slices = _number("MEGASCALE_NUM_SLICES", value)
        if slices is None or slices < 2:
            return None
        number = _number("MEGASCALE_SLICE_ID", value)
        if number is None:
            raise ResolverError(
                f"MEGASCALE_NUM_SLICES is {slices}, but MEGASCALE_SLICE_ID is not set; set it to the "
                f"index of this slice, from 0 to {slices - 1}"
            )
        if number >= slices:
            raise ConfigurationError(
                f"MEGASCALE_SLICE_ID is {number}, but MEGASCALE_NUM_SLICES is {slices}; expected an index "
                f"from 0 to {slices - 1}"
            )
        address = (value("MEGASCALE_COORDINATOR_ADDRESS") or "").strip()
        return cls(slices, number, _host(address) if address else None)


def _number(name: str, value: Callable[[str], str | None]) -> int | None:
    text = (value(name) or "").strip()
    if text and not _INTEGER.fullmatch(text):
        raise ConfigurationError(f"{name} is {shown(text)}; expected an integer from 0")
    return int(text) if text else None


def _host(address: str) -> str:
    """Return the host of an address. A port would be that of Google's runtime."""
    if HOST_PATTERN.fullmatch(address) or is_ipv6(address):
        return address
    return split_address(address, "MEGASCALE_COORDINATOR_ADDRESS")[0]
