"""The page about what there is says what there is."""

import numpy as np
import pytest
from tests.array import coverage_page

from dmesh.arrays.dispatch.registry import REFUSED


@pytest.mark.skipif(not np.__version__.startswith("2.4."), reason="the page is about NumPy 2.4")
def test_the_page_is_current():
    assert coverage_page.PAGE.read_text() == coverage_page.page(), "run `python -m tests.array.coverage_page`"


def test_reasons_are_of_functions_that_are_refused():
    table = coverage_page.functions()
    known = {name: why for name, why in REFUSED.items() if name in table}
    assert all(table[name][0] == "refused" for name in known)
    assert len(known) > 20
