"""Backends of the data plane: each carries out collectives over one medium.

`register` gives a program's groups a backend of its own; docs/backends.md says how to write one, and
`dmesh.testing.backends` has the tests that it must pass.
"""

from __future__ import annotations

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.registered import Membership, register, unregister
from dmesh.collectives.request import Buffers, Request

__all__ = [
    "Backend",
    "Buffers",
    "Call",
    "Capabilities",
    "Membership",
    "Operation",
    "register",
    "Request",
    "Stream",
    "unregister",
]
