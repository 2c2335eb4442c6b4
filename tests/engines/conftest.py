"""Fixtures of tests with engines: the programs are those of tests/launch."""

from __future__ import annotations

from tests.launch.conftest import script, start

__all__ = ["script", "start"]
