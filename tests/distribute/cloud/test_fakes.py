"""The fakes answer as the real services do, and fail when they are told to."""

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from googleapiclient.discovery_cache import get_static_doc
from hypothesis import given, settings
from hypothesis import strategies as st

from dmesh.distribute.cluster_resolver.gce_metadata import MetadataServer
from dmesh.distribute.cluster_resolver.http_exchange import exchange
from dmesh.distribute.cluster_resolver.lookup_policy import Busy, LookupPolicy, parse_retry_after
from dmesh.errors import ClusterLookupError, ClusterLookupUnavailableError, ConfigurationError
from dmesh.testing.cloud import Answer, FakeKubernetes, FakeMetadataServer, FakeService, discovery
from dmesh.testing.cloud.kubernetes import matches

FLAVOR = {"Metadata-Flavor": "Google"}


def ask(url, headers=None, **options):
    return exchange(url, headers=headers, **{"timeout": 60.0, "most_bytes": 2**20} | options)


# Descriptions of Google's APIs ------------------------------------------------------------------------------


def _methods(node, path=()):
    for name, method in node.get("methods", {}).items():
        yield (*path, name), method
    for name, below in node.get("resources", {}).items():
        yield from _methods(below, (*path, name))


@pytest.mark.parametrize(
    ("api", "version", "document"), [("tpu", "v2", discovery.tpu_v2), ("compute", "v1", discovery.compute_v1)]
)
def test_the_apis_are_described_as_google_describes_them(api, version, document):
    ours, real = document("http://localhost/"), json.loads(get_static_doc(api, version))
    assert ours["servicePath"] == real["servicePath"]
    theirs = dict(_methods(real))
    compared = 0
    for name, method in _methods(ours):
        assert method["httpMethod"] == theirs[name]["httpMethod"]
        assert method["path"] == theirs[name]["path"]
        assert method["parameterOrder"] == theirs[name]["parameterOrder"]
        for key, parameter in method["parameters"].items():
            for fact in ("type", "location", "required", "pattern"):
                assert parameter.get(fact) == theirs[name]["parameters"][key].get(fact), (name, key, fact)
        response = real["schemas"][method["response"]["$ref"]]["properties"]
        assert ours["schemas"][method["response"]["$ref"]]["properties"].keys() <= response.keys()
        compared += 1
    assert compared == 2


def test_lists_of_tpus_have_pages(cloud):
    from googleapiclient import discovery as library

    for index in range(5):
        cloud.apis.add_tpu(f"tpu-{index}", "v2-8", [])
    service = library.build(
        "tpu", "v2", credentials=cloud.credentials(), discoveryServiceUrl=cloud.apis.discovery_url,
        cache_discovery=False,
    )  # fmt: skip
    nodes = service.projects().locations().nodes()
    request = nodes.list(parent="projects/my-project/locations/us-central1-b", pageSize=2)
    pages = []
    while request is not None:
        page = request.execute()
        pages.append([node["name"].rpartition("/")[2] for node in page["nodes"]])
        request = nodes.list_next(request, page)
    assert pages == [["tpu-0", "tpu-1"], ["tpu-2", "tpu-3"], ["tpu-4"]]
    service.close()


def test_errors_of_googles_apis_have_their_form(cloud):
    apis = cloud.apis
    token = {"Authorization": f"Bearer {apis.token}"}
    nodes = f"{apis.url}/v2/projects/my-project/locations/us-central1-b/nodes"
    for url, headers, status, name in (
        (nodes, {}, 401, "UNAUTHENTICATED"),
        (f"{nodes}/x", token, 404, "NOT_FOUND"),
        (f"{nodes}?pageToken=x", token, 400, "INVALID_ARGUMENT"),
        (f"{apis.url}/nothing", token, 404, "NOT_FOUND"),
        (f"{apis.url}/discovery/v1/apis/tpu/v9/rest", {}, 404, "NOT_FOUND"),
    ):
        reply = ask(url, headers)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["status"]) == (status, status, name)
        assert error["message"]


# The metadata server ----------------------------------------------------------------------------------------


def test_the_metadata_server_insists_on_its_header():
    with FakeMetadataServer() as server:
        url = f"{server.url}/computeMetadata/v1/instance/zone"
        assert ask(url).status == 403
        assert ask(url, {**FLAVOR, "X-Forwarded-For": "10.0.0.1"}).status == 403
        reply = ask(url, FLAVOR)
        assert (reply.status, reply.headers["metadata-flavor"]) == (200, "Google")
        assert reply.body == b"projects/123456789012/zones/us-central1-b"
        assert ask(f"{server.url}/computeMetadata/v1/instance/none", FLAVOR).status == 404
        assert ask(f"{server.url}/computeMetadata/v9/", FLAVOR).status == 404
        assert ask(url, FLAVOR, method="POST", body=b"x").status == 405
        assert ask(f"{server.url}/").headers["metadata-flavor"] == "Google"


def test_the_metadata_server_lists_what_it_has():
    with FakeMetadataServer(token="secret") as server:
        server.be_tpu_vm("v2-8", ["10.0.0.2"])
        root = f"{server.url}/computeMetadata/v1"
        assert b"attributes/" in ask(f"{root}/instance/", FLAVOR).body
        tree = json.loads(ask(f"{root}/instance/service-accounts/default/?recursive=true", FLAVOR).body)
        assert tree["email"].endswith(".gserviceaccount.com")
        assert tree["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
        token = json.loads(ask(f"{root}/instance/service-accounts/default/token", FLAVOR).body)
        assert token == {"access_token": "secret", "expires_in": 3599, "token_type": "Bearer"}
        assert json.loads(ask(f"{root}/?recursive=true", FLAVOR).body)["project"]["projectId"] == "my-project"


def test_who_asks_the_metadata_server_is_told_what_is_wrong(clock):
    policy = LookupPolicy(clock=clock, sleep=clock.advance)
    with FakeMetadataServer() as server:
        metadata = MetadataServer(policy, {"GCE_METADATA_HOST": server.address})
        assert metadata.in_google_cloud()
        assert (metadata.project(), metadata.zone()) == ("my-project", "us-central1-b")
        assert metadata.attribute("accelerator-type") is None
        assert metadata.tpu_env() == {}
        server.fail(503, 2)
        assert metadata.project() == "my-project"
        server.fail(403, body="no", headers=FLAVOR)
        with pytest.raises(ClusterLookupError, match="refuses project/project-id: 403 no"):
            metadata.project()
        server.fail(200, body="<html>welcome to the hotel")
        with pytest.raises(ClusterLookupError, match="is not a metadata server"):
            metadata.project()
        del server.entries["project/project-id"]
        with pytest.raises(ClusterLookupError, match=r"has no project/project-id. Pass project="):
            metadata.project()
    with pytest.raises(ClusterLookupUnavailableError, match=r"the zone is not given.*refused"):
        metadata.zone()


def test_whether_this_is_googles_cloud_is_known_without_asking(tmp_path):
    product = tmp_path / "product_name"
    assert not MetadataServer(environ={}, product_name=product).in_google_cloud()
    product.write_text("Google Compute Engine\n")
    assert MetadataServer(environ={}, product_name=product).in_google_cloud()
    assert not MetadataServer(environ={"NO_GCE_CHECK": "True"}, product_name=product).in_google_cloud()
    assert MetadataServer(environ={"GCE_METADATA_IP": "10.0.0.1"}).host == "10.0.0.1"
    assert MetadataServer(environ={}).host == "metadata.google.internal"


# Kubernetes -------------------------------------------------------------------------------------------------


def test_kubernetes_answers_with_its_errors_and_pods():
    with FakeKubernetes(token="token") as kubernetes:
        kubernetes.add_pod("a", "10.0.0.1", labels={"app": "x"})
        pods = f"{kubernetes.url}/api/v1/namespaces/default/pods"
        token = {"Authorization": "Bearer token"}
        for url, headers, method, status, reason in (
            (pods, {}, "GET", 401, "Unauthorized"),
            (pods, {"Authorization": "Bearer other"}, "GET", 401, "Unauthorized"),
            (pods, token, "POST", 405, "MethodNotAllowed"),
            (f"{pods}/b", token, "GET", 404, "NotFound"),
            (f"{kubernetes.url}/apis", token, "GET", 404, "NotFound"),
            (f"{pods}?continue=x", token, "GET", 400, "BadRequest"),
        ):
            reply = ask(url, headers, method=method)
            told = json.loads(reply.body)
            assert (reply.status, told["code"], told["reason"], told["kind"]) == (
                status,
                status,
                reason,
                "Status",
            )
        pod = json.loads(ask(f"{pods}/a", token).body)
        assert (pod["kind"], pod["status"]["podIP"]) == ("Pod", "10.0.0.1")
        kubernetes.set_phase("a", "Failed")
        assert json.loads(ask(pods, token).body)["items"][0]["status"]["phase"] == "Failed"


def test_later_pages_are_of_the_list_as_it_was():
    with FakeKubernetes(token="token", page_size=2) as kubernetes:
        for name in "abc":
            kubernetes.add_pod(name, "10.0.0.1")
        token = {"Authorization": "Bearer token"}
        first = json.loads(ask(f"{kubernetes.url}/api/v1/pods", token).body)
        assert first["metadata"]["remainingItemCount"] == 1
        kubernetes.pods.clear()
        more = f"{kubernetes.url}/api/v1/pods?continue={first['metadata']['continue']}"
        rest = json.loads(ask(more, token).body)
        assert [pod["metadata"]["name"] for pod in rest["items"]] == ["c"]
        kubernetes.expire_lists()
        assert ask(more, token).status == 410


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("", True), ("app=train", True), ("app==train", True), ("app=other", False), ("app!=other", True),
        ("none!=other", True), ("app in (a, train),tier", True), ("app notin (a)", True), ("!tier", False),
        ("!none", True), ("tier in ()", False), ("app=train,tier=back", False),
    ],
)  # fmt: skip
def test_label_selectors(selector, chosen):
    assert matches(selector, {"app": "train", "tier": "front"}) == chosen


@settings(max_examples=50)
@given(st.text(alphabet="ab=!,() in", max_size=20))
def test_any_text_is_a_selector_or_refused(selector):
    with contextlib.suppress(ValueError):
        assert matches(selector, {"a": "b"}) in (True, False)


# What they are made of --------------------------------------------------------------------------------------


class Echo(FakeService):
    def answer(self, request):
        return Answer(200, {"path": request.path, "query": request.query, "body": request.body.decode()})


def test_a_service_remembers_fails_and_holds():
    with Echo() as service:
        reply = ask(f"{service.url}/a%20b?c=d", method="POST", body=b"e")
        assert json.loads(reply.body) == {"path": "/a b", "query": {"c": "d"}, "body": "e"}
        service.wait_for_requests(1)
        [request] = service.requests
        assert (request.method, request.headers["content-length"]) == ("POST", "1")
        with pytest.raises(TimeoutError, match="1 of 2 requests"):
            service.wait_for_requests(2, timeout=0.01)
        service.fail(500, path="x")
        assert ask(f"{service.url}/y").status == 200
        assert ask(f"{service.url}/x").status == 500
        assert ask(f"{service.url}/x").status == 200
        service.hold()
        with pytest.raises(TimeoutError):
            ask(service.url, timeout=0.05)
    with pytest.raises(ConnectionError):
        ask(service.url)


def test_an_exchange_follows_nobody_and_ends():
    with Echo() as service:
        service.fail(302, headers={"Location": "http://127.0.0.1:9/"})
        assert ask(service.url).status == 302
        service.fail(200, body="x" * 1000)
        with pytest.raises(ClusterLookupError, match="larger than the limit of 999 bytes"):
            ask(f"{service.url}/?key=secret", most_bytes=999)
        service.fail(200, body="x" * 1000)
        assert len(ask(service.url, most_bytes=1000).body) == 1000
        with pytest.raises(ClusterLookupError, match="not an http") as caught:
            ask("ftp://127.0.0.1/?key=secret")
        assert "secret" not in str(caught.value)
        assert ask(service.url).text(10) == '{"path": "'


def test_an_exchange_ends_although_the_reply_does_not():
    """Each byte comes in time, but the last one never does."""
    over = threading.Event()

    def drip(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not over.wait(0.02):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(TimeoutError, match="takes too long"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.2)
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nworker-0,worker-1",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\nworker-0,worker-1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nworker-0,worker-1",
        b"",
    ],
)
def test_half_a_reply_is_none(reply):
    """A list of which the end is missing must not pass for a shorter one."""

    def break_off(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=break_off, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionError):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join()


def test_the_standard_library_reads_them_too(cloud):
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(f"{cloud.apis.url}/v2/x"):
        pass
    with caught.value as error:
        assert error.code == 401


@pytest.mark.parametrize("limits", [{"attempt": 0}, {"give_up": float("inf")}, {"most_bytes": 0}])
def test_limits_must_be_limits(limits):
    with pytest.raises(ConfigurationError, match="no limits of a request"):
        LookupPolicy(**limits)


def test_an_inquiry_makes_attempts_until_time_is_up(clock):
    policy = LookupPolicy(give_up=20, clock=clock, sleep=clock.advance)
    reasons = [Busy("first"), Busy("second", retry_after=5.0)]

    def attempt():
        if reasons:
            raise reasons.pop(0)
        return "answer"

    before = clock()
    assert policy.ask("it", attempt) == "answer"
    assert 5.4 <= clock() - before <= 5.6

    def never():
        raise Busy("the line is busy", retry_after=1e9)

    with pytest.raises(
        ClusterLookupUnavailableError, match=r"cannot get it: the line is busy. .*1 attempt in"
    ):
        policy.ask("it", never)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        (" 120 ", 120.0),
        ("-1", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("9" * 40, None),
    ],
)
def test_how_long_a_service_wants_to_be_left_alone(text, seconds):
    assert parse_retry_after(text) == seconds
