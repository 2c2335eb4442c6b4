"""Packages whose names are imported when they are first used, so that `import dmesh` stays cheap."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while modules are imported.

    Modules make many objects, and all of them stay: the collector would look through the whole process
    several times and find nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load(name: str) -> ModuleType:
    """Import a module by its full name, with the collector paused, and return it."""
    with collector_paused():
        return importlib.import_module(name)


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
                value = getattr(load(f"{parent}.{home}"), name)
                setattr(sys.modules[package], name, value)
                return value
        if name in homes and parent == package:
            return load(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
