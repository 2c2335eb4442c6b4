"""The words of a layout: special sharding specs, and kinds of layouts."""

from __future__ import annotations

import enum

UNSHARDED = "unsharded"
"""The dimension is not cut: every device along it has all of it."""
MATCH = "match"
"""The dimension keeps whatever sharding the array has when the layout is applied to it."""


class LayoutType(enum.Enum):
    """Kind of the layout."""

    STATIC = "static"
    """The sharding of each dimension is given by the layout."""
    PARTED = "parted"
    """Likewise, but operations treat the sharded dimensions as independent batches."""
    SINGLE_DEVICE = "single_device"
    """The whole array is on one device."""
