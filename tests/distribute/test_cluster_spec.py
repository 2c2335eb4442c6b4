"""`ClusterSpec`: what makes one, what it answers, what it refuses."""

import numpy as np
import pytest

from dmesh.errors import ArgumentTypeError, ClusterSpecError
from dmesh.train import ClusterSpec
from dmesh.train.cluster_spec import MOST_TASKS

WORKERS = ["w0:1", "w1:1", "w2:1"]


def test_lists_number_their_tasks():
    spec = ClusterSpec({"worker": WORKERS, "ps": ("p0:2",)})
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("worker") == [0, 1, 2]
    assert spec.task_address("worker", 2) == spec.task_address("worker", np.int64(2)) == "w2:1"
    assert spec.job_tasks("ps") == ["p0:2"]
    assert spec.as_dict() == {"worker": WORKERS, "ps": ["p0:2"]}
    assert ClusterSpec(spec.as_dict()) == spec


def test_a_dict_may_leave_tasks_out():
    spec = ClusterSpec({"worker": {3: "w3:1", "1": b"w1:1"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "w1:1", None, "w3:1"]
    assert spec.as_dict() == {"worker": {1: "w1:1", 3: "w3:1"}}
    assert ClusterSpec(spec.as_dict()) == spec


def test_a_dict_that_leaves_none_out_is_a_list():
    assert ClusterSpec({"worker": {1: "w1:1", 0: "w0:1"}}).as_dict() == {"worker": ["w0:1", "w1:1"]}


def test_a_job_without_tasks():
    spec = ClusterSpec({"worker": []})
    assert spec
    assert spec.as_dict() == {"worker": {}}
    assert spec.job_tasks("worker") == []
    assert spec.num_tasks("worker") == 0


def test_another_spec_is_copied():
    source = {"worker": list(WORKERS)}
    spec = ClusterSpec(source)
    copy = ClusterSpec(spec)
    source["worker"].append("w3:1")
    spec.as_dict()["worker"].append("w3:1")
    assert copy == spec == {"worker": WORKERS}


def test_equality_and_truth():
    assert not ClusterSpec({})
    assert ClusterSpec({}) == {}
    spec = ClusterSpec({"worker": ["w0:1"]})
    assert spec == {"worker": {0: "w0:1"}} == spec
    assert spec != ClusterSpec({"worker": ["w0:2"]})
    assert spec != {"worker": 5}
    assert spec != "worker"
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)
    assert repr(spec) == "ClusterSpec({'worker': ['w0:1']})"


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (["w0:1"], ArgumentTypeError, "a cluster must be a dict.*got list"),
        (None, ArgumentTypeError, "got NoneType"),
        ({"worker": "w0:1"}, ArgumentTypeError, "tasks of job 'worker' must be a list.*got str"),
        ({"worker": 5}, ArgumentTypeError, "got int"),
        (
            {"worker": ["w0:1", 7]},
            ArgumentTypeError,
            "address of task 1 of job 'worker' must be a str, got 7",
        ),
        ({"worker": [b"\xff"]}, ArgumentTypeError, "not UTF-8"),
        ({5: ["w0:1"]}, ArgumentTypeError, "the job name 5 must be a str"),
        ({"worker": {"first": "w0:1"}}, ClusterSpecError, "'first' is not a task index"),
        ({"worker": {-1: "w0:1"}}, ClusterSpecError, "-1 is not a task index"),
        ({"worker": {1.0: "w0:1"}}, ClusterSpecError, "1.0 is not a task index"),
        ({"worker": {True: "w0:1"}}, ClusterSpecError, "True is not a task index"),
        ({"worker": {MOST_TASKS: "w0:1"}}, ClusterSpecError, "expected an integer from 0 to 999999"),
        ({"worker": {0: "w0:1", "0": "w0:2"}}, ClusterSpecError, "task 0 of job 'worker' is there twice"),
    ],
)
def test_what_is_no_cluster(cluster, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_unknown_jobs(ask):
    with pytest.raises(ValueError, match=r"no job 'ps' in the cluster; its jobs are: 'worker'"):
        getattr(ClusterSpec({"worker": WORKERS}), ask)("ps")


def test_unknown_tasks():
    spec = ClusterSpec({"worker": WORKERS})
    with pytest.raises(ValueError, match="no job 'ps'"):
        spec.task_address("ps", 0)
    with pytest.raises(ValueError, match="job 'worker' has no task 3; its tasks are: 0, 1, 2"):
        spec.task_address("worker", 3)
    with pytest.raises(ClusterSpecError, match="no task -1"):
        spec.task_address("worker", -1)
