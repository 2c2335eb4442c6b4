"""`Settings.load`: every variable, its default, its origin, and each way to get it wrong."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.config.addresses import split_address
from dmesh.config.settings import VARIABLES, Settings, misspelled
from dmesh.errors import ConfigurationError

TWO = {"DTENSOR_JOBS": "host1:10000,host2:10000"}


def refused(environ, *parts):
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(environ)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def test_variables_that_are_almost_spelled_like_one_are_found():
    wrong = {
        "DMESH_BAKEND": "DMESH_BACKEND",
        "DTENSOR_JOB": "DTENSOR_JOBS",
        "DMESH_TLS_SERVERNAME": "DMESH_TLS_SERVER_NAME",
    }
    right = [
        "DMESH_BACKEND",
        "DMESH_LAUNCHER",
        "DMESH_BENCH_PEERS",
        "DMESH_SERVICE_HOST",
        "DMESH_TOKEN_PORT_8470_TCP_ADDR",
    ]
    assert misspelled(dict.fromkeys([*wrong, *right, "PATH"], "1")) == wrong


# Good values ------------------------------------------------------------------------------------------------


def test_nothing_set_is_local_mode():
    settings = Settings.load({})
    assert settings == Settings()
    assert not settings.multi_client
    assert (settings.num_clients, settings.client_id, settings.job_name) == (1, 0, "localhost")
    assert (settings.init_timeout, settings.shutdown_timeout, settings.collective_timeout) == (300, 60, 300)
    assert set(settings.origins.values()) == {"default"}
    assert settings.origins.keys() == VARIABLES.keys() == set(vars(settings)) - {
        "origins", "own_address", "takes_any_task",
    }  # fmt: skip


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_empty_is_unset(empty):
    assert Settings.load(dict.fromkeys(VARIABLES.values(), empty)) == Settings()


def test_everything_set():
    settings = Settings.load(
        {
            "DTENSOR_JOBS": " host1:10000, [::1]:10001 ,10.0.0.7:65535\n",
            "DTENSOR_CLIENT_ID": " 2 ",
            "DTENSOR_JOB_NAME": "trainer-1.a_b",
            "DTENSOR_ENABLE_HEARTBEAT": "FALSE",
            "DTENSOR_USE_PARALLEL_EXECUTOR": "other",
            "DMESH_COORDINATOR": "[2001:db8::1]:7",
            "DMESH_CLUSTER": "blue",
            "DMESH_BACKEND": "TCP",
            "DMESH_SHARED_MEMORY": "64",
            "DMESH_DATA_PORT": "1",
            "DMESH_BIND_HOST": "[::]",
            "DMESH_INTERFACES": " eth1, eth0.7",
            "DMESH_TOKEN": "s3cret",
            "DMESH_TOKEN_FILE": "/etc/dmesh/token",
            "DMESH_INSECURE": "1",
            "DMESH_TLS_CA": "/tls/ca.pem",
            "DMESH_TLS_CERT": "/tls/cert.pem",
            "DMESH_TLS_KEY": "/tls/key.pem",
            "DMESH_TLS_SERVER_NAME": "coordinator",
            "DMESH_PEER_TLS": "on",
            "DMESH_NUM_CPU_DEVICES": "8",
            "DMESH_NATIVE": "no",
            "DMESH_TUNING": "/etc/dmesh/tuning.json",
            "DMESH_FOLDING": "host",
            "DMESH_INIT_TIMEOUT": "0.5",
            "DMESH_SHUTDOWN_TIMEOUT": "1e3",
            "DMESH_COLLECTIVE_TIMEOUT": "7",
            "DMESH_RESTART_POLICY": "Rejoin",
            "DMESH_HEARTBEAT_INTERVAL": "0.5",
            "DMESH_LEASE": "2",
            "DMESH_STUCK_AFTER": "0",
            "DMESH_TRACE": "/tmp/traces",
            "DMESH_OTEL": "1",
        }
    )
    assert (settings.trace, settings.otel) == ("/tmp/traces", True)
    assert settings.jobs == ("host1:10000", "[::1]:10001", "10.0.0.7:65535")
    assert settings.multi_client
    assert (settings.num_clients, settings.client_id, settings.address) == (3, 2, "10.0.0.7:65535")
    assert (settings.job_name, settings.heartbeat, settings.parallel_executor) == (
        "trainer-1.a_b",
        False,
        "other",
    )
    assert (settings.coordinator, settings.cluster) == ("[2001:db8::1]:7", "blue")
    assert (settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name) == (
        "/tls/ca.pem",
        "/tls/cert.pem",
        "/tls/key.pem",
        "coordinator",
    )
    assert (settings.token_file, settings.insecure, settings.peer_tls) == ("/etc/dmesh/token", True, True)
    assert (settings.native, settings.shared_memory) == (False, 64)
    assert (settings.tuning, settings.folding) == ("/etc/dmesh/tuning.json", "host")
    assert (settings.data_port, settings.bind_host, settings.num_cpu_devices) == (1, "::", 8)
    assert settings.interfaces == ("eth1", "eth0.7")
    assert (settings.init_timeout, settings.shutdown_timeout, settings.collective_timeout) == (0.5, 1000, 7)
    assert (settings.token_file, settings.restart_policy) == ("/etc/dmesh/token", "rejoin")
    assert (settings.heartbeat_interval, settings.lease, settings.stuck_after) == (0.5, 2, 0)
    assert settings.origins == {name: f"environment variable {v}" for name, v in VARIABLES.items()}


def test_peers_that_encrypt_need_certificates():
    files = {"DMESH_TLS_CA": "ca.pem", "DMESH_TLS_CERT": "cert.pem", "DMESH_TLS_KEY": "cert.key"}
    assert Settings.load({**TWO, **files, "DMESH_PEER_TLS": "1"}).peer_tls
    assert not Settings.load({**TWO, **files, "DMESH_PEER_TLS": "0"}).peer_tls
    refused({**TWO, "DMESH_PEER_TLS": "1"}, "DMESH_TLS_CA and DMESH_TLS_CERT and DMESH_TLS_KEY are not set")
    for name in files:
        others = {key: value for key, value in files.items() if key != name}
        refused({**TWO, **others, "DMESH_PEER_TLS": "1"}, "DMESH_PEER_TLS is on", f"but {name} is not set")
    refused({**TWO, **files, "DMESH_PEER_TLS": "perhaps"}, "DMESH_PEER_TLS")


def test_the_backend_comes_from_the_argument_or_the_environment():
    assert Settings.load(TWO).backend == "tcp"
    assert Settings.load({**TWO, "DMESH_BACKEND": " Mpi "}).backend == "mpi"
    chosen = Settings.load({**TWO, "DMESH_BACKEND": "mpi"}, backend="tcp")
    assert (chosen.backend, chosen.origins["backend"]) == ("tcp", "argument backend")
    assert Settings.load(TWO, backend="MPI").backend == "mpi"
    refused({**TWO, "DMESH_BACKEND": "nccl"}, "DMESH_BACKEND is 'nccl'", "expected tcp or mpi")
    for wrong in ("nccl", "", 1):
        with pytest.raises(ConfigurationError, match=r"backend is .*; expected tcp or mpi"):
            Settings.load(TWO, backend=wrong)


def test_mpi_needs_a_job_and_encrypts_nothing():
    refused({"DMESH_BACKEND": "mpi"}, "DMESH_BACKEND is mpi", "DTENSOR_JOBS is not set")
    with pytest.raises(ConfigurationError, match="backend is 'mpi', but DTENSOR_JOBS is not set"):
        Settings.load({}, backend="mpi")
    encrypted = {
        "DMESH_PEER_TLS": "1", "DMESH_TLS_CA": "ca.pem", "DMESH_TLS_CERT": "c.pem", "DMESH_TLS_KEY": "c.key",
    }  # fmt: skip
    refused(
        {**TWO, **encrypted, "DMESH_BACKEND": "mpi"},
        "DMESH_PEER_TLS is on, but MPI does not encrypt its traffic",
    )
    assert Settings.load({**TWO, **encrypted, "DMESH_BACKEND": "mpi"}, backend="tcp").peer_tls


def test_one_job_is_multi_client_mode():
    settings = Settings.load({"DTENSOR_JOBS": "localhost:10000"})
    assert settings.multi_client
    assert (settings.num_clients, settings.job_name) == (1, "worker")


def test_the_token_is_never_shown():
    settings = Settings.load({**TWO, "DMESH_TOKEN": "s3cret"})
    assert settings.token == "s3cret"
    assert "s3cret" not in repr(settings)
    message = refused({"DMESH_TOKEN": "s3 cret"}, "DMESH_TOKEN (not shown)", "secrets.token_urlsafe")
    assert "cret" not in message.replace("secret", "")


def test_pathways_is_accepted_with_a_warning(caplog):
    assert Settings.load({"DTENSOR_USE_PARALLEL_EXECUTOR": "pw"}).parallel_executor == "pw"
    assert "continuing with NumPy" in caplog.text
    caplog.clear()
    Settings.load({"DTENSOR_USE_PARALLEL_EXECUTOR": "tf"})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("1", True), ("True", True), ("yes", True), ("on", True), ("0", False), ("no", False)],
)
def test_heartbeat(text, expected):
    assert Settings.load({"DTENSOR_ENABLE_HEARTBEAT": text}).heartbeat is expected


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:2")
    assert Settings.load().jobs == ("a:1", "b:2")


# DTENSOR_JOBS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ("a:1,b", "entry 1 of DTENSOR_JOBS is 'b': it has no port. Expected HOST:PORT; add one"),
        ("a", "entry 0 of DTENSOR_JOBS is 'a': it has no port"),
        ("a:0", "entry 0 of DTENSOR_JOBS is 'a:0': its port '0' is not from 1 to 65535"),
        ("a:1,a:99999", "entry 1 of DTENSOR_JOBS is 'a:99999': its port '99999' is not from 1 to 65535"),
        ("a:65536", "its port '65536' is not from 1 to 65535"),
        ("a:" + "9" * 5000, "is not from 1 to 65535"),
        ("a:-1", "its port '-1' is not a number"),
        ("a:x", "entry 0 of DTENSOR_JOBS is 'a:x': its port 'x' is not a number"),
        ("a:1_0", "its port '1_0' is not a number"),
        ("a:\u0661\u0662", "is not a number"),
        ("a: 1", "its port ' 1' is not a number"),
        ("a:", "its port '' is not a number"),
        (":1", "it has no host. Expected HOST:PORT; write localhost"),
        ("a b:1", "'a b' is not a host name"),
        ("-a:1", "'-a' is not a host name"),
        ("h\u00f6st:1", "is not a host name"),
        ("http://a:1", "it has a slash. Expected HOST:PORT; leave out the scheme (http://)"),
        ("::1:10000", "it has more than one colon. Expected HOST:PORT; put an IPv6 address in brackets"),
        ("[::1]", "an IPv6 address needs both brackets and a port"),
        ("[::1:10", "an IPv6 address needs both brackets and a port"),
        ("[::1]10", "an IPv6 address needs both brackets and a port"),
        ("[::g]:10", "'::g' is not an IPv6 address"),
        ("[127.0.0.1]:10", "'127.0.0.1' is not an IPv6 address"),
        ("[::1]:0", "its port '0' is not from 1 to 65535"),
        ("a:1,", "entry 1 of DTENSOR_JOBS is empty in 'a:1,'; remove the extra comma"),
        (",a:1", "entry 0 of DTENSOR_JOBS is empty"),
        ("a:1,,b:1", "entry 1 of DTENSOR_JOBS is empty"),
        (",", "entry 0 of DTENSOR_JOBS is empty"),
        (
            "a:1,b:1,a:1",
            "DTENSOR_JOBS lists a:1 more than once, as entries 0 and 2. Each client needs its own address",
        ),
        ("a:1,A:1", "DTENSOR_JOBS lists A:1 more than once"),
        ("a:1,a:01", "DTENSOR_JOBS lists a:01 more than once"),
        ("/bns/a/0,/bns/a/0", "DTENSOR_JOBS lists /bns/a/0 more than once"),
    ],
)
def test_malformed_jobs(jobs, message):
    refused({"DTENSOR_JOBS": jobs}, message)


def test_a_long_list_is_shortened_in_the_message():
    assert (
        len(refused({"DTENSOR_JOBS": ",".join(f"host{i}:1" for i in range(1000)) + ","}, "entry 1000")) < 600
    )


@pytest.mark.parametrize("suffix", ["", ":8888", ":port_name"])
def test_bns_addresses_in_order_of_their_tasks(suffix):
    jobs = [f"/bns/cell/job/{i}{suffix}" for i in range(16)]
    assert Settings.load({"DTENSOR_JOBS": ",".join(jobs)}).jobs == tuple(jobs)
    by_letters = [jobs[0], jobs[1], *jobs[10:], *jobs[2:10]]
    refused(
        {"DTENSOR_JOBS": ",".join(by_letters)},
        f"DTENSOR_JOBS is not sorted: {jobs[15]} comes before {jobs[2]}",
        "Sort BNS addresses by their task number (2 before 10)",
    )


def test_bns_addresses_without_numbers_are_sorted_by_name():
    assert Settings.load({"DTENSOR_JOBS": "/bns/a/x,/bns/b/x"}).num_clients == 2
    refused(
        {"DTENSOR_JOBS": "/bns/b/x,/bns/a/x"}, "DTENSOR_JOBS is not sorted: /bns/b/x comes before /bns/a/x"
    )


@pytest.mark.parametrize("jobs", ["/bns/a/0,/bns/a/chief", "/bns/a/chief,/bns/a/0", "/bns/a/0,host1:10000"])
def test_mixed_bns_addresses_are_an_error_not_a_crash(jobs):
    refused(
        {"DTENSOR_JOBS": jobs}, "DTENSOR_JOBS mixes BNS addresses that end in a task number, such as /bns/a/0"
    )


def test_nobody_can_connect_to_a_bns_address():
    with pytest.raises(
        ConfigurationError, match=r"entry 0 of DTENSOR_JOBS is '/bns/a/0:1'.*resolve only inside Google"
    ):
        split_address("/bns/a/0:1", "entry 0 of DTENSOR_JOBS")


# The other variables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["-1", "2", "one", "1.0", "0x1", "\u0661", "1 0", "9" * 30])
def test_client_id_out_of_range(client):
    message = refused({**TWO, "DTENSOR_CLIENT_ID": client}, f"DTENSOR_CLIENT_ID is {client!r}")
    assert "expected an integer from 0 to 1, because DTENSOR_JOBS has 2 entries" in message


def test_client_id_in_local_mode():
    assert Settings.load({"DTENSOR_CLIENT_ID": "0"}).client_id == 0
    refused({"DTENSOR_CLIENT_ID": "1"}, "DTENSOR_CLIENT_ID is '1', but DTENSOR_JOBS is not set")


@pytest.mark.parametrize("name", ["a/b", "a b", "a:b", "x" * 129, "\u00fc", "a,b", "a|b"])
@pytest.mark.parametrize("variable", ["DTENSOR_JOB_NAME", "DMESH_CLUSTER"])
def test_names(variable, name):
    refused(
        {variable: name}, f"{variable} is", "expected 1 to 128 letters, digits, dots, dashes or underscores"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DTENSOR_ENABLE_HEARTBEAT", "maybe", "DTENSOR_ENABLE_HEARTBEAT is 'maybe'; expected true or false"),
        ("DMESH_COORDINATOR", "nowhere", "DMESH_COORDINATOR is 'nowhere': it has no port"),
        ("DMESH_COORDINATOR", "a:0", "DMESH_COORDINATOR is 'a:0': its port '0' is not from 1 to 65535"),
        ("DMESH_DATA_PORT", "0", "DMESH_DATA_PORT is '0'; expected an integer from 1 to 65535, or unset it"),
        ("DMESH_DATA_PORT", "99999", "DMESH_DATA_PORT is '99999'"),
        ("DMESH_BIND_HOST", "a:1", "DMESH_BIND_HOST is 'a:1'; expected a host name or an IP address"),
        ("DMESH_BIND_HOST", "a/b", "DMESH_BIND_HOST is 'a/b'"),
        (
            "DMESH_INTERFACES",
            "eth0,eth0",
            "DMESH_INTERFACES is 'eth0,eth0'; expected the names of 1 to 8 different",
        ),
        ("DMESH_INTERFACES", "eth0,", "DMESH_INTERFACES is 'eth0,'"),
        ("DMESH_INTERFACES", "../eth0", "DMESH_INTERFACES is '../eth0'"),
        ("DMESH_INTERFACES", "a,b,c,d,e,f,g,h,i", "DMESH_INTERFACES is 'a,b,c,d,e,f,g,h,i'"),
        ("DMESH_NUM_CPU_DEVICES", "-2", "DMESH_NUM_CPU_DEVICES is '-2'; expected an integer from 1 to 65536"),
        ("DMESH_NUM_CPU_DEVICES", "many", "DMESH_NUM_CPU_DEVICES is 'many'"),
        ("DMESH_TOKEN", "\u00e9", "DMESH_TOKEN (not shown)"),
    ],
)
def test_malformed_values(variable, value, message):
    refused({variable: value}, message)


@pytest.mark.parametrize(
    "variable", ["DMESH_INIT_TIMEOUT", "DMESH_SHUTDOWN_TIMEOUT", "DMESH_COLLECTIVE_TIMEOUT"]
)
@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", "5 s"])
def test_malformed_times(variable, value):
    refused({variable: value}, f"{variable} is {value!r}; expected a number of seconds greater than 0")


def test_no_address_in_local_mode():
    with pytest.raises(ConfigurationError, match="DTENSOR_JOBS is not set, so this client has no address"):
        _ = Settings().address


# Laws -------------------------------------------------------------------------------------------------------

hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9]", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda a: f"[{a}]"),
)
ports = st.integers(1, 65535)


@given(hosts, ports)
def test_addresses_are_split_and_joined(host, port):
    assert split_address(f"{host}:{port}", "it") == (host.strip("[]"), port)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_configuration_error(text):
    try:
        host, port = split_address(text, "it")
    except ConfigurationError as error:
        message = str(error)
    else:
        message = f"it is {host}" if host and 1 <= port <= 65535 else "malformed"
    assert message.startswith("it is ")


@given(st.dictionaries(st.sampled_from(sorted(VARIABLES.values())), st.text(max_size=30)))
def test_any_environment_is_settings_or_a_configuration_error(environ):
    try:
        settings = Settings.load(environ)
    except ConfigurationError as error:
        named = re.findall(r"(?:DTENSOR|DMESH)_[A-Z_]+", str(error))
        settings = Settings()
    else:
        named = list(environ)
    assert not environ or set(named) & set(VARIABLES.values())
    assert 0 <= settings.client_id < settings.num_clients


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("DMESH_HEARTBEAT_INTERVAL", "0", "from 0.01 to 3600"),
        ("DMESH_HEARTBEAT_INTERVAL", "soon", "from 0.01 to 3600"),
        ("DMESH_LEASE", "0.05", "from 0.1 to 3600"),
        ("DMESH_LEASE", "3601", "from 0.1 to 3600"),
        ("DMESH_LEASE", "nan", "from 0.1 to 3600"),
        ("DMESH_STUCK_AFTER", "-1", "from 0 to"),
        ("DMESH_RESTART_POLICY", "always", "expected fail-fast or rejoin"),
    ],
)
def test_settings_of_the_cluster_out_of_range(variable, value, expected):
    refused(
        {variable: value},
        f"{variable} is {value!r}",
        expected,
        "unset it" if "POLICY" not in variable else "Unset it",
    )


def test_a_heartbeat_comes_more_often_than_once_a_lease():
    message = refused({"DMESH_HEARTBEAT_INTERVAL": "3", "DMESH_LEASE": "3"}, "DMESH_HEARTBEAT_INTERVAL is 3")
    assert "DMESH_LEASE is 3" in message
    assert Settings.load({"DMESH_HEARTBEAT_INTERVAL": "30"}).lease is None  # the server knows its own lease
