"""The table of docs/choosing-a-backend.md is what the classes of backends say."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from tests.repo.capabilities import BACKENDS, table
from tests.repo.documents import ROOT

from dmesh.collectives import backends
from dmesh.collectives.backends.base import Backend


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "choosing-a-backend.md").read_text()
    section = page.partition("\n## Capabilities\n")[2].partition("\n## ")[0]
    assert table() in section, f"put this into `## Capabilities` of docs/choosing-a-backend.md:\n{table()}"


def test_the_table_has_all_backends():
    for module in pkgutil.walk_packages(backends.__path__, f"{backends.__name__}."):
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(found, Backend) and hasattr(found, "capabilities"):
                assert found in BACKENDS, f"{found.__name__} is missing in tests/repo/capabilities.py"
