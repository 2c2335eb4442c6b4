"""Which cluster a process belongs to: argument, `DTENSOR_JOBS`, launcher; and who is left alone."""

import logging
import socket

import pytest
from tests.distribute.launches import (
    NO_GPUS,
    allocation_shell,
    batch_script,
    open_mpi,
    slurm_task,
    tf_config,
    torchrun,
)

import dmesh
from dmesh.config import launchers
from dmesh.config.launchers import LAUNCHERS, detect, find_cluster, load_settings
from dmesh.distribute.cluster_resolver import ClusterResolver, SimpleClusterResolver, SlurmClusterResolver
from dmesh.errors import AddressInUseError, ArgumentTypeError, ConfigurationError, ResolverError
from dmesh.testing import FakeCluster
from dmesh.train import ClusterSpec

WORKERS = {"worker": ["w0:1", "w1:1"]}
LED, ALL = {**WORKERS, "chief": ["c:1"]}, ["c", "w0", "w1"]
STEP = slurm_task(1, nodes="n[1-2]", tasks="2,1", num_tasks=3, node="n1", local=1)


@pytest.fixture
def environ(monkeypatch):
    def put(*variables, **more):
        for name, value in {
            **NO_GPUS,
            **{k: v for part in variables for k, v in part.items()},
            **more,
        }.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    "variables",
    [
        {},
        batch_script(),
        allocation_shell(),
        slurm_task(nodes="n1", tasks="1", num_tasks=1),
        open_mpi(0, 1),
        torchrun(0, 1),
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": tf_config({"worker": ["w0:1"]}, {"type": "worker", "index": 0})},
        {"TF_CONFIG": tf_config(WORKERS)},
        {"TF_CONFIG": tf_config({**WORKERS, "ps": ["p:1"]}, {"type": "ps", "index": 0})},
        {"TF_CONFIG": tf_config({**WORKERS, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0})},
        {**STEP, "DMESH_LAUNCHER": "none"},
        {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_who_is_alone_is_left_alone(environ, variables):
    environ(variables)
    assert detect() is None
    assert (dmesh.jobs(), dmesh.num_clients(), dmesh.client_id(), dmesh.job_name()) == ([], 1, 0, "localhost")


@pytest.mark.parametrize(
    ("variables", "client", "hosts"),
    [
        (STEP, 1, ["n1", "n1", "n2"]),
        (open_mpi(1, 2), 1, ["127.0.0.1"] * 2),
        (torchrun(2, 3), 2, ["127.0.0.1"] * 3),
        ({"TF_CONFIG": tf_config(WORKERS, {"type": "worker", "index": 1})}, 1, ["w0", "w1"]),
        ({"TF_CONFIG": tf_config({**LED, "ps": ["p:1"]}, {"type": "worker", "index": 1})}, 2, ALL),
        ({"TF_CONFIG": tf_config({**LED, "evaluator": ["e:1"]}, {"type": "chief", "index": 0})}, 0, ALL),
    ],
)  # fmt: skip
def test_who_was_launched_is_found(environ, caplog, variables, client, hosts):
    caplog.set_level(logging.INFO, "dmesh")
    environ(variables)
    found = detect()
    assert found.client_id == client
    assert [job.rpartition(":")[0] for job in found.jobs] == hosts
    assert found.job_name == "worker"
    assert not caplog.text  # the program may ask again and again
    settings, instead, _ = load_settings(None, None)
    assert f"is set: this is client {client} of {len(hosts)}, started by {found.source}" in caplog.text
    assert settings.jobs == found.jobs
    assert settings.origins["jobs"] == found.source
    assert settings.origins["cluster"] == "default"
    assert instead["DTENSOR_CLIENT_ID"] == str(client)


def test_before_it_is_initialized_the_program_hears_the_same(environ):
    environ(STEP)
    assert dmesh.client_id() == 1
    assert dmesh.num_clients() == 3
    assert dmesh.jobs() == list(detect().jobs)
    assert dmesh.full_job_name() == "worker/replica:0/task:1"
    environ({"DTENSOR_JOB_NAME": "trainer"})
    assert dmesh.job_name() == "trainer"


def test_dtensor_jobs_come_before_launchers(environ):
    environ(STEP, DTENSOR_JOBS="a:1,b:1", DTENSOR_CLIENT_ID="0")
    assert detect() is None
    assert dmesh.jobs() == ["a:1", "b:1"]
    settings, instead, _ = load_settings(None, None)
    assert settings.jobs == ("a:1", "b:1")
    assert settings.origins["jobs"] == "environment variable DTENSOR_JOBS"
    assert instead == {}


def test_inner_launchers_come_before_outer_ones(environ, monkeypatch):
    """mpirun and torchrun are started as tasks of a Slurm step, and their children see its variables."""
    environ(STEP, open_mpi(1, 2), torchrun(3, 4))
    assert detect().source == "torchrun"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert detect().source == "Open MPI's mpirun"
    environ({"DMESH_LAUNCHER": "SLURM"})
    assert detect().source == "a Slurm step"
    environ({"DMESH_LAUNCHER": "torchelastic"})  # also where it did not set the sign of it
    assert detect().client_id == 3


def test_tf_config_comes_before_the_step_in_which_it_was_set(environ):
    """Who makes it in each task, from the variables of Slurm, gives tasks roles that Slurm does not know."""
    cluster = {"chief": ["c:1"], "worker": ["w0:1"], "evaluator": ["e:1"]}
    environ(STEP, TF_CONFIG=tf_config(cluster, {"type": "worker", "index": 0}))
    assert (detect().source, detect().jobs) == ("TF_CONFIG", ("c:1", "w0:1"))
    environ(DMESH_LAUNCHER="slurm")
    assert detect().source == "a Slurm step"


@pytest.mark.parametrize("job", ["ps", "evaluator", "coordinator"])
def test_who_stands_aside_in_tf_config_is_no_client_of_an_outer_launch_either(environ, job):
    """The others wait for each other, and not for it."""
    environ(STEP, TF_CONFIG=tf_config({**WORKERS, job: ["x:1"]}, {"type": job, "index": 0}))
    assert detect() is None
    assert dmesh.num_clients() == 1
    environ(DMESH_LAUNCHER="tfconfig")
    with pytest.raises(ConfigurationError, match="TF_CONFIG did not start this process as one of several"):
        detect()


def test_tf_config_without_a_cluster_says_nothing(environ):
    environ(STEP, TF_CONFIG='{"environment": "cloud"}')
    assert detect().source == "a Slurm step"


def test_a_launcher_that_is_not_there(environ):
    environ({"DMESH_LAUNCHER": "k8"})
    with pytest.raises(
        ConfigurationError, match=r"DMESH_LAUNCHER is 'k8'; expected .*: auto, none or one of torchelastic"
    ):
        detect()
    environ({"DMESH_LAUNCHER": "slurm"})
    with pytest.raises(ConfigurationError, match="a Slurm step did not start this process as one of several"):
        detect()
    with pytest.raises(ConfigurationError, match="DMESH_LAUNCHER is slurm"):
        dmesh.num_clients()


def test_a_broken_launch_says_how_to_get_out(environ, monkeypatch):
    environ(STEP)
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(
        ResolverError, match=r"NODELIST is not.*because SLURM_STEP_NUM_TASKS is set; set DMESH_L"
    ):
        detect()
    environ({"TF_CONFIG": "{"}, DMESH_LAUNCHER="tfconfig")
    with pytest.raises(ConfigurationError, match="because DMESH_LAUNCHER is tfconfig"):
        detect()


def test_every_launcher_has_a_resolver():
    for name in LAUNCHERS:
        module = __import__(f"dmesh.distribute.cluster_resolver.{name}", fromlist=["detected"])
        assert callable(module.detected)


def test_steps_have_ports_of_their_own(environ):
    bases = set()
    for job in range(1, 6):
        environ(slurm_task(0, nodes="n1", tasks="2", num_tasks=2, job=job))
        bases.add(detect().jobs[0])
    assert len(bases) > 3
    environ(DMESH_PORT_BASE="4000")
    assert detect().jobs == ("n1:4000", "n1:4001")


# A resolver that the program gives --------------------------------------------------------------------------


def simple(cluster, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), **more)


def test_a_resolver_comes_before_everything(environ, caplog):
    caplog.set_level(logging.INFO, "dmesh")
    environ(STEP, DTENSOR_JOBS="a:1,b:1", DTENSOR_JOB_NAME="other")
    settings, instead, _ = load_settings(simple(WORKERS, task_type="worker", task_id=1), None)
    assert (settings.jobs, settings.client_id, settings.job_name) == (("w0:1", "w1:1"), 1, "worker")
    assert settings.origins["client_id"] == "SimpleClusterResolver"
    assert instead == {"DTENSOR_JOBS": "w0:1,w1:1", "DTENSOR_CLIENT_ID": "1", "DTENSOR_JOB_NAME": "worker"}
    assert "according to SimpleClusterResolver, this is client 1 of 2; DTENSOR_JOBS is ignored" in caplog.text


def test_a_resolver_of_nothing_is_local_mode(environ):
    environ(DTENSOR_JOBS="a:1,b:1", DTENSOR_CLIENT_ID="1")
    settings, instead, _ = load_settings(simple({}), None)
    assert not settings.multi_client
    dmesh.initialize_accelerator_system("CPU", cluster_resolver=simple({}))
    try:
        assert (dmesh.jobs(), dmesh.client_id(), dmesh.job_name()) == ([], 0, "localhost")
    finally:
        dmesh.shutdown_accelerator_system()
    assert dmesh.jobs() == ["a:1", "b:1"]
    assert instead == {"DTENSOR_JOBS": "", "DTENSOR_CLIENT_ID": ""}


def test_dtensor_client_id_helps_a_resolver_that_does_not_know(environ):
    environ(DTENSOR_CLIENT_ID="1")
    assert find_cluster(simple(WORKERS)).client_id == 1
    assert find_cluster(simple(WORKERS, task_id=0)).client_id == 0
    environ(DTENSOR_CLIENT_ID="")
    assert find_cluster(simple({"worker": ["w0:1"]})).client_id == 0


@pytest.mark.parametrize(
    ("resolver", "message"),
    [
        (simple(WORKERS), "SimpleClusterResolver does not determine which of the 2 clients this process is"),
        (
            simple(WORKERS, task_id=2),
            "SimpleClusterResolver, this process is task 2 of 2; expected an integer from 0 to 1",
        ),
        (simple(WORKERS, task_id=-1), "task -1 of 2"),
        (simple(WORKERS, task_id=True), "task True of 2"),
        (
            simple({**WORKERS, "ps": ["p:1"]}, task_type="ps", task_id=0),
            "a task of job 'ps', but only tasks of 'worker' are clients",
        ),
        (
            simple({"a": ["a:1"], "b": ["b:1"]}, task_id=0),
            "has the jobs 'a', 'b', but clients must be tasks of one job",
        ),
        (simple({"worker": {0: "a:1", 2: "c:1"}}, task_id=0), "has no address of task 1 of job 'worker'"),
        (
            simple({"worker": ["w0", "w1:1"]}, task_id=0),
            "it has no port.*The value comes from SimpleClusterResolver",
        ),
        (
            simple({"worker": ["w0:1", "w0:1"]}, task_id=0),
            "more than once.*The value comes from SimpleClusterResolver",
        ),
        (
            simple({"a b": ["w0:1", "w1:1"]}, task_id=0),
            "DTENSOR_JOB_NAME is 'a b'.*from SimpleClusterResolver",
        ),
    ],
)
def test_what_is_no_cluster_of_clients(resolver, message):
    with pytest.raises(ConfigurationError, match=message):
        load_settings(resolver, None)
    with pytest.raises(ConfigurationError, match=message):
        dmesh.initialize_accelerator_system("CPU", cluster_resolver=resolver)
    assert dmesh.runtime.context.current_or_none() is None


def test_what_is_no_resolver(environ):
    for wrong in (ClusterSpec(WORKERS), "slurm", SlurmClusterResolver):
        with pytest.raises(ArgumentTypeError, match="cluster_resolver must be a"):
            dmesh.initialize_accelerator_system("CPU", cluster_resolver=wrong)
    with FakeCluster(1) as cluster, pytest.raises(ArgumentTypeError):
        cluster.run(lambda: dmesh.initialize_accelerator_system("CPU", cluster_resolver="slurm"))


def test_a_single_job_with_another_name_is_the_clients_job():
    found = find_cluster(simple({"ps": ["p:1", "q:1"]}, task_id=1))
    assert (found.jobs, found.job_name) == (("p:1", "q:1"), "ps")


class Partial(ClusterResolver):
    """Knows rank 0 and itself."""

    def __init__(self, rank, total=3):
        self._task_id, self.total = rank, total

    num_processes = property(lambda self: self.total)

    def cluster_spec(self):
        return ClusterSpec({"worker": {0: "h0:9000", self._task_id: f"h{self._task_id}:9000"}})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return "h0:9000"


def test_who_does_not_know_all_addresses_lists_the_same_as_the_others():
    settings = [load_settings(Partial(rank), None)[0] for rank in range(3)]
    assert len({each.jobs for each in settings}) == 1
    assert settings[0].jobs[0] == "h0:9000"
    assert [each.address for each in settings] == ["h0:9000", "h1:9000", "h2:9000"]
    with pytest.raises(
        ConfigurationError,
        match="enable_coordination_service is False, but Partial has no addresses of all clients",
    ):
        dmesh.initialize_accelerator_system("CPU", False, cluster_resolver=Partial(1))


def test_an_address_that_a_launcher_has_guessed_wrongly(environ):
    """mpirun was started elsewhere than rank 0."""
    environ({**open_mpi(0, 2, 0, 1), "OMPI_MCA_orte_hnp_uri": "1.0;tcp://198.51.100.1:5"}, DMESH_INSECURE="1")
    with pytest.raises(
        ConfigurationError, match=r"cannot listen on 198.51.100.1.*from Open MPI's mpirun, which does"
    ):
        dmesh.initialize_accelerator_system("CPU")
    assert dmesh.runtime.context.current_or_none() is None


def test_a_launch_that_has_come_to_the_ports_of_another(environ):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ(open_mpi(0, 2), DMESH_PORT_BASE=str(port), DMESH_INIT_TIMEOUT="5")
        with pytest.raises(AddressInUseError, match=r"from Open MPI's mpirun.*DMESH_PORT_BASE sets others"):
            dmesh.initialize_accelerator_system("CPU")
        environ(DTENSOR_JOBS=f"127.0.0.1:{port},127.0.0.1:1")
        with pytest.raises(AddressInUseError, match=r"of an earlier run, still there\?$"):
            dmesh.initialize_accelerator_system("CPU")


def test_an_address_that_is_right_but_must_be_guarded(environ, tmp_path):
    environ(
        {**open_mpi(0, 2, 0, 1), "OMPI_MCA_orte_hnp_uri": "1.0;tcp://0.0.0.0:5"},
        XDG_CONFIG_HOME=str(tmp_path),  # without a token file that somebody has made
        DMESH_INIT_TIMEOUT="5",
    )
    with pytest.raises(ConfigurationError, match="without a token") as caught:
        dmesh.initialize_accelerator_system("CPU")
    assert "know for certain" not in str(caught.value)


def test_a_fake_cluster_needs_no_resolver(environ):
    environ(STEP)
    with FakeCluster(2) as cluster:
        assert cluster.run(lambda: (dmesh.initialize_accelerator_system("CPU"), dmesh.client_id())) == [
            ("CPU", 0), ("CPU", 1),
        ]  # fmt: skip
    assert launchers.detect().client_id == 1
