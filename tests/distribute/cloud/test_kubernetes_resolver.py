import sys
import types

import pytest

from dmesh.distribute.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    KubernetesServiceResolver,
)
from dmesh.distribute.cluster_resolver.kubernetes import detected
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
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
)

LABELS = {"job-name": "train"}
MAPPING = {"worker": ["job-name=train"]}
INDEX = "batch.kubernetes.io/job-completion-index"


@pytest.fixture
def resolve(in_pod, policy):
    in_pod()

    def make(mapping=MAPPING, **options):
        return KubernetesClusterResolver(mapping, **{"policy": policy} | options)

    return make


def test_pods_are_found_by_their_labels_at_every_call(kubernetes, resolve):
    for name, ip in (("b", "10.0.0.3"), ("a", "10.0.0.2"), ("c", "10.0.0.4")):
        kubernetes.add_pod(name, f"10.1.0.{ip[-1]}", labels=LABELS, host_ip=ip)
    kubernetes.add_pod("other", "10.1.0.9", labels={"job-name": "other"})
    resolver = resolve()
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470", "10.0.0.4:8470"]}
    spec = resolve(pod_address="pod_ip", tf_server_port=1).cluster_spec()
    assert spec == {"worker": ["10.1.0.2:1", "10.1.0.3:1", "10.1.0.4:1"]}
    assert resolver.master("worker", 1) == "grpc://10.0.0.3:8470"
    assert resolver.master("worker", 1, "other") == "other://10.0.0.3:8470"
    assert resolver.master() == "", "this process is in none of them"
    del kubernetes.pods["default", "b"]
    assert resolver.cluster_spec().num_tasks("worker") == 2
    with pytest.raises(ClusterSpecError):
        resolver.master("worker", 2)


def test_jobs_may_have_several_selectors_and_pods_be_anywhere(kubernetes, resolve):
    kubernetes.add_pod("z", "10.0.0.1", labels={"job-name": "first"}, namespace="one")
    kubernetes.add_pod("a", "10.0.0.2", labels={"job-name": "second"}, namespace="two")
    kubernetes.add_pod("p", "fd00::1", labels={"job-name": "ps", "tier": "back"})
    mapping = {"worker": ["job-name=first", "job-name=second"], "ps": ["job-name in (ps),tier!=front"]}
    assert resolve(mapping).cluster_spec() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470"],
        "ps": ["[fd00::1]:8470"],
    }
    assert resolve(mapping, namespace="two").cluster_spec() == {"worker": ["10.0.0.2:8470"], "ps": []}
    kubernetes.add_pod("t", "10.0.0.7", labels={"job-name": "tensorflow"})
    assert resolve(None).cluster_spec() == {"worker": ["10.0.0.7:8470"]}, "TensorFlow's default"


def test_a_completion_index_is_the_order_if_all_have_one(kubernetes, resolve):
    for index in range(12):
        kubernetes.add_pod(f"train-{index}-x", f"10.0.0.{index}", labels=LABELS | {INDEX: str(index)})
    addresses = resolve().cluster_spec().job_tasks("worker")
    assert addresses == [f"10.0.0.{index}:8470" for index in range(12)]
    del kubernetes.pods["default", "train-3-x"]["metadata"]["labels"][INDEX]
    assert resolve().cluster_spec().job_tasks("worker")[2] == "10.0.0.10:8470", "the order of the names"


def test_a_long_list_is_read_page_by_page(kubernetes, resolve):
    for index in range(7):
        kubernetes.add_pod(f"p-{index}", f"10.0.0.{index}", labels=LABELS)
    kubernetes.page_size = 3
    resolver = resolve()
    kubernetes.requests.clear()
    assert resolver.cluster_spec().num_tasks("worker") == 7
    assert [bool(request.query.get("continue")) for request in kubernetes.requests] == [False, True, True]
    assert kubernetes.requests[0].query["limit"] == "500"


def test_a_list_that_expires_is_read_anew(kubernetes, resolve):
    for index in range(7):
        kubernetes.add_pod(f"p-{index}", f"10.0.0.{index}", labels=LABELS)
    kubernetes.page_size = 3
    answer, expired = kubernetes.answer, []

    def expiring(request):
        if request.query.get("continue") and len(expired) < limit:
            expired.append(request)
            kubernetes.expire_lists()
        return answer(request)

    kubernetes.answer, limit = expiring, 2
    assert resolve().cluster_spec().num_tasks("worker") == 7
    assert len(expired) == 2
    limit = 100
    with pytest.raises(ClusterLookupError, match="expired 5 times"):
        resolve().cluster_spec()


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_a_pod_that_does_not_run_is_an_error(kubernetes, resolve, phase):
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    kubernetes.add_pod("b", None, labels=LABELS, phase=phase)
    told = rf"the pod default/b is not running; .*'{phase}'.*kubectl"
    with pytest.raises(ClusterNotReadyError, match=told) as caught:
        resolve().cluster_spec()
    assert isinstance(caught.value, RuntimeError)


def test_pods_that_end_or_have_no_address_or_share_one(kubernetes, resolve):
    pod = kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(ClusterNotReadyError, match="it is being deleted"):
        resolve().cluster_spec()
    del pod["metadata"]["deletionTimestamp"]
    del pod["status"]["podIP"]
    with pytest.raises(ClusterNotReadyError, match="has no pod_ip yet"):
        resolve(pod_address="pod_ip").cluster_spec()
    kubernetes.add_pod("b", "10.1.0.2", labels=LABELS, host_ip="10.0.0.1")
    with pytest.raises(ResolverError, match=r"default/a and default/b .*10.0.0.1:8470.*pod_address='pod_ip'"):
        resolve().cluster_spec()


def test_the_resolver_can_wait_until_all_pods_run(kubernetes, resolve, clock, caplog):
    kubernetes.add_pod("old", "10.0.0.9", labels=LABELS, phase="Failed")
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    steps = iter([
        lambda: kubernetes.add_pod("b", None, labels=LABELS, phase="Pending"),
        lambda: None,
        lambda: kubernetes.add_pod("b", "10.0.0.2", labels=LABELS),
    ])  # fmt: skip

    def sleep(seconds):
        clock.advance(10 * seconds)
        next(steps, lambda: None)()

    policy = LookupPolicy(clock=clock, sleep=sleep)
    spec = resolve(size=2, wait=100, policy=policy).cluster_spec()
    assert spec == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert "still waiting: " in caplog.text
    with pytest.raises(
        ClusterNotReadyError, match=r"2 of 3 pods are running .*'job-name=train'.*\(waited \d+ s\)"
    ):
        resolve(size=3, wait=100, policy=policy).cluster_spec()
    with pytest.raises(ClusterNotReadyError, match=r"2 of 1 pods"):
        resolve(size=1).cluster_spec()


# Credentials, refusals, outages -----------------------------------------------------------------------------


def test_the_service_account_of_the_pod_is_used(kubernetes, resolve, in_pod, tmp_path):
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    resolver = resolve()
    assert resolver.cluster_spec()
    kubernetes.token = "renewed"
    with pytest.raises(ClusterLookupDeniedError, match=r"401 Unauthorized.*expired") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, PermissionError)
    (tmp_path / "account" / "token").write_text("renewed")
    assert resolver.cluster_spec(), "the token is read anew"
    assert kubernetes.token not in str(caught.value) + repr(vars(resolver))


def test_an_account_that_may_not_list_pods(kubernetes, resolve):
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    kubernetes.namespaces = {"default"}
    with pytest.raises(ClusterLookupDeniedError, match=r"all namespaces.*403 pods is forbidden.*ClusterRole"):
        resolve().cluster_spec()
    assert resolve(namespace="default").cluster_spec() == {"worker": ["10.0.0.1:8470"]}


def test_an_api_server_that_is_not_the_clusters(kubernetes, resolve, tmp_path):
    import trustme

    (tmp_path / "account" / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(ClusterLookupDeniedError, match="its certificate is not trusted"):
        resolve().cluster_spec()


def test_outages(kubernetes, resolve, clock):
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    resolver = resolve()
    kubernetes.fail(429, headers={"Retry-After": "9"})
    kubernetes.fail(503, 2)
    before = clock()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert clock() - before >= 9 + 2 * 0.4
    kubernetes.fail(500, 100)
    with pytest.raises(ClusterLookupUnavailableError, match=r"pods 'job-name=train' .*it answered 500"):
        resolver.cluster_spec()
    kubernetes.close()
    with pytest.raises(ClusterLookupUnavailableError, match=r"no connection.*refused") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, ConnectionError)


def test_an_api_that_answers_too_slowly(kubernetes, in_pod, resolve):
    resolver = KubernetesClusterResolver(MAPPING, policy=LookupPolicy(attempt=0.2, give_up=0.1))
    kubernetes.hold()
    with pytest.raises(ClusterLookupUnavailableError, match="timed out"):
        resolver.cluster_spec()
    kubernetes.release()
    assert resolve().cluster_spec() == {"worker": []}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>", "not JSON"),
        ("[]", "not a list of pods"),
        ({"items": 3, "metadata": {}}, "not a list of pods"),
        ({"items": ["pod"], "metadata": {}}, "not a pod"),
        ("x" * 200_000, "more than 100000 bytes"),
    ],
)
def test_nonsense_is_refused(kubernetes, in_pod, clock, body, message):
    in_pod()
    policy = LookupPolicy(most_bytes=100_000, clock=clock, sleep=clock.advance)
    resolver = KubernetesClusterResolver(MAPPING, policy=policy)
    kubernetes.fail(200, body=body)
    with pytest.raises(ClusterLookupError, match=message):
        resolver.cluster_spec()
    if "more than" in message:
        kubernetes.fail(404, body=body)
        with pytest.raises(ClusterLookupError, match=message):
            resolver.cluster_spec()


def test_a_malformed_selector_is_the_servers_word(kubernetes, resolve):
    with pytest.raises(ClusterLookupError, match="400 unable to parse requirement"):
        resolve({"worker": ["a b c"]}).cluster_spec()


def test_outside_of_kubernetes(kubernetes, authority, tmp_path, monkeypatch, policy):
    with pytest.raises(ResolverError, match=r"no access to the Kubernetes API.*OFF_CLUSTER"):
        KubernetesClusterResolver()
    off = KubernetesExecutableLocation.OFF_CLUSTER
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ResolverError, match=r"no access to the Kubernetes API.*KUBECONFIG"):
        KubernetesClusterResolver(executable_location=off)
    kubernetes.write_kubeconfig(tmp_path / "config", authority.cert_pem.bytes())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    kubernetes.add_pod("a", "10.0.0.1", labels=LABELS)
    resolver = KubernetesClusterResolver(MAPPING, executable_location=off, policy=policy)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert (resolver.task_type, resolver.task_id) == (None, None)
    with pytest.raises(ValueError, match="executable_location is 'here'"):
        KubernetesClusterResolver(executable_location="here")


# A client of somebody else's --------------------------------------------------------------------------------


def _pod(name, phase, host_ip):
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name), status=types.SimpleNamespace(phase=phase, host_ip=host_ip)
    )


def test_a_client_that_is_given_is_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmesh\[kubernetes\]'") as caught:
        KubernetesClusterResolver()
    assert isinstance(caught.value, ImportError)
    pods = [_pod("tensorflow-b", "Running", "10.1.2.4"), _pod("tensorflow-a", "Running", "10.1.2.3")]

    class Client:
        def list_pod_for_all_namespaces(self, label_selector):
            assert label_selector == "job-name=tensorflow"
            return types.SimpleNamespace(items=pods)

    resolver = KubernetesClusterResolver(override_client=Client())
    assert resolver.cluster_spec() == {"worker": ["10.1.2.3:8470", "10.1.2.4:8470"]}
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.1.2.4:8470"
    pods[0].status.phase = "Failed"
    with pytest.raises(RuntimeError, match=r"tensorflow-b is not running.*'Failed'"):
        resolver.cluster_spec()


def test_a_real_client_that_is_given_is_asked(kubernetes, authority, tmp_path, policy):
    from kubernetes import client, config

    kubernetes.write_kubeconfig(tmp_path / "config", authority.cert_pem.bytes())
    configuration = client.Configuration()
    config.load_kube_config(str(tmp_path / "config"), client_configuration=configuration)
    with client.ApiClient(configuration) as api:
        core = client.CoreV1Api(api)
        kubernetes.add_pod("a-1", "10.1.0.1", labels=LABELS | {INDEX: "1"}, host_ip="10.0.0.1")
        kubernetes.add_pod("b-0", "10.1.0.2", labels=LABELS | {INDEX: "0"}, host_ip="10.0.0.2")
        resolver = KubernetesClusterResolver(MAPPING, override_client=core, policy=policy)
        assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.1:8470"]}
        pods = KubernetesClusterResolver(
            MAPPING, override_client=core, policy=policy, namespace="default", pod_address="pod_ip"
        )
        assert pods.cluster_spec() == {"worker": ["10.1.0.2:8470", "10.1.0.1:8470"]}
        kubernetes.fail(503)
        assert resolver.cluster_spec()
        kubernetes.token = "another"
        with pytest.raises(ClusterLookupDeniedError, match="401"):
            resolver.cluster_spec()
        api.rest_client.pool_manager.clear()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"mapping": ["worker"]}, ArgumentTypeError, "must be a dict"),
        ({"mapping": {"worker": "job-name=a"}}, ArgumentTypeError, "must be a list of label selectors"),
        ({"mapping": {"a b": []}}, ConfigurationError, "not the name of a job"),
        ({"tf_server_port": 0}, ConfigurationError, "tf_server_port is '0'"),
        ({"pod_address": "ip"}, ConfigurationError, "pod_address is 'ip'"),
        ({"size": 0}, ConfigurationError, "size is 0"),
        ({"wait": -1}, ConfigurationError, "wait is -1"),
        ({"wait": "long"}, ConfigurationError, "wait is 'long'"),
    ],
)
def test_arguments_are_checked(kubernetes, resolve, options, kind, message):
    with pytest.raises(kind, match=message):
        resolve(**options)


# Which of them this process is ------------------------------------------------------------------------------


def test_a_pod_knows_itself(kubernetes, resolve, monkeypatch):
    for index in range(3):
        pod = kubernetes.add_pod(
            f"train-{index}-x{index}", f"10.0.0.{index}", labels=LABELS | {INDEX: str(index)}
        )
        pod["spec"]["hostname"] = f"train-{index}"
    resolver = resolve()
    monkeypatch.setenv("HOSTNAME", "train-2")
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://10.0.0.2:8470"
    monkeypatch.setenv("HOSTNAME", "train-0-x0")
    assert resolver.task_id == 0
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert resolver.task_id == 1
    monkeypatch.setenv("POD_NAME", "train-2-x2")
    assert resolver.task_id == 2
    monkeypatch.setenv("DMESH_KUBERNETES_POD", "train-0-x0")
    assert resolver.task_id == 0
    monkeypatch.setenv("DMESH_KUBERNETES_POD", "somebody-else")
    assert (resolver.task_type, resolver.task_id) == (None, None)
    resolver.task_type, resolver.task_id = "worker", 7
    assert (resolver.task_type, resolver.task_id) == ("worker", 7)


def test_names_of_an_indexed_job_need_no_api(monkeypatch):
    monkeypatch.setenv("HOSTNAME", "train-2")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    resolver = KubernetesServiceResolver("svc", 3, 9000)
    hosts = ["train-0.svc:9000", "train-1.svc:9000", "train-2.svc:9000"]
    assert resolver.cluster_spec() == {"worker": hosts}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == "grpc://train-0.svc:9000"
    assert resolver.master("worker", 1) == "grpc://train-1.svc:9000"
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    monkeypatch.setenv("HOSTNAME", "my-set-1.svc.default.svc.cluster.local")
    assert resolver.task_id == 1, "a stateful set has no such variable"
    for hostname, index in (("train", ""), ("train-3", ""), ("train-2", "1"), ("train-x", "0")):
        monkeypatch.setenv("HOSTNAME", hostname)
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
        with pytest.raises(
            ResolverError, match=rf"this host's name is '{hostname}'.*expected a pod .*NAME-NUMBER"
        ):
            KubernetesServiceResolver("svc", 3)
    with pytest.raises(ConfigurationError, match="service is"):
        KubernetesServiceResolver("a b", 3)
    with pytest.raises(ConfigurationError, match="size is"):
        KubernetesServiceResolver("svc", 0)


def test_what_a_pods_environment_asks_for(kubernetes, in_pod, monkeypatch):
    in_pod("train-1", namespace="prod")
    assert detected() is None, "a pod like any other"
    monkeypatch.setenv("DMESH_KUBERNETES_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"SIZE is '2', but neither .*SELECTOR nor .*SERVICE is set"):
        detected()
    monkeypatch.setenv("DMESH_KUBERNETES_SIZE", "")
    monkeypatch.setenv("DMESH_KUBERNETES_SELECTOR", "job-name=train")
    with pytest.raises(ConfigurationError, match="DMESH_KUBERNETES_SIZE is ''"):
        detected()
    for size in ("0", "-1", "two", "9" * 5000):
        monkeypatch.setenv("DMESH_KUBERNETES_SIZE", size)
        with pytest.raises(ConfigurationError, match=f"DMESH_KUBERNETES_SIZE is '{size[:100]}"):
            detected()
    monkeypatch.setenv("DMESH_KUBERNETES_SIZE", "2")
    for index in range(2):
        kubernetes.add_pod(
            f"train-{index}", f"10.1.0.{index}", labels=LABELS, namespace="prod", host_ip="10.0.0.1"
        )
        kubernetes.add_pod(f"train-{index}", f"10.2.0.{index}", labels=LABELS)
    kubernetes.namespaces = {"prod"}
    resolver = detected()
    assert resolver.cluster_spec() == {"worker": ["10.1.0.0:8470", "10.1.0.1:8470"]}
    assert resolver.task_id == 1
    monkeypatch.setenv("DMESH_KUBERNETES_PORT", "9000")
    assert detected().cluster_spec().task_address("worker", 0) == "10.1.0.0:9000"
    monkeypatch.setenv("DMESH_KUBERNETES_PORT", "x")
    with pytest.raises(ConfigurationError, match="DMESH_KUBERNETES_PORT"):
        detected()
    monkeypatch.delenv("DMESH_KUBERNETES_PORT")
    monkeypatch.delenv("DMESH_KUBERNETES_SELECTOR")
    monkeypatch.setenv("DMESH_KUBERNETES_SERVICE", "svc")
    assert detected().cluster_spec() == {"worker": ["train-0.svc:8470", "train-1.svc:8470"]}
