"""Detection of this machine's accelerators. Nothing is assumed: a device that cannot be seen is not there."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_NVML_LIBRARY = "libnvidia-ml.so.1"
_TEXT_LENGTH = 96
"""Room for a GPU's name or UUID; NVML's own limit."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    index: int
    """Index among the GPUs that this process may use, from 0."""
    name: str
    """The product name, empty if unknown."""
    uuid: str
    """NVIDIA's identity of the device, `GPU-...`, empty if unknown."""


def detect_gpus(environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Returns the NVIDIA GPUs that this process may use, in the driver's order.

    They are asked of NVML, the driver's own library; where that is missing, of `/proc/driver/nvidia`. The
    machine is looked at once, `CUDA_VISIBLE_DEVICES` at every call.

    Args:
        environ: Where to read `CUDA_VISIBLE_DEVICES`; the process's environment if None.
    """
    environ = os.environ if environ is None else environ
    return visible_gpus(_physical_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _physical_gpus() -> tuple[Gpu, ...]:
    try:
        library: Any = ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        library = None
    found = None if library is None else gpus_from_nvml(library)
    return gpus_from_proc(Path("/")) if found is None else found


def gpus_from_nvml(library: Any) -> tuple[Gpu, ...] | None:
    """Asks NVML.

    Args:
        library: The loaded library, or something with the same functions.

    Returns:
        The GPUs that answer; None if NVML itself does not.
    """
    try:
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:  # a library without the functions we know
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        gpus: list[Gpu] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
                continue  # fallen off the bus, or not ours to use
            name = _nvml_text(library.nvmlDeviceGetName, handle)
            gpus.append(Gpu(len(gpus), name, _nvml_text(library.nvmlDeviceGetUUID, handle)))
        return tuple(gpus)
    except AttributeError:
        return None
    finally:
        library.nvmlShutdown()


def _nvml_text(function: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_LENGTH)
    if function(handle, buffer, ctypes.c_uint(_TEXT_LENGTH)) != 0:
        return ""
    return buffer.value.decode("utf-8", "replace")


def gpus_from_proc(root: Path) -> tuple[Gpu, ...]:
    """Detects NVIDIA GPUs from the driver's entries in the file system.

    A container sees the host's entries in `/proc` whether or not it was given the devices, so a GPU counts
    only if its device file is there, too.

    Args:
        root: The root of the file system.
    """
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        try:
            text = (folder / "information").read_text(errors="replace")
        except OSError:
            continue
        facts = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        minor = facts.get("Device Minor", "")
        if minor.isdecimal() and (root / "dev" / f"nvidia{minor}").exists():
            gpus.append(Gpu(len(gpus), facts.get("Model", ""), facts.get("GPU UUID", "")))
    return tuple(gpus)


def visible_gpus(gpus: tuple[Gpu, ...], selection: str | None) -> tuple[Gpu, ...]:
    """Applies `CUDA_VISIBLE_DEVICES` as CUDA does: indices or UUID prefixes, up to the first unknown one.

    Args:
        gpus: All GPUs.
        selection: The variable's value; None if it is not set, which shows all. Empty shows none.
    """
    if selection is None:
        return gpus
    chosen: list[Gpu] = []
    for token in (part.strip() for part in selection.split(",")):
        if token.isascii() and token.isdecimal():
            matches = [gpu for gpu in gpus if str(gpu.index) == token.lstrip("0").rjust(1, "0")]
        else:
            matches = [gpu for gpu in gpus if token.startswith("GPU-") and gpu.uuid.startswith(token)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(chosen))
