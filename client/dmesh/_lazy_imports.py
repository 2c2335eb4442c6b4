"""Packages whose names are imported when they are first used, so that `import dmesh` stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_getattr(
    package: str, homes: Mapping[str, tuple[str, ...]], parent: str | None = None
) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports its names when they are first used.

    Args:
        package: The package's name.
        homes: Names that each module below the package gives to it. A module's own name is one of the
            package's names, too.
        parent: Package that the modules are in; this one if None.
    """
    parent = parent or package

    def find(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                value = getattr(importlib.import_module(f"{parent}.{home}"), name)
                setattr(sys.modules[package], name, value)
                return value
        if name in homes and parent == package:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
