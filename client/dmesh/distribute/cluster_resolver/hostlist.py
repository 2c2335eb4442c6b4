"""Slurm's compressed host lists, such as `node[01-03,7],gpu-[1-2]-x`, and counts, such as `2(x3),1`."""

from __future__ import annotations

import itertools
import re

from dmesh.config.addresses import shown
from dmesh.errors import ConfigurationError

MOST_HOSTS = 65_536
"""Maximum number of hosts of a list; Slurm's limit for one range."""

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]*", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def expand_hostlist(hostlist: str) -> list[str]:
    """Expand a host list into its hosts, in order, as `scontrol show hostnames` does.

    Brackets have numbers and ranges. Numbers are padded with zeros to the width of the first number of the
    range: `n[08-10]` is n08, n09 and n10. A name may have several brackets; the last one varies fastest.

    Args:
        hostlist: The list.

    Returns:
        The hosts, with duplicates.

    Raises:
        ConfigurationError: The host list is malformed, or has more than `MOST_HOSTS` hosts.
    """
    hosts: list[str] = []
    for name in _split(hostlist):
        parts = [_expand_part(part, hostlist) for part in _parts(name, hostlist)]
        count = len(hosts)
        for choices in parts:  # count before expanding
            count = len(hosts) + max(count - len(hosts), 1) * len(choices)
            _check_count(count, hostlist)
        hosts += map("".join, itertools.product(*parts))
    return hosts


def expand_tasks_per_node(counts: str) -> list[int]:
    """Expand task counts such as `2(x3),1` into one number per node.

    Args:
        counts: Counts in the format of `SLURM_STEP_TASKS_PER_NODE`.

    Returns:
        For `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ConfigurationError: The counts are malformed, or for more than `MOST_HOSTS` nodes.
    """
    expanded: list[int] = []
    for part in counts.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                f"invalid counts of tasks {shown(counts)}: cannot parse {shown(part)}; expected numbers, "
                "each optionally with repetitions, as in 2(x3),1"
            )
        repetitions = 1 if match[2] is None else int(match[2])
        _check_count(len(expanded) + repetitions, counts)
        expanded += [int(match[1])] * repetitions
    return expanded


def _split(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    names, depth, start = [], 0, 0
    for position, character in enumerate(hostlist):
        if character == "[":
            depth += 1
            if depth > 1:
                raise _invalid(hostlist, f"a bracket within a bracket, at character {position + 1}")
        elif character == "]":
            depth -= 1
            if depth < 0:
                raise _invalid(
                    hostlist, f"a closing bracket without an opening one, at character {position + 1}"
                )
        elif character == "," and not depth:
            names.append(hostlist[start:position].strip())
            start = position + 1
    if depth:
        raise _invalid(hostlist, "a bracket is not closed")
    names.append(hostlist[start:].strip())
    if not all(names):
        raise _invalid(hostlist, "a name is empty; remove the extra comma")
    return names


def _parts(name: str, hostlist: str) -> list[str]:
    """Split a name into text and the contents of brackets, alternately."""
    parts = re.split(r"[\[\]]", name)
    for plain in parts[::2]:
        if not _PLAIN.fullmatch(plain):
            raise _invalid(hostlist, f"{shown(plain)} cannot be in a host name")
    return [part if index % 2 == 0 else f"[{part}" for index, part in enumerate(parts)]


def _expand_part(part: str, hostlist: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    choices: list[str] = []
    for item in part[1:].split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _invalid(
                hostlist,
                f"cannot parse {shown(item)} within brackets; expected a number, or a range such as 01-12",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _invalid(hostlist, f"the range {item.strip()} is descending")
        _check_count(len(choices) + last - first + 1, hostlist)
        choices += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return choices


def _check_count(count: int, text: str) -> None:
    if count > MOST_HOSTS:
        raise _invalid(text, f"it has more than {MOST_HOSTS} hosts")


def _invalid(hostlist: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"invalid host list {shown(hostlist)}: {problem}. A host list looks like node[01-03,7],gpu-[1-2]-x"
    )
