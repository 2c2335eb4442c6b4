import copy
import socket
import subprocess
import sys
import textwrap
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.e2e.clients import free_ports

import dmesh
from dmesh.config.addresses import split_address
from dmesh.config.launchers import find_cluster
from dmesh.distribute.cluster_resolver import ClusterResolver, SimpleClusterResolver, TPUClusterResolver
from dmesh.distribute.cluster_resolver.gce_metadata import MetadataServer, parse_tpu_env
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.distribute.cluster_resolver.tpu_client import read_endpoints
from dmesh.errors import (
    ArgumentTypeError,
    ClusterLookupDeniedError,
    ClusterLookupError,
    ClusterLookupUnavailableError,
    ClusterNotReadyError,
    ClusterSpecError,
    ConfigurationError,
    MissingExtraError,
    ResolverError,
    TopologyError,
    TpuNotFoundError,
)
from dmesh.testing import FakeCluster
from dmesh.tpu.accelerator import TpuSystem


@pytest.fixture
def resolve(cloud, policy):
    """Makes a resolver with credentials."""

    def make(tpu="my-tpu", **options):
        return TPUClusterResolver(tpu, **{"credentials": cloud.credentials(), "policy": policy} | options)

    return make


# By name ----------------------------------------------------------------------------------------------------


def test_a_name_is_looked_up_at_every_call(cloud, resolve):
    cloud.apis.add_tpu("my-tpu", "v2-32", ["10.0.0.2", "10.0.0.3", "10.0.0.4:9000", "fd00::5"][:3])
    resolver = resolve()
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470", "10.0.0.4:9000"]}
    assert resolver.master() == resolver.get_master() == "grpc://10.0.0.2:8470"
    assert resolver.master("worker", 2) == "grpc://10.0.0.4:9000"
    assert resolver.master("worker", 1, rpc_layer="other") == "other://10.0.0.3:8470"
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.9"])
    assert resolver.cluster_spec() == {"worker": ["10.0.0.9:8470"]}
    with pytest.raises(ClusterSpecError):
        resolver.master("worker", 1)
    assert resolver.environment == ""
    assert resolver.rpc_layer == "grpc"


def test_zone_and_project_are_this_machines_unless_given(cloud, resolve):
    cloud.apis.zone, cloud.apis.project = "europe-west4-a", "other"
    cloud.apis.add_tpu("my-tpu", "v3-8", ["10.0.0.2"])
    with pytest.raises(ClusterLookupError, match="projects/my-project/locations/us-central1-b/nodes/my-tpu"):
        resolve().cluster_spec()
    spec = resolve(zone="europe-west4-a", project="other").cluster_spec()
    assert spec == {"worker": ["10.0.0.2:8470"]}
    full = "projects/other/locations/europe-west4-a/nodes/my-tpu"
    assert resolve(full).cluster_spec() == spec


def test_without_metadata_zone_and_project_must_be_given(cloud, monkeypatch, policy):
    [port] = free_ports(1)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
    quick = MetadataServer(policy)
    options = {"credentials": cloud.credentials(), "policy": policy, "metadata": quick}
    with pytest.raises(ClusterLookupUnavailableError, match=r"the project is not given.*Pass project="):
        TPUClusterResolver("my-tpu", **options)
    with pytest.raises(ClusterLookupUnavailableError, match=rf"the zone .*127.0.0.1:{port}.*Pass zone="):
        TPUClusterResolver("my-tpu", project="p", **options)
    TPUClusterResolver("my-tpu", "z", "p", **options)
    TPUClusterResolver(["my-tpu"], "z", "p", **options)


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("CREATING", "Wait"),
        ("RESTARTING", "Wait"),
        ("REPAIRING", "Wait"),
        ("PREEMPTED", "create a new one"),
        ("TERMINATED", "create a new one"),
        ("STOPPED", "create a new one"),
    ],
)
def test_a_tpu_that_is_not_ready_is_an_error(cloud, resolve, state, advice):
    cloud.apis.add_tpu("my-tpu", "v2-8", [], state=state)
    resolver = resolve()
    with pytest.raises(ClusterNotReadyError, match=rf"my-tpu is not ready; its state is {state}.*{advice}"):
        resolver.cluster_spec()
    with pytest.raises(RuntimeError, match=state):
        resolver.master()
    assert resolver.cloud_tpu_client.state() == state


@pytest.mark.parametrize("health", ["UNHEALTHY_MAINTENANCE", "UNHEALTHY_TENSORFLOW", "TIMEOUT"])
def test_a_tpu_that_is_not_healthy_is_an_error(cloud, resolve, health):
    node = cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"], health=health)
    node["healthDescription"] = "being moved"
    with pytest.raises(ClusterNotReadyError, match=rf"not healthy; its health is {health} \(being moved\)"):
        resolve().cluster_spec()


def test_hosts_as_odd_answers_have_them(cloud, resolve):
    node = cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    node["networkEndpoints"] = [{"ipAddress": "fd00::5"}]
    assert resolve().cluster_spec() == {"worker": ["[fd00::5]:8470"]}
    node["networkEndpoints"] = [{"ipAddress": "10.0.0.2", "port": 1}, {"port": 8470}]
    with pytest.raises(ClusterNotReadyError, match="has no address yet"):
        resolve().cluster_spec()
    node["networkEndpoints"] = [{"ipAddress": "10.0.0.2", "port": "http"}]
    with pytest.raises(ClusterLookupError, match="port is 'http'"):
        resolve().cluster_spec()
    del node["networkEndpoints"]
    node |= {"ipAddress": "10.0.0.7", "port": "8471"}  # version 1 of the API
    del node["health"]
    assert resolve().cluster_spec() == {"worker": ["10.0.0.7:8471"]}


# When the API does not answer as it should ------------------------------------------------------------------


def test_refusals_say_what_to_do(cloud, resolve):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    with pytest.raises(ClusterLookupError, match=r"nodes/nobody.*404.*Check the name, the zone"):
        resolve("nobody").cluster_spec()
    with pytest.raises(ConfigurationError, match=r"the TPU a/b: .*pattern"):
        resolve("a/b").cluster_spec()
    cloud.apis.denied.add("nodes/my-tpu")
    with pytest.raises(ClusterLookupDeniedError, match=r"403 The caller does not have perm.*role") as caught:
        resolve().cluster_spec()
    assert isinstance(caught.value, PermissionError)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    cloud.apis.denied.clear()
    resolver = resolve()
    cloud.apis.token = "another"
    with pytest.raises(ClusterLookupDeniedError, match="credentials") as caught:
        resolver.cluster_spec()
    assert cloud.credentials().token not in str(caught.value)


def test_a_busy_api_is_asked_again_later(cloud, resolve, clock):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    cloud.apis.fail(429, path="nodes/", headers={"Retry-After": "7"})
    cloud.apis.fail(503, 2, path="nodes/")
    cloud.apis.fail(403, path="nodes/", body={"error": {"errors": [{"reason": "rateLimitExceeded"}]}})
    before = clock()
    assert resolve().cluster_spec() == {"worker": ["10.0.0.2:8470"]}
    assert clock() - before >= 7 + 3 * 0.5
    cloud.apis.fail(500, 100, path="nodes/")
    with pytest.raises(ClusterLookupUnavailableError, match=r"it answered 500. Gave up after \d+ attempts"):
        resolve().cluster_spec()


def test_an_api_that_cannot_be_reached(cloud, resolve, policy):
    resolver = resolve()
    cloud.apis.close()
    with pytest.raises(ClusterLookupUnavailableError, match=r"no connection.*refused") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, ConnectionError)


def test_an_api_that_answers_too_slowly(cloud, resolve):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    hurry = LookupPolicy(attempt=0.2, give_up=0.1)
    resolver = TPUClusterResolver("my-tpu", credentials=cloud.credentials(), policy=hurry)
    cloud.apis.hold()
    with pytest.raises(ClusterLookupUnavailableError, match="timed out"):
        resolver.cluster_spec()
    cloud.apis.release()
    assert resolve().cluster_spec()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 200, "body": "<html>"}, "is a str, not an object"),
        ({"status": 200, "body": [1, 2]}, "not an object"),
        ({"status": 200, "body": "x" * 200_000}, "larger than the limit of 100000 bytes"),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, "302"),
        ({"status": 400, "body": {"error": {"message": "no such field"}}}, "400 no such field"),
    ],
)
def test_nonsense_is_refused(cloud, clock, answer, message):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    policy = LookupPolicy(most_bytes=100_000, clock=clock, sleep=clock.advance)
    resolver = TPUClusterResolver("my-tpu", credentials=cloud.credentials(), policy=policy)
    cloud.apis.fail(**answer, path="nodes/")
    with pytest.raises(ClusterLookupError, match=message):
        resolver.cluster_spec()


def test_where_the_api_is_described(cloud, monkeypatch, policy):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    template = cloud.apis.discovery_url
    options = {"credentials": cloud.credentials(), "policy": policy}
    wrong = "http://127.0.0.1:9/{api}/{apiVersion}"
    assert TPUClusterResolver("my-tpu", discovery_url=wrong, **options).cluster_spec()  # environment first
    monkeypatch.delenv("TPU_API_DISCOVERY_URL")
    assert TPUClusterResolver("my-tpu", discovery_url=template, **options).cluster_spec()
    with pytest.raises(ClusterLookupError, match="discovery_url") as caught:
        TPUClusterResolver("my-tpu", discovery_url=template + "/x?key=secret", **options).cluster_spec()
    assert "secret" not in str(caught.value)
    with pytest.raises(ClusterLookupUnavailableError, match="description of the API tpu v2"):
        TPUClusterResolver("my-tpu", discovery_url=wrong, **options).cluster_spec()
    with pytest.raises(ClusterLookupError, match="not an http"):
        TPUClusterResolver("my-tpu", discovery_url="file:///etc/{api}", **options).cluster_spec()


def test_a_service_object_is_used_as_it_is(cloud, policy, monkeypatch):
    from googleapiclient import discovery

    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    service = discovery.build(
        "tpu", "v2", credentials=cloud.credentials(), discoveryServiceUrl=cloud.apis.discovery_url,
        cache_discovery=False,
    )  # fmt: skip
    resolver = TPUClusterResolver("my-tpu", credentials=object(), service=service, policy=policy)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470"]}
    cloud.apis.denied.add("nodes/")
    with pytest.raises(ClusterLookupDeniedError):
        resolver.cluster_spec()
    service.close()

    class Service:  # as TensorFlow's users have them in their tests
        def projects(self):
            return self

        locations = nodes = projects

        def get(self, name):
            node = {"state": "READY", "networkEndpoints": [{"ipAddress": "1.2.3.4", "port": 8470}]}
            return types.SimpleNamespace(execute=lambda: node)

    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    resolver = TPUClusterResolver("my-tpu", "zone", "project", service=Service())
    assert resolver.cluster_spec() == {"worker": ["1.2.3.4:8470"]}


@pytest.mark.parametrize("where", ["projects", "get", "execute"])
def test_what_a_service_object_raises_is_a_failed_lookup(where, policy):
    """In TensorFlow, too, every error of a look-up is a ValueError."""

    class Service:
        def __getattr__(self, name):
            def method(**arguments):
                if name == where:
                    raise ZeroDivisionError("not today")
                return self

            return method

    resolver = TPUClusterResolver("my-tpu", "zone", "project", service=Service(), policy=policy)
    with pytest.raises(ClusterLookupError, match=r"nodes/my-tpu.* ZeroDivisionError: not today") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError, match="not today"):
        resolver.num_accelerators()


def test_the_default_credentials_are_the_machines_in_a_process_of_its_own(cloud):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    script = textwrap.dedent(
        """
        from dmesh.distribute.cluster_resolver import TPUClusterResolver
        print(TPUClusterResolver("my-tpu").cluster_spec().as_dict())
        """
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "{'worker': ['10.0.0.2:8470']}\n"
    assert ended.stderr == ""
    assert "instance/service-accounts/default/token" in str(cloud.metadata.requests)


def test_credentials_that_do_not_work_keep_their_secrets(cloud, policy):
    from google.auth.compute_engine import Credentials
    from google.auth.exceptions import RefreshError

    url = f"{cloud.metadata.url}/computeMetadata/v1/instance/service-accounts/default/token"

    class Broken(Credentials):
        def refresh(self, request):
            raise RefreshError("no sense", request(url, headers={"Metadata-Flavor": "Google"}))

    resolver = TPUClusterResolver("my-tpu", credentials=Broken(), policy=policy)
    with pytest.raises(ClusterLookupDeniedError, match=r"do not work: no sense. Renew") as caught:
        resolver.cluster_spec()
    assert cloud.apis.token not in f"{caught.value} {caught.value.__cause__!r} {caught.value.__cause__}"


def test_no_credentials(cloud, monkeypatch, policy, tmp_path):
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    def missing(scopes):
        raise DefaultCredentialsError("nobody is logged in.")

    monkeypatch.setattr(google.auth, "default", missing)
    with pytest.raises(ClusterLookupDeniedError, match=r"nobody is logged in. Pass credentials="):
        TPUClusterResolver("my-tpu", policy=policy).cluster_spec()


def test_without_the_library(cloud, monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ValueError, match="no TPU was named"):
        TPUClusterResolver()
    with pytest.raises(MissingExtraError, match=r"pip install 'dmesh\[google\]'") as caught:
        TPUClusterResolver("my-tpu")
    assert isinstance(caught.value, ImportError)
    assert TPUClusterResolver("grpc://10.0.0.2").cluster_spec() == {"worker": ["10.0.0.2:8470"]}


# By address, and by the environment -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("grpc://10.0.0.2:8470", ["10.0.0.2:8470"]),
        ("grpc://10.0.0.2", ["10.0.0.2:8470"]),
        ("grpc://10.0.0.2:1,grpc://host:2, other", ["10.0.0.2:1", "host:2", "other:8470"]),
        ("grpc://[::1]:9,grpc://[::2],fd00::3", ["[::1]:9", "[::2]:8470", "[fd00::3]:8470"]),
    ],
)
def test_addresses_are_taken_as_they_are(text, hosts):
    resolver = TPUClusterResolver(text)
    assert resolver.cluster_spec() == {"worker": hosts}
    assert resolver.master() == f"grpc://{hosts[0]}"
    assert not resolver.cloud_tpu_client.api_available()
    assert resolver.cloud_tpu_client.state() is None
    assert resolver.cloud_tpu_client.recoverable()
    with pytest.raises(ResolverError, match="health of the TPU"):
        resolver.cloud_tpu_client.wait_for_healthy()


@pytest.mark.parametrize("text", ["grpc://", "grpc://a:1,,b:1", "grpc://a:99999", "grpc://a:b", "grpc://a b"])
def test_malformed_addresses_are_refused(text):
    with pytest.raises(ConfigurationError, match="tpu"):
        TPUClusterResolver(text)


HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str), st.text("abz09", min_size=1, max_size=9).map(lambda text: f"h-{text}.x")
)


@settings(max_examples=30)
@given(st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=5))
def test_addresses_survive_writing_and_reading(hosts):
    text = ",".join(f"grpc://{host}:{port}" for host, port in hosts)
    assert [(end["ipAddress"], end["port"]) for end in read_endpoints(text, "it")] == hosts


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_any_text_is_addresses_or_refused(text):
    try:
        endpoints = read_endpoints(text, "it")
    except ConfigurationError:
        return
    assert all(1 <= endpoint["port"] <= 65535 and endpoint["ipAddress"] for endpoint in endpoints)


def test_what_the_environment_says_comes_in_order(cloud, policy, monkeypatch):
    cloud.apis.add_tpu("by-name", "v2-8", ["10.0.0.1"])
    cloud.apis.add_tpu("by-config", "v2-8", ["10.0.0.2"])
    cloud.metadata.be_tpu_vm("v2-8", ["10.0.0.4"])
    options = {"credentials": cloud.credentials(), "policy": policy}

    def first_host(tpu=None):
        return TPUClusterResolver(tpu, **options).cluster_spec().task_address("worker", 0)

    assert first_host() == first_host("") == "10.0.0.4:8470"
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.3,10.0.0.33")
    assert first_host() == "10.0.0.3:8470"
    monkeypatch.setenv("TPU_CONFIG", '{"tpu_node_name": "by-config", "zone": "us-central1-b"}')
    assert first_host("") == "10.0.0.2:8470"
    monkeypatch.setenv("TPU_NAME", "by-name")
    assert first_host() == "10.0.0.1:8470"
    monkeypatch.setenv("TPU_NAME", "grpc://10.0.0.5:1")
    assert first_host() == "10.0.0.5:1"
    monkeypatch.setenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://10.0.0.6:8470,grpc://10.0.0.7:8470")
    assert first_host() == "10.0.0.6:8470"
    assert first_host("by-config") == "10.0.0.2:8470"


@pytest.mark.parametrize("config", ["{", "[]", '{"tpu_node_name": 3}'])
def test_a_malformed_tpu_config(monkeypatch, config):
    monkeypatch.setenv("TPU_CONFIG", config)
    with pytest.raises(ConfigurationError, match="TPU_CONFIG"):
        TPUClusterResolver()


def test_a_slice_of_gke(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "w-0.svc,w-1.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-16")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["w-0.svc:8470", "w-1.svc:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://w-0.svc:8470", "of the first host, wherever this process is"
    assert resolver.num_accelerators() == {"TPU": 8}
    monkeypatch.setenv("TPU_WORKER_ID", "one")
    with pytest.raises(ConfigurationError, match="TPU_WORKER_ID"):
        resolver.task_id  # noqa: B018


@pytest.fixture
def second_slice(monkeypatch):
    """Makes this process worker 1 of the second of three slices of two hosts each."""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "s1-0.svc,s1-1.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-16")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "3")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "s0-0.svc:8081")


def test_hosts_of_several_slices_are_numbered_slice_by_slice(second_slice, monkeypatch):
    resolver = TPUClusterResolver()
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"worker": {0: "s0-0.svc:8470", 2: "s1-0.svc:8470", 3: "s1-1.svc:8470"}}
    assert (resolver.task_type, resolver.task_id, resolver.num_processes) == ("worker", 3, 6)
    assert resolver.master() == "grpc://s0-0.svc:8470"
    assert resolver.num_accelerators() == {"TPU": 8}
    assert resolver.get_tpu_system_metadata().num_hosts == 6
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")
    assert resolver.cluster_spec().as_dict() == {"worker": ["s0-0.svc:8470", "s1-1.svc:8470"]}
    assert resolver.task_id == 1


def test_several_slices_are_clients_of_one_cluster(second_slice, monkeypatch):
    found = find_cluster(TPUClusterResolver())
    assert found.client_id == 3
    assert len(found.jobs) == 6
    assert (found.jobs[0], found.own_address) == ("s0-0.svc:8470", "s1-1.svc:8470")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    first = find_cluster(TPUClusterResolver())
    assert (first.client_id, first.jobs, first.own_address) == (0, found.jobs, "s0-0.svc:8470")


def test_slices_of_one_host_are_not_alone(second_slice, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "s1-0.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    resolver = TPUClusterResolver()
    assert (resolver.task_id, resolver.num_processes) == (1, 3)
    assert resolver.master() == "grpc://s0-0.svc:8470"


def test_slices_of_tpu_vms(cloud):
    cloud.metadata.be_tpu_vm("v4-16", ["10.0.0.4", "10.0.0.5"], worker=0)
    slices = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2'\n"
    cloud.metadata.set_attributes({"tpu-env": slices})
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": {0: "10.0.0.2:8470", 2: "10.0.0.4:8470", 3: "10.0.0.5:8470"}
    }
    assert (resolver.task_id, resolver.num_processes) == (2, 4)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("MEGASCALE_NUM_SLICES", "x", ConfigurationError, "MEGASCALE_NUM_SLICES is 'x'; expected an integer"),
        (
            "MEGASCALE_SLICE_ID",
            "3",
            ConfigurationError,
            "MEGASCALE_SLICE_ID is 3, but MEGASCALE_NUM_SLICES is 3",
        ),
        ("MEGASCALE_SLICE_ID", "", ResolverError, "MEGASCALE_SLICE_ID is not set"),
        ("MEGASCALE_COORDINATOR_ADDRESS", "", ResolverError, "the address of the first one is unknown"),
        ("MEGASCALE_COORDINATOR_ADDRESS", "a:b", ConfigurationError, "MEGASCALE_COORDINATOR_ADDRESS"),
    ],
)
def test_malformed_slices(second_slice, monkeypatch, name, value, error, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        TPUClusterResolver().cluster_spec()


def test_one_slice_is_a_tpu_like_any_other(second_slice, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["s1-0.svc:8470", "s1-1.svc:8470"]}
    assert (resolver.task_id, resolver.num_processes) == (1, None)


def test_a_tpu_vm(cloud):
    cloud.metadata.be_tpu_vm("v4-16", ["10.0.0.2", "10.0.0.3"], worker=1)
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert resolver.task_id == 1
    assert resolver.accelerator_type == "v4-16"
    assert resolver.num_accelerators() == {"TPU": 8}
    assert resolver.cloud_tpu_client.name() == "my-tpu"
    assert not cloud.apis.requests
    cloud.metadata.set_attributes({"agent-worker-number": "0"})
    assert resolver.task_id == 0
    for name in ("agent-worker-number", "accelerator-type"):
        del cloud.metadata.entries[f"instance/attributes/{name}"]
    assert resolver.task_id == 1, "tpu-env has it, too"
    assert resolver.accelerator_type == "v4-16"
    cloud.metadata.set_attributes({"worker-network-endpoints": "a:b:no host,"})
    with pytest.raises(ClusterLookupError, match="worker-network-endpoints"):
        resolver.cluster_spec()


def test_a_host_of_the_tpu_that_is_named_knows_itself(cloud, resolve):
    cloud.apis.add_tpu("my-tpu", "v4-16", ["10.0.0.2", "10.0.0.3"])
    assert resolve().task_id == 0
    cloud.metadata.be_tpu_vm("v4-16", ["10.0.0.2", "10.0.0.3"], worker=1)
    assert resolve().task_id == 1
    cloud.metadata.be_tpu_vm("v4-16", ["10.0.0.2", "10.0.0.3"], worker=1, name="another")
    assert resolve().task_id == 0


@pytest.mark.parametrize("tpu", ["", None])
@pytest.mark.parametrize("asked", [True, False])
def test_no_tpu_anywhere(cloud, monkeypatch, tpu, asked):
    if not asked:
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "true")
    before = len(cloud.metadata.requests)
    with pytest.raises(TpuNotFoundError, match=r"no TPU was named\. .*TPU_ACCELERATOR_TYPE") as caught:
        TPUClusterResolver(tpu)
    assert isinstance(caught.value, RuntimeError), "as documented"
    assert isinstance(caught.value, ValueError), "as documented, too"
    assert ("This machine is in Google's cloud, but is not a TPU VM" in str(caught.value)) == asked
    assert (len(cloud.metadata.requests) > before) == asked


@pytest.mark.parametrize("tpu", ["", None])
def test_a_type_in_the_environment_is_a_tpu_of_this_machine(monkeypatch, tpu):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v2-8")
    resolver = TPUClusterResolver(tpu)
    assert resolver.accelerator_type == "v2-8"
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.num_accelerators() == {"TPU": 8}
    assert resolver.get_tpu_system_metadata()[:3] == (8, 1, 8)


def test_clients_that_share_a_tpu_of_this_machine_are_told_apart():
    def program():
        resolver = TPUClusterResolver("")
        dmesh.tpu.experimental.initialize_tpu_system(resolver)
        return resolver.task_id, resolver.num_accelerators(), resolver.get_tpu_system_metadata()[:3]

    with FakeCluster(2, environ={"TPU_ACCELERATOR_TYPE": "v2-8"}) as cluster:
        assert cluster.run(program) == [(task, {"TPU": 4}, (8, 2, 4)) for task in (0, 1)]


@pytest.mark.parametrize("tpu", ["", None])
def test_the_name_local_in_the_environment(monkeypatch, tpu):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    monkeypatch.setenv("TPU_NAME", "local")
    resolver = TPUClusterResolver(tpu)
    assert resolver.cloud_tpu_client.name() == "local"
    assert not resolver.cluster_spec()
    assert TPUClusterResolver(["local"]).master() == ""


def test_hosts_that_the_metadata_knows_come_with_a_type_of_the_environment(cloud, monkeypatch):
    cloud.metadata.be_tpu_vm("v4-16", ["10.0.0.2", "10.0.0.3"], worker=1)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-16")
    resolver = TPUClusterResolver("")
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert resolver.task_id == 1
    assert resolver.accelerator_type == "v3-16", "the environment comes before the metadata"
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert not TPUClusterResolver("").cluster_spec()


def test_metadata_that_do_not_answer_are_done_without_where_the_environment_has_a_type(
    cloud, monkeypatch, policy, caplog
):
    [port] = free_ports(1)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
    with pytest.raises(ClusterLookupUnavailableError):
        TPUClusterResolver("", metadata=MetadataServer(policy))
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v2-8")
    assert TPUClusterResolver("", metadata=MetadataServer(policy)).accelerator_type == "v2-8"
    assert "continuing with the TPU that TPU_ACCELERATOR_TYPE describes" in caplog.text


def test_the_only_host_of_a_tpu_has_nobody_to_connect_to(cloud, monkeypatch):
    cloud.metadata.be_tpu_vm("v2-8", ["10.0.0.2"])
    vm = TPUClusterResolver("")
    assert vm.cluster_spec() == {"worker": ["10.0.0.2:8470"]}
    assert vm.master() == ""
    assert vm.master("worker", 0) == "grpc://10.0.0.2:8470"
    assert vm.num_accelerators() == {"TPU": 8}
    for name in ("worker-network-endpoints", "agent-worker-number", "tpu-env"):
        del cloud.metadata.entries[f"instance/attributes/{name}"]
    typed = TPUClusterResolver("")
    assert typed.accelerator_type == "v2-8"
    assert not typed.cluster_spec()
    assert typed.master() == ""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    pod = TPUClusterResolver("")
    assert pod.cluster_spec() == {"worker": ["localhost:8470"]}
    assert pod.master() == ""


def test_arguments_are_checked():
    with pytest.raises(ConfigurationError, match="list of TPUs is empty"):
        TPUClusterResolver([])
    with pytest.raises(NotImplementedError, match="UnionResolver"):
        TPUClusterResolver(["a", "b"])
    with pytest.raises(ArgumentTypeError, match="tpu must be a str"):
        TPUClusterResolver(7)
    with pytest.raises(ConfigurationError, match="job_name"):
        TPUClusterResolver("local", job_name="a b")
    with pytest.raises(ConfigurationError, match="job of its own"):
        TPUClusterResolver("local", job_name="a", coordinator_name="a")


# Beside the hosts -------------------------------------------------------------------------------------------


def test_the_coordinator_is_a_job_of_its_own():
    address = "grpc://10.0.0.2"
    resolver = TPUClusterResolver(address, job_name="tpu", coordinator_name="c", coordinator_address="h:1")
    assert resolver.cluster_spec() == {"tpu": ["10.0.0.2:8470"], "c": ["h:1"]}
    assert resolver.get_job_name() == resolver.task_type == "tpu"
    assert resolver.get_coordination_service_leader() == "/job:tpu/task:0"
    without = TPUClusterResolver(address, coordinator_address="h:1")
    assert without.cluster_spec() == {"worker": ["10.0.0.2:8470"]}


def test_a_coordinator_without_an_address_is_started():
    with TPUClusterResolver("grpc://10.0.0.2", coordinator_name="coordinator") as resolver:
        [address] = resolver.cluster_spec().job_tasks("coordinator")
        host, _, port = address.partition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10).close()


def listens_at(address):
    """Tells whether somebody accepts connections there."""
    host, port = split_address(address, "it")
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_coordinator_listens_where_the_environment_says(cloud, monkeypatch):
    cloud.metadata.entries["instance/network-interfaces/0/ip"] = "127.0.0.3"

    def coordinator():
        return TPUClusterResolver("grpc://10.0.0.2", coordinator_name="coordinator")

    with coordinator() as resolver:
        [address] = resolver.cluster_spec().job_tasks("coordinator")
        assert address.startswith("127.0.0.3:"), "as the metadata have it"
    monkeypatch.setenv("DMESH_BIND_HOST", "127.0.0.2")
    with coordinator() as resolver:
        [address] = resolver.cluster_spec().job_tasks("coordinator")
        assert address.startswith("127.0.0.2:")
        assert listens_at(address)
        assert not listens_at(address.replace("127.0.0.2", "127.0.0.3"))
    monkeypatch.setenv("DMESH_BIND_HOST", "0.0.0.0")
    monkeypatch.setenv("DMESH_INSECURE", "1")
    with coordinator() as resolver:
        [address] = resolver.cluster_spec().job_tasks("coordinator")
        assert address.startswith("127.0.0.3:"), "an address that others can connect to"
        assert listens_at(address)
        assert listens_at(address.replace("127.0.0.3", "127.0.0.1"))


def test_a_tpu_of_this_machine():
    resolver = TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert resolver.master() == resolver.get_master() == ""
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cloud_tpu_client.name() == "local"
    assert resolver.cloud_tpu_client.network_endpoints() == []
    assert resolver.num_accelerators() == {"TPU": dmesh.num_local_devices("TPU")}


def test_how_many_cores_there_are(cloud, resolve):
    cloud.apis.add_tpu("my-tpu", "v3-32", [f"10.0.0.{host}" for host in range(4)])
    resolver = resolve()
    assert resolver.accelerator_type == "v3-32"
    assert TpuSystem.of(resolver.accelerator_type).num_cores == 32
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0, None) == {"TPU": 8}
    metadata = resolver.get_tpu_system_metadata()
    assert metadata[:4] == (32, 4, 8, None)
    assert metadata.num_of_cores_per_host == 8
    names = [device.to_string() for device in metadata.devices]
    assert len(names) == 4 * (1 + 8)
    assert names[-1] == "/job:worker/replica:0/task:3/device:TPU:7"
    assert resolve(accelerator_type="v2-32").num_accelerators() == {"TPU": 8}
    with pytest.raises(ResolverError, match="cannot be divided equally among its 5 hosts"):
        resolve(accelerator_type="v2-8", tpu="grpc://a,b,c,d,e").num_accelerators()
    with pytest.raises(TopologyError):
        resolve(accelerator_type="v1-8").num_accelerators()
    assert TPUClusterResolver("grpc://10.0.0.2").num_accelerators() == {"TPU": 0}, "nobody knows its type"


def test_hosts_with_different_numbers_of_cores_are_an_error(monkeypatch):
    device = types.SimpleNamespace(type="TPU", index=0)
    members = [
        types.SimpleNamespace(job="worker", index=index, devices=(device,) * count)
        for index, count in enumerate((4, 2))
    ]
    monkeypatch.setattr("dmesh.distribute.cluster_resolver.tpu.known_members", lambda: members)
    resolver = TPUClusterResolver("grpc://10.0.0.2,10.0.0.3")
    with pytest.raises(RuntimeError, match="task 0: 4, task 1: 2"):
        resolver.num_accelerators()
    members.pop()
    assert resolver.num_accelerators() == {"TPU": 4}


def test_a_topology_is_kept():
    resolver = TPUClusterResolver("local")
    assert resolver.tpu_hardware_feature is None
    resolver.set_tpu_topology(TpuSystem.of("v2-8").topology(1).serialized())
    assert resolver.tpu_hardware_feature.embedding_feature == 0
    with pytest.raises(TopologyError):
        resolver.set_tpu_topology(b"\x08\x01")


def test_what_the_client_says_of_the_tpu(cloud, resolve, clock):
    node = cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"], health="TIMEOUT")
    client = resolve().cloud_tpu_client
    assert client.api_available()
    assert (client.state(), client.health(), client.runtime_version()) == ("READY", "TIMEOUT", "tpu-vm-base")
    assert client.recoverable()
    assert client.get_local_ip() == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"did not become healthy within 100 s \(state READY, health TIME"):
        client.wait_for_healthy(timeout_s=100, interval=30)
    node["health"] = "HEALTHY"
    client.wait_for_healthy()
    assert client.symptoms() == ()
    node["symptoms"] = [{"symptomType": "HBM_OUT_OF_MEMORY", "createTime": "2020-01-01T00:00:00.5Z"}]
    assert client.recoverable(), "that was long ago"
    node["symptoms"][0]["createTime"] = "2999-01-01T00:00:00Z"
    assert not client.recoverable()
    node["symptoms"] = [{"symptomType": "OUT_OF_MEMORY", "createTime": "nonsense"}]
    assert client.recoverable()
    node["state"] = "PREEMPTED"
    assert not client.recoverable()


def test_the_resolver_is_one_thing_and_keeps_its_secrets(cloud, resolve):
    resolver = resolve()
    assert copy.deepcopy(resolver) is resolver
    assert repr(resolver) == "<TPUClusterResolver of my-tpu, job worker>"
    assert cloud.credentials().token not in repr(vars(resolver))
    resolver.task_type, resolver.task_id = "other", 3
    assert (resolver.task_type, resolver.task_id) == ("other", 3)


def test_connect_joins_and_initializes(cloud, monkeypatch):
    done = []
    system = types.ModuleType("experimental")
    system.initialize_tpu_system = lambda resolver: done.append(("initialize", resolver))
    monkeypatch.setitem(sys.modules, "dmesh.tpu.experimental", system)
    monkeypatch.setattr(
        "dmesh.config.experimental_connect_to_cluster",
        lambda resolver: done.append(("connect", resolver)),
        raising=False,
    )
    resolver = TPUClusterResolver.connect("grpc://10.0.0.2", "zone", "project")
    assert done == [("connect", resolver), ("initialize", resolver)]
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470"]}


# The seed page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "index", "done"), [("worker", 0, True), ("worker", 1, False)])
def test_the_samples_of_the_page_run(kind, index, done):
    cluster_spec = dmesh.train.ClusterSpec(
        {
            "ps": ["localhost:2222", "localhost:2223"],
            "worker": ["localhost:2224", "localhost:2225", "localhost:2226"],
        }
    )
    cluster_resolver = SimpleClusterResolver(cluster_spec, task_type=kind, task_id=index)
    ran = cluster_resolver.task_type == "worker" and cluster_resolver.task_id == 0
    assert ran == done
    assert cluster_resolver.task_type != "ps"


def test_the_call_of_the_page_has_all_its_arguments(cloud, monkeypatch):
    cloud.apis.add_tpu("my-tpu", "v2-8", ["10.0.0.2"])
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    resolver = dmesh.distribute.cluster_resolver.TPUClusterResolver(
        tpu=None, zone=None, project=None, job_name="worker",
        coordinator_name=None, coordinator_address=None,
        credentials=cloud.credentials(), service=None, discovery_url=None,
    )  # fmt: skip
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470"]}
    assert resolver.environment == ""
    assert resolver.task_id == 0
    assert resolver.task_type == "worker"


@settings(max_examples=50)
@given(st.text(max_size=80))
def test_any_text_is_a_tpu_env(text):
    for key, value in parse_tpu_env(text).items():
        assert key.isupper()
        assert isinstance(value, str)


def test_a_tpu_env_is_read():
    text = "ACCELERATOR_TYPE: 'v2-8'\n  WORKER_ID:\"3\"\nZONE: a-b\nnot one\nEMPTY: ''\n"
    assert parse_tpu_env(text) == {"ACCELERATOR_TYPE": "v2-8", "WORKER_ID": "3", "ZONE": "a-b", "EMPTY": ""}
