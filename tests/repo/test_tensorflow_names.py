"""Every public name of TensorFlow's that dmesh could have is there, or the page says why it is not."""

import importlib
import json
import re
from functools import reduce

from tests.repo.documents import ROOT

NAMES: dict[str, list[str]] = json.loads((ROOT / "tests" / "repo" / "tensorflow_names.json").read_text())[
    "names"
]
PAGE = ROOT / "docs" / "differences-from-tensorflow.md"


def found(place: str) -> object | None:
    """Returns dmesh's module or class of that name in TensorFlow, if there is one."""
    parts = place.removeprefix("tf.").removeprefix("experimental.dtensor").split(".")
    try:
        return reduce(getattr, filter(None, parts), importlib.import_module("dmesh"))
    except AttributeError:
        return None


def absent() -> set[str]:
    """Returns TensorFlow's names that dmesh does not have."""
    return {
        f"{place}.{name}"
        for place, names in NAMES.items()
        for name in names
        if not hasattr(found(place), name)
    }


def listed() -> dict[str, str]:
    """Returns the reasons that the page gives, by name."""
    section = PAGE.read_text().partition("\n## Names that are not there\n")[2].partition("\n## ")[0]
    reasons: dict[str, str] = {}
    for row in re.findall(r"^\| (`tf\..*) \|$", section, re.M):
        places, names, reason = row.split(" | ")
        for place in re.findall(r"`([^`]+)`", places):
            for name in re.findall(r"`([^`]+)`", names):
                assert f"{place}.{name}" not in reasons, f"{place}.{name} is listed twice"
                reasons[f"{place}.{name}"] = reason
    return reasons


def test_what_is_absent_is_on_the_page_with_a_reason():
    missing = sorted(absent() - listed().keys())
    assert not missing, f"add these to '## Names that are not there' in {PAGE.name}: {missing}"
    assert all(listed().values())


def test_what_is_on_the_page_is_absent():
    stale = sorted(listed().keys() - absent())
    assert not stale, f"dmesh has these, or TensorFlow does not; take them off {PAGE.name}: {stale}"
