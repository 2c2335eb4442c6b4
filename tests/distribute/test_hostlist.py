"""Slurm's host lists and task counts, by the rules that scontrol documents."""

import itertools
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.distribute.cluster_resolver.hostlist import MOST_HOSTS, expand_hostlist, expand_tasks_per_node
from dmesh.errors import ConfigurationError

PLAIN = st.text("abcxyz019._-", max_size=4)


@st.composite
def brackets(draw):
    """Returns the text of a bracket, and what it stands for, made by counting up on paper."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        width = draw(st.integers(1, 4))
        written = str(first).rjust(width, "0")
        count = draw(st.integers(1, 12))
        last = str(first + count - 1)
        texts.append(written if count == 1 else f"{written}-{last.rjust(len(written), '0')}")
        numbers += [str(first + step).rjust(len(written), "0") for step in range(count)]
    return f"[{','.join(texts)}]", numbers


@st.composite
def names(draw):
    """Returns the text of a name with any number of brackets, and the hosts that it stands for."""
    text, choices = "n" + draw(PLAIN), []
    choices.append([text])
    for _ in range(draw(st.integers(0, 2))):
        bracket, numbers = draw(brackets())
        tail = draw(PLAIN)
        text += bracket + tail
        choices += [numbers, [tail]]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(names(), min_size=1, max_size=4))
def test_every_list_stands_for_its_hosts_in_order(listed):
    text = ",".join(part for part, _ in listed)
    assert expand_hostlist(text) == [host for _, hosts in listed for host in hosts]


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 5)), min_size=1, max_size=6))
def test_every_count_is_repeated(groups):
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in groups)
    assert expand_tasks_per_node(text) == [count for count, times in groups for _ in range(times)]


@given(st.text("n019[],-x() ", max_size=24))
def test_any_text_is_hosts_or_an_error(text):
    """Nothing else comes out, and every host is a name without brackets and commas."""
    try:
        hosts = expand_hostlist(text)
    except ConfigurationError:
        return
    assert hosts
    assert not any(set(host) & set("[], ") or not host for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node", ["node"]),
        ("node[01-03,7],gpu-[1-2]-x", ["node01", "node02", "node03", "node7", "gpu-1-x", "gpu-2-x"]),
        ("n[1-2],m5,o[3-4,6]", ["n1", "n2", "m5", "o3", "o4", "o6"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[7]", ["n7"]),
        ("n[007]", ["n007"]),
        ("rack[0-1]-node[1-2]", ["rack0-node1", "rack0-node2", "rack1-node1", "rack1-node2"]),
        ("[1-2]n", ["1n", "2n"]),
        ("a[1-2][3-4]", ["a13", "a14", "a23", "a24"]),
        ("b2,a1", ["b2", "a1"]),
        ("node1-5", ["node1-5"]),
        ("host.example.com,10.0.0.[1-2]", ["host.example.com", "10.0.0.1", "10.0.0.2"]),
        (" a , b[1] ", ["a", "b1"]),
        ("a,a", ["a", "a"]),
    ],
)
def test_examples(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a name is empty"),
        ("a,,b", "a name is empty; remove the extra comma"),
        ("a,", "a name is empty"),
        ("n[1-2", "a bracket is not closed"),
        ("n1-2]", "closing bracket without an opening one, at character 5"),
        ("n[1-[2]]", "bracket within a bracket, at character 5"),
        ("n[]", "cannot parse '' within brackets"),
        ("n[1,]", "cannot parse '' within brackets"),
        ("n[a-b]", "cannot parse 'a-b'"),
        ("n[1-2-3]", "cannot parse '1-2-3'"),
        ("n[-1]", "cannot parse '-1'"),
        ("n[3-1]", "the range 3-1 is descending"),
        ("n o", "'n o' cannot be in a host name"),
        ("n/x", "cannot be in a host name"),
        ("n\u0661", "cannot be in a host name"),
        ("n[\u0661]", "cannot parse"),
        (f"n[0-{MOST_HOSTS}]", f"more than {MOST_HOSTS} hosts"),
        ("n[0-999999999999999999]", f"more than {MOST_HOSTS} hosts"),
        ("n[0-60000][0-60000][0-60000]", f"more than {MOST_HOSTS} hosts"),
        ("n[0-60000],m[0-60000]", f"more than {MOST_HOSTS} hosts"),
    ],
)
def test_what_is_no_list(text, problem):
    with pytest.raises(ValueError, match="invalid host list") as caught:
        expand_hostlist(text)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_largest_list():
    assert len(expand_hostlist(f"n[1-{MOST_HOSTS}]")) == MOST_HOSTS


@pytest.mark.parametrize(
    ("text", "counts"), [("3(x2),2,1", [3, 3, 2, 1]), ("4", [4]), ("1(x1)", [1]), ("2, 1", [2, 1])]
)
def test_counts(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "2(x3", "-1", "2,,1", "1.5", "2(x99999999999)"])
def test_what_are_no_counts(text):
    with pytest.raises(ConfigurationError, match="invalid counts of tasks"):
        expand_tasks_per_node(text)


def test_too_many_counts():
    with pytest.raises(ConfigurationError, match="more than"):
        expand_tasks_per_node(f"1(x{MOST_HOSTS + 1})")


def scontrol(text):
    """Asks Slurm itself."""
    return subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True)


@pytest.fixture(scope="module")
def slurm():
    """Skips where there is no Slurm, or none that is configured."""
    if shutil.which("scontrol") is None or scontrol("n[1-2]").stdout.split() != ["n1", "n2"]:
        pytest.skip("there is no working scontrol")


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
@given(st.lists(names().filter(lambda name: "]" not in name[0] or name[0].endswith("]")), min_size=1))
def test_scontrol_says_the_same(listed):
    """Of text behind a name's last bracket, not all of its versions know what to make."""
    text = ",".join(part for part, _ in listed)
    assert scontrol(text).stdout.split() == expand_hostlist(text)
