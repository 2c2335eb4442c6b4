"""`SlurmClusterResolver`: the tasks of a step, their jobs, ports and GPUs."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distribute.launches import NO_GPUS, slurm_task

from dmesh.distribute.cluster_resolver import SlurmClusterResolver, slurm
from dmesh.distribute.cluster_resolver.placement import place_tasks
from dmesh.errors import ArgumentTypeError, ClusterSpecError, ConfigurationError, ResolverError
from dmesh.testing.resolvers import ResolverConformance


@pytest.fixture
def step(monkeypatch):
    """Returns what makes this process a task of a step."""

    def enter(rank=0, gpus="", **what):
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        for name, value in slurm_task(rank, **what).items():
            monkeypatch.setenv(name, value)

    return enter


class TestConformance(ResolverConformance):
    @pytest.fixture(autouse=True)
    def _step(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.size = 3
        self._enter()

    def _enter(self):
        variables = slurm_task(1, nodes=f"n[1-{self.size}]", tasks=f"1(x{self.size})", num_tasks=self.size)
        for name, value in {**variables, **NO_GPUS}.items():
            self.monkeypatch.setenv(name, value)

    def make_resolver(self):
        return SlurmClusterResolver()

    def expected_cluster(self):
        return {"worker": [f"n{index + 1}:8888" for index in range(self.size)]}

    def change_cluster(self):
        self.size = 2
        self._enter()


def test_all_tasks_are_workers(step):
    step(1)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
    assert (resolver.task_type, resolver.task_id) == resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "grpc://t02n41:8888"
    assert resolver.master("worker", 2) == "grpc://t02n43:8888"
    assert resolver.master("worker", 2, rpc_layer="x") == "x://t02n43:8888"
    assert resolver.rpc_layer == "grpc"
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}


def test_several_tasks_share_a_host_and_its_ports(step):
    step(3, nodes="t02n[13,41,43]", tasks="2(x2),1", num_tasks=5, node="t02n41", local=1)
    resolver = SlurmClusterResolver(port_base=9000)
    assert resolver.cluster_spec().job_tasks("worker") == [
        "t02n13:9000", "t02n13:9001", "t02n41:9000", "t02n41:9001", "t02n43:9000",
    ]  # fmt: skip
    assert resolver.get_task_info() == ("worker", 3)


def test_jobs_take_tasks_in_the_order_of_their_names(step):
    step(2)
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1}, rpc_layer=None)
    assert resolver.cluster_spec() == {"ps": ["t02n13:8888"], "worker": ["t02n41:8888", "t02n43:8888"]}
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "t02n43:8888"
    assert resolver.master("ps", 0) == "t02n13:8888"
    with pytest.raises(ClusterSpecError, match="no job 'chief'"):
        resolver.master("chief", 0)


def test_hosts_keep_the_order_in_which_slurm_numbers_them(step):
    step(1, nodes="n9,n10,n2", tasks="1(x3)", node="n10", local=0)
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == ["n9:8888", "n10:8888", "n2:8888"]


def test_every_task_gets_its_share_of_the_gpus(step):
    step(3, gpus="0,1,2,3", nodes="n[1-2]", tasks="2(x2)", num_tasks=4)
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    for _ in range(2):  # what this process sees now does not change what it gets
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_gpus_keep_their_own_names(step):
    step(1, gpus="4,GPU-a,6,7", nodes="n1", tasks="2", num_tasks=2)
    SlurmClusterResolver(gpus_per_task=1).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_gpus_that_are_not_seen_are_numbered(step, monkeypatch):
    step(1, nodes="n1", tasks="2", num_tasks=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(slurm, "detect_gpus", lambda: ())
    resolver = SlurmClusterResolver(gpus_per_node=4, gpus_per_task=2)
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolver.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize("hidden", ["", " ", "-1", "NoDevFiles", "-1,0,1"])
@pytest.mark.parametrize("arguments", [{}, {"gpus_per_task": 1}, {"gpus_per_node": 4, "gpus_per_task": 2}])
def test_gpus_that_are_hidden_stay_hidden(step, monkeypatch, hidden, arguments):
    """`srun` sets the variable where it gives a step GPUs, so the value is of the user's script."""
    step(1, gpus=hidden, nodes="n1", tasks="2", num_tasks=2)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    resolver = SlurmClusterResolver(**arguments)
    assert resolver.num_accelerators() == {}
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == hidden


@pytest.mark.parametrize(("chosen", "count"), [("3", 1), ("3,1", 2), ("0,2,3", 2)])
def test_gpus_that_a_task_has_chosen_itself_are_kept(step, monkeypatch, chosen, count):
    step(1, gpus=chosen, nodes="n1", tasks="2", num_tasks=2)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": count}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


@pytest.fixture
def bound_step(step, monkeypatch):
    """Makes this process one of 4 tasks of `srun --gpus-per-task=1`; each sees its GPU as number 0."""
    step(3, gpus="0", nodes="n1", tasks="4", num_tasks=4, node="n1", local=3)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1,2,3")


@pytest.mark.parametrize(
    "arguments", [{}, {"gpus_per_task": 1}, {"gpus_per_node": 4}, {"gpus_per_node": 4, "gpus_per_task": 1}]
)
def test_a_gpu_that_slurm_has_bound_to_the_task_is_kept(bound_step, arguments):
    resolver = SlurmClusterResolver(**arguments)
    assert resolver.num_accelerators() == {"GPU": 1}
    assert resolver.cluster_spec().num_tasks("worker") == 4
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("SLURM_STEP_GPUS",), ("4,5,6,7",)),
        (("SLURM_JOB_GPUS",), ("4,5,6,7",)),
        (("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"), ("4", "0,1,2,3,4,5,6,7")),
    ],
)
def test_the_gpus_of_a_host_are_what_slurm_says(step, monkeypatch, names, values):
    step(1, gpus="0", nodes="n1", tasks="4", num_tasks=4, node="n1", local=1)
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(name, value)
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 1}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_gpus_for_each_task_on_hosts_of_unequal_size(step, monkeypatch):
    """Slurm's number is of the task's own host, which has fewer tasks than another one."""
    step(4, gpus="0,1", nodes="n[1-2]", tasks="4,2", num_tasks=6, node="n2", local=0)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 1}
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "volta:1,kepler:0")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 1}


def test_unbound_gpus_are_shared_out_as_slurm_counts_them(step, monkeypatch):
    step(1, gpus="0,1,2,3", nodes="n1", tasks="2", num_tasks=2, node="n1", local=1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("asked", ["x", "volta:", "1,,2", "-1"])
def test_malformed_gpus_per_task(step, monkeypatch, asked):
    step()
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", asked)
    with pytest.raises(ConfigurationError, match=f"SLURM_GPUS_PER_TASK is '{asked}'"):
        SlurmClusterResolver()


@pytest.mark.parametrize("arguments", [{"auto_set_gpu": False}, {"gpus_per_task": 0}])
def test_gpus_can_be_left_alone(step, arguments):
    step(0, gpus="0,1", nodes="n1", tasks="1", num_tasks=1)
    SlurmClusterResolver(**arguments).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_fewer_gpus_than_tasks_are_none(step):
    step(0, gpus="0", nodes="n1", tasks="2", num_tasks=2)
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {}
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_tasks_per_node_can_be_given(step):
    step(3, nodes="n[1-2]", tasks="4(x2)", num_tasks=4)
    assert SlurmClusterResolver(tasks_per_node=2).cluster_spec().job_tasks("worker") == [
        "n1:8888", "n1:8889", "n2:8888", "n2:8889",
    ]  # fmt: skip
    given_by_host = SlurmClusterResolver(tasks_per_node={"a": 3, "fd00::2": 1}).cluster_spec()
    assert given_by_host.job_tasks("worker") == ["a:8888", "a:8889", "a:8890", "[fd00::2]:8888"]


def test_a_cyclic_step(step, monkeypatch):
    step(2, nodes="n[1-2]", tasks="2,1", num_tasks=3, node="n1", local=1)
    with pytest.raises(ResolverError, match="task 2 is number 1 on host n1, expected number 0 on n2"):
        SlurmClusterResolver()
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic:block")
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == ["n1:8888", "n2:8888", "n1:8889"]


@pytest.mark.parametrize(
    ("counts", "distribution", "plane", "places"),
    [
        ([2, 1], None, None, [(0, 0), (0, 1), (1, 0)]),
        ([2, 1], "block:cyclic,pack", None, [(0, 0), (0, 1), (1, 0)]),
        ([3, 1, 2], "cyclic", None, [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]),
        ([4, 3], "plane", 2, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2)]),
        ([], None, None, []),
    ],
)
def test_where_tasks_are(counts, distribution, plane, places):
    assert place_tasks(counts, distribution, plane) == places


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.sampled_from(["block", "cyclic", "plane", "cyclic:cyclic"]),
    st.integers(1, 4),
)
def test_every_task_has_a_place_of_its_own(counts, distribution, plane):
    places = place_tasks(counts, distribution, plane)
    assert sorted(places) == [(host, local) for host, count in enumerate(counts) for local in range(count)]
    for host in range(len(counts)):
        locals_ = [local for place, local in places if place == host]
        assert locals_ == sorted(locals_)


def test_a_step_in_planes(step, monkeypatch):
    step(4, nodes="n[9-10]", tasks="4,2", num_tasks=6, node="n9", local=2)
    monkeypatch.setenv("SLURM_DISTRIBUTION", "plane")
    monkeypatch.setenv("SLURM_DIST_PLANESIZE", "2")
    tasks = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert tasks == ["n9:8888", "n9:8889", "n10:8888", "n10:8889", "n9:8890", "n9:8891"]


@pytest.mark.parametrize("distribution", ["spiral", "arbitrary", "plane"])
def test_an_unknown_distribution(step, monkeypatch, distribution):
    step()
    monkeypatch.setenv("SLURM_DISTRIBUTION", distribution)
    with pytest.raises(ResolverError, match=f"SLURM_DISTRIBUTION is '{distribution}'"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    "name",
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"],
)
def test_outside_of_a_step(step, monkeypatch, name):
    step()
    monkeypatch.delenv(name)
    with pytest.raises(
        RuntimeError, match=f"{name} is not in the environment.*not running inside a Slurm step"
    ):
        SlurmClusterResolver()


def test_more_gpus_than_a_host_has(step):
    step(0, gpus="0,1", nodes="n1", tasks="2", num_tasks=2)
    with pytest.raises(RuntimeError, match=r"2 tasks with 2 GPUs each need 4 GPUs.*a host has 2"):
        SlurmClusterResolver(gpus_per_task=2)


@pytest.mark.parametrize("jobs", [{"worker": 2}, {"worker": 3, "ps": 1}])
def test_other_numbers_of_tasks_than_were_assigned(step, jobs):
    step()
    with pytest.raises(
        RuntimeError, match=f"have {sum(jobs.values())} tasks, but 3 were assigned: 1 on t02n13"
    ):
        SlurmClusterResolver(jobs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"SLURM_PROCID": "x"}, ConfigurationError, "SLURM_PROCID is 'x'; expected an integer from 0"),
        ({"SLURM_PROCID": "3"}, ResolverError, "SLURM_PROCID is 3, but the step has 3 tasks"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, ConfigurationError, "invalid host list 'n"),
        (
            {"SLURM_STEP_NODELIST": "n1,n1,n2"},
            ConfigurationError,
            "SLURM_STEP_NODELIST has n1 more than once",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "a"}, ConfigurationError, "invalid counts of tasks 'a'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ConfigurationError, "is for 2 hosts.*has 3"),
    ],
)
def test_malformed_variables(step, monkeypatch, change, error, message):
    step()
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"jobs": ["worker"]}, ArgumentTypeError, "jobs must be a dict"),
        ({"jobs": {"worker": "3"}}, ArgumentTypeError, r"jobs\['worker'\] must be an int, got '3'"),
        ({"jobs": {"worker": True}}, ArgumentTypeError, "must be an int, got True"),
        ({"jobs": {"worker": -3}}, ConfigurationError, "is -3; expected a number from 0"),
        ({"tasks_per_node": "2"}, ArgumentTypeError, "tasks_per_node must be an int"),
        ({"tasks_per_node": {"n1": None}}, ArgumentTypeError, "must be an int, got None"),
        ({"gpus_per_node": -1}, ConfigurationError, "gpus_per_node is -1"),
        ({"gpus_per_task": 1.5}, ArgumentTypeError, "gpus_per_task must be an int"),
        ({"port_base": 0}, ConfigurationError, "port_base is 0; expected the first of 1 free ports"),
        ({"port_base": 65_536}, ConfigurationError, "port_base is 65536"),
        ({"port_base": "8888"}, ConfigurationError, "port_base is '8888'"),
    ],
)
def test_what_it_cannot_be_told(step, arguments, error, message):
    step()
    with pytest.raises(error, match=message):
        SlurmClusterResolver(**arguments)


def test_a_step_has_changed_under_it(step):
    step()
    resolver = SlurmClusterResolver({"worker": 3})
    step(nodes="n[1-2]", tasks="1(x2)", num_tasks=2)
    with pytest.raises(ResolverError, match="3 tasks, but 2 were assigned"):
        resolver.cluster_spec()
