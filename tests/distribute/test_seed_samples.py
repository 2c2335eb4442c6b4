"""TensorFlow's pages, of which this package has the names: their code runs, and their signatures hold."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
from tests.distribute import seed_samples
from tests.e2e.clients import Process, free_ports

import dmesh
from dmesh.distribute.cluster_resolver import TPUClusterResolver
from dmesh.testing.cloud import FakeMetadataServer

NOT_IN_A_CLOUD = {"NO_GCE_CHECK": "true"}
V2 = {"TPU_ACCELERATOR_TYPE": "v2-8", **NOT_IN_A_CLOUD}
SHUTDOWN = "dmesh.tpu.experimental.shutdown_tpu_system()"


@pytest.fixture
def folder(tmp_path):
    seed_samples.write_files(tmp_path)
    return tmp_path


def run(program, environments):
    """Runs a program as clients, each with its environment; all must say that they are done."""
    with contextlib.ExitStack() as stack:
        processes = []
        for environ in environments:
            processes.append(Process([sys.executable, "-c", program], environ))
            stack.callback(processes[-1].end)
        for client, process in enumerate(processes):
            assert process.wait() == 0, process.err
            assert process.out == f"client {client} of {len(environments)}: all samples ran"


@pytest.mark.parametrize(
    "environ",
    [
        V2,
        {**V2, "TPU_NAME": "local"},
        {**V2, "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "TPU_TOPOLOGY": "2x2x1"},
        {**V2, "DMESH_NUM_CPU_DEVICES": "1"},
    ],
    ids=["type", "local", "pod", "few CPU devices"],
)
def test_the_samples_run_on_a_tpu_of_this_machine(environ, folder) -> None:
    run(seed_samples.program(seed_samples.ON_A_TPU, folder, SHUTDOWN), [environ])


def test_the_samples_run_on_a_tpu_vm(folder) -> None:
    """Its metadata server is all that knows of the TPU."""
    with FakeMetadataServer() as metadata:
        metadata.be_tpu_vm("v2-8", ["10.0.0.2"])
        environ = {"GCE_METADATA_HOST": metadata.address, "NO_GCE_CHECK": ""}
        run(seed_samples.program(seed_samples.ON_A_TPU, folder, SHUTDOWN), [environ])


HOSTS = {
    "launched": lambda hosts: {"DTENSOR_JOBS": hosts},
    "endpoints": lambda hosts: {
        "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": f"grpc://{hosts.replace(',', ',grpc://')}"
    },
    "host names": lambda hosts: {"TPU_WORKER_HOSTNAMES": hosts},
}
"""The variables that say where the clients are, by who sets them."""


@pytest.mark.parametrize("which", HOSTS)
def test_the_samples_run_on_the_hosts_of_a_tpu(which, folder) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    of_each = {
        **V2,
        **HOSTS[which](hosts),
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1",
        "TPU_HOST_BOUNDS": "1,2,1",
    }
    environments = [{**of_each, "TPU_WORKER_ID": str(client)} for client in range(2)]
    if which == "launched":
        environments = [{**of_each, "DTENSOR_CLIENT_ID": str(client)} for client in range(2)]
    run(seed_samples.program(seed_samples.ON_A_TPU, folder, SHUTDOWN), environments)


def test_the_call_of_the_page_on_initialization(folder) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    environments = [{**V2, "DTENSOR_JOBS": hosts, "DTENSOR_CLIENT_ID": str(client)} for client in range(2)]
    run(seed_samples.program([seed_samples.INITIALIZATION], folder), environments)


@pytest.mark.parametrize(
    ("jobs", "hosts"),
    [
        ("localhost:10000,localhost:10001,localhost:10002,localhost:10003", 1),
        ("host1:10000,host1:10001,host2:10000,host2:10003", 2),
    ],
)
def test_lists_of_clients(jobs, hosts, monkeypatch) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", jobs)
    assert dmesh.num_clients() == 4
    assert dmesh.client_id() == 0
    assert dmesh.job_name() == "worker"
    assert len({job.partition(":")[0] for job in dmesh.jobs()}) == hosts


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            dmesh.initialize_accelerator_system,
            "device_type enable_coordination_service num_logical_cpu_devices experimental_reset_context",
        ),
        (
            TPUClusterResolver,
            (
                "tpu zone project job_name coordinator_name coordinator_address credentials service "
                "discovery_url"
            ),
        ),
        (dmesh.distribute.experimental.TPUStrategy, "tpu_cluster_resolver device_assignment"),
        (
            dmesh.distribute.TPUStrategy,
            "tpu_cluster_resolver experimental_device_assignment experimental_spmd_xla_partitioning",
        ),
        (
            dmesh.distribute.TPUStrategy.experimental_assign_to_logical_device,
            "self tensor logical_device_id",
        ),
        (
            dmesh.distribute.TPUStrategy.experimental_split_to_logical_devices,
            "self tensor partition_dimensions",
        ),
        (dmesh.distribute.TPUStrategy.experimental_replicate_to_logical_devices, "self tensor"),
        (dmesh.distribute.Strategy.experimental_distribute_dataset, "self dataset options"),
        (
            dmesh.distribute.Strategy.experimental_distribute_datasets_from_function,
            "self dataset_fn options",
        ),
        (dmesh.distribute.Strategy.distribute_datasets_from_function, "self dataset_fn options"),
        (dmesh.distribute.Strategy.experimental_distribute_values_from_function, "self value_fn"),
        (dmesh.distribute.Strategy.experimental_local_results, "self value"),
        (dmesh.distribute.Strategy.run, "self fn args kwargs options"),
        (dmesh.distribute.Strategy.reduce, "self reduce_op value axis"),
        (dmesh.distribute.Strategy.gather, "self value axis"),
        (dmesh.distribute.ReplicaContext.all_reduce, "self reduce_op value options"),
        (dmesh.distribute.ReplicaContext.all_gather, "self value axis options"),
        (dmesh.distribute.ReplicaContext.merge_call, "self merge_fn args kwargs"),
        (dmesh.distribute.StrategyExtended.reduce_to, "self reduce_op value destinations options"),
        (
            dmesh.distribute.StrategyExtended.batch_reduce_to,
            "self reduce_op value_destination_pairs options",
        ),
        (dmesh.distribute.StrategyExtended.update, "self var fn args kwargs group"),
    ],
)
def test_positional_arguments_are_those_of_the_pages(function, parameters) -> None:
    positional = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == parameters.split()


def test_aliases() -> None:
    assert dmesh.initialize_multi_client is dmesh.initialize_accelerator_system
    assert dmesh.initialize_tpu_system is dmesh.initialize_accelerator_system
    assert dmesh.data.experimental.AUTOTUNE == dmesh.data.AUTOTUNE
