import sys

import pytest

from dmesh.distribute.cluster_resolver import ClusterResolver, GCEClusterResolver
from dmesh.errors import (
    ClusterLookupDeniedError,
    ClusterLookupError,
    ClusterLookupUnavailableError,
    ClusterNotReadyError,
    ClusterSpecError,
    ConfigurationError,
    MissingExtraError,
    ResolverError,
)


@pytest.fixture
def resolve(cloud, policy):
    def make(group="group", port=8470, **options):
        given = {
            "credentials": cloud.credentials(),
            "discovery_url": cloud.apis.discovery_url,
            "policy": policy,
        }
        return GCEClusterResolver("my-project", "us-central1-b", group, port, **given | options)

    return make


def test_the_machines_of_a_group_are_found_at_every_call(cloud, resolve):
    for index, ip in enumerate(["10.0.0.9", "10.0.0.10", "10.0.0.1"]):
        cloud.apis.add_instance(f"vm-{index}", ip, group="group")
    cloud.apis.add_instance("stopped", "10.0.0.5", group="group", status="TERMINATED")
    resolver = resolve()
    assert isinstance(resolver, ClusterResolver)
    # As TensorFlow has them: in the order of the text.
    hosts = ["10.0.0.10:8470", "10.0.0.1:8470", "10.0.0.9:8470"]
    assert resolver.cluster_spec() == {"worker": sorted(hosts)}
    assert resolver.master() == f"grpc://{sorted(hosts)[0]}"
    assert resolver.master("worker", 2) == "grpc://10.0.0.9:8470"
    assert resolver.master(task_id=1, rpc_layer="other").startswith("other://")
    cloud.apis.instances["stopped"]["status"] = "RUNNING"
    assert resolver.cluster_spec().num_tasks("worker") == 4
    with pytest.raises(ClusterSpecError):
        resolver.master("ps", 0)


def test_a_long_list_is_read_page_by_page(cloud, resolve):
    for index in range(7):
        cloud.apis.add_instance(f"vm-{index}", f"10.0.0.{index}", group="group")
    cloud.apis.page_size = 3
    assert resolve().cluster_spec().num_tasks("worker") == 7
    lists = [request for request in cloud.apis.requests if request.path.endswith("listInstances")]
    assert [request.query.get("pageToken") for request in lists] == [None, "3", "6"]
    assert all(request.query["orderBy"] == "name" for request in lists)


def test_an_empty_group_has_no_tasks(cloud, resolve):
    cloud.apis.groups["group"] = []
    assert resolve().cluster_spec() == {"worker": []}


def test_what_the_resolver_is_told_about_this_process(cloud, resolve):
    resolver = resolve(task_type="trainer", task_id=3, rpc_layer=None)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("trainer", 3, None)
    resolver.task_id = 1
    assert resolver.task_id == 1
    with pytest.raises(RuntimeError, match=r"task_type is 'trainer' and cannot be set to 'ps'") as caught:
        resolver.task_type = "ps"
    assert isinstance(caught.value, ResolverError)
    resolver.task_id = None
    assert resolver.master() == ""
    cloud.apis.add_instance("vm", "fd00::1", group="group")
    assert resolver.master("trainer", 0) == "[fd00::1]:8470"
    assert resolver.environment == ""


def test_a_machine_that_stops_meanwhile_is_an_error(cloud, resolve):
    machine = cloud.apis.add_instance("vm", "10.0.0.1", group="group")
    resolver = resolve()
    machine["networkInterfaces"] = []
    with pytest.raises(ClusterNotReadyError, match="vm has no address yet"):
        resolver.cluster_spec()
    cloud.apis.fail(200, path="/instances/vm", body={"status": "STOPPING"})
    with pytest.raises(ClusterNotReadyError, match=r"vm of the instance group group .*'STOPPING'"):
        resolver.cluster_spec()
    cloud.apis.fail(404, path="/instances/vm", body={"error": {"message": "gone"}})
    with pytest.raises(ClusterLookupError, match=r"the machine vm .*404 gone"):
        resolver.cluster_spec()


def test_refusals_and_outages(cloud, resolve, clock):
    with pytest.raises(ClusterLookupError, match=r"instance group group of zone us-central1-b.*404"):
        resolve().cluster_spec()
    cloud.apis.add_instance("vm", "10.0.0.1", group="group")
    cloud.apis.denied.add("instanceGroups/group")
    with pytest.raises(ClusterLookupDeniedError, match=r"403.*roles/compute.viewer"):
        resolve().cluster_spec()
    cloud.apis.denied.clear()
    resolver = resolve()
    cloud.apis.fail(503, path="listInstances", headers={"Retry-After": "5"})
    before = clock()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert clock() - before >= 5
    cloud.apis.fail(200, path="listInstances", body={"items": [{}]})
    with pytest.raises(ClusterLookupError, match="entry without a machine"):
        resolver.cluster_spec()
    cloud.apis.close()
    with pytest.raises(ClusterLookupUnavailableError):
        resolver.cluster_spec()


def test_arguments_are_checked(cloud, resolve, monkeypatch):
    for port in (0, 65_536, "http", True, None):
        with pytest.raises(ConfigurationError, match="port is"):
            resolve(port=port)
    with pytest.raises(ConfigurationError, match="instance_group is ''"):
        resolve(group="")
    with pytest.raises(ConfigurationError, match="task_type is 'a b'"):
        resolve(task_type="a b")
    assert resolve(port="8471")
    options = {"credentials": cloud.credentials(), "discovery_url": cloud.apis.discovery_url}
    with pytest.raises(ConfigurationError, match=r"instance group g of zone z in project Mine: .*pattern"):
        GCEClusterResolver("Mine", "z", "g", 1, **options).cluster_spec()
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(
        MissingExtraError, match=r"GCEClusterResolver .*pip install 'dmesh\[google\]'"
    ) as caught:
        resolve()
    assert isinstance(caught.value, ImportError)


def test_a_service_object_is_used_as_it_is(cloud, policy):
    from googleapiclient import discovery

    cloud.apis.add_instance("vm", "10.0.0.1", group="group")
    service = discovery.build(
        "compute", "v1", credentials=cloud.credentials(), discoveryServiceUrl=cloud.apis.discovery_url,
        cache_discovery=False,
    )  # fmt: skip
    resolver = GCEClusterResolver(
        "my-project", "us-central1-b", "group", 1, service=service, credentials=None
    )
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:1"]}
    service.close()


def test_what_a_service_object_raises_is_a_failed_lookup(policy):
    class Service:
        def instanceGroups(self):
            raise KeyError("not logged in")

    resolver = GCEClusterResolver("p", "z", "g", 1, service=Service(), policy=policy)
    with pytest.raises(ClusterLookupError, match=r"instance group g .* raised KeyError: 'not logged in'"):
        resolver.cluster_spec()


def test_an_empty_task_type_is_taken_as_it_is(cloud, resolve):
    """As in TensorFlow, whose tests make such ones."""
    cloud.apis.add_instance("vm", "10.0.0.1", group="group")
    resolver = resolve(task_type="", task_id=0)
    assert resolver.task_type == ""
    assert resolver.cluster_spec() == {"": ["10.0.0.1:8470"]}
    assert resolver.master() == "grpc://10.0.0.1:8470"


def test_the_librarys_own_description_of_the_api_fits(cloud, policy):
    """Without a discovery URL, what the library brings is used: nobody is asked to build the resolver."""
    resolver = GCEClusterResolver("p", "z", "g", 1, credentials=cloud.credentials(), policy=policy)
    assert resolver.task_type == "worker"
    assert not cloud.apis.requests
