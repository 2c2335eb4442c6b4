"""Fourier transforms of the array API: NumPy's functions, and the frequencies as sharded arrays."""

from __future__ import annotations

from typing import Any

from numpy.fft import (
    fft,
    fftn,
    fftshift,
    hfft,
    ifft,
    ifftn,
    ifftshift,
    ihfft,
    irfft,
    irfftn,
    rfft,
    rfftn,
)

from dmesh import arrays
from dmesh.array_api._creation import Device, layout_of
from dmesh.arrays.dtensor import DTensor


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Device = None) -> DTensor:
    """Return the frequencies of `fft`, in cycles per unit of the distance between samples.

    Args:
        n: Number of samples.
        d: Distance between samples.
        dtype: Type of the frequencies; None for float64.
        device: Mesh or layout; see `dmesh.array_api.zeros`.
    """
    half = (n - 1) // 2 + 1
    return arrays.from_function(
        lambda i: (i - n * (i >= half)) * (1 / (n * d)),
        n,
        float if dtype is None else dtype,
        layout=layout_of(device, 1),
    )


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Device = None) -> DTensor:
    """Return the frequencies of `rfft`; see `fftfreq`."""
    return arrays.from_function(
        lambda i: i * (1 / (n * d)),
        n // 2 + 1,
        float if dtype is None else dtype,
        layout=layout_of(device, 1),
    )


__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]
