"""What clients on several hosts are given: credentials, addresses, settings."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from dmesh.errors import ConfigurationError, MissingExtraError
from dmesh.launcher import LaunchOptions
from dmesh.launcher.across import PlanAcross, plan_across
from dmesh.launcher.plan import Place

JOBS = ("10.0.0.1:5000", "10.0.0.1:5001", "10.0.0.2:5000")
PLACES = (Place(0, 2, "a"), Place(1, 2, "a"), Place(0, 1, "b"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def plan(tmp_path: Path):
    def make(environment: dict[str, str] | None = None, jobs=JOBS, places=PLACES, **options) -> PlanAcross:
        folder = tmp_path / "made"
        folder.mkdir()
        wanted = LaunchOptions(len(jobs), ("s.py",), **options)
        return plan_across(wanted, jobs, places, environment or {}, {"MINE": "x"}, folder)

    return make


def test_each_client_knows_its_place_and_its_host(plan) -> None:
    clients = plan({"PATH": "/here", "DMESH_LEASE": "9", "DMESH_CLUSTER": ""}).plan.clients
    assert [client.host for client in clients] == ["a", "a", "b"]
    for client, local in zip(clients, ("0", "1", "0"), strict=True):
        given = client.environment
        assert given["DTENSOR_JOBS"] == ",".join(JOBS)
        assert (given["DTENSOR_CLIENT_ID"], given["WORLD_SIZE"]) == (str(client.rank), "3")
        assert (given["LOCAL_RANK"], given["MINE"], given["DMESH_LEASE"]) == (local, "x", "9")
        assert not {"PATH", "OMP_NUM_THREADS", "DMESH_CLUSTER"} & set(given)  # those are the host's own
        assert len(given["DMESH_TOKEN"]) == 64
        assert given["DMESH_TOKEN"] not in repr(client)
    assert [client.environment["LOCAL_WORLD_SIZE"] for client in clients] == ["2", "2", "1"]


def test_certificates_are_made_for_all_addresses_and_the_authoritys_key_is_forgotten(
    plan, home: Path
) -> None:
    from cryptography import x509

    made = plan()
    assert sorted(path.name for path in (home / "made").iterdir()) == ["ca.pem", "run.key", "run.pem"]
    assert set(made.files) == {"DMESH_TLS_CA", "DMESH_TLS_CERT", "DMESH_TLS_KEY"}
    assert made.files["DMESH_TLS_KEY"] not in repr(made)
    certificate = x509.load_pem_x509_certificate(made.files["DMESH_TLS_CERT"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "10.0.0.2"]


def test_no_certificates_are_made_where_they_are_not_needed_or_not_wanted(plan, home: Path) -> None:
    made = plan({"DMESH_INSECURE": "1"})
    assert made.files == {}
    assert made.plan.clients[0].environment["DMESH_INSECURE"] == "1"
    (home / "made").rmdir()
    assert plan(jobs=("127.0.0.1:1", "127.0.0.1:2"), places=(Place(0, 2, "a"), Place(1, 2, "a"))).files == {}


def test_a_host_under_two_names_is_one_that_others_reach(plan) -> None:
    places = (Place(0, 1, "a"), Place(0, 1, "a"))  # a and me@a
    assert plan(jobs=("10.0.0.1:1", "10.0.0.1:2"), places=places).files


def test_without_cryptography_it_is_refused_and_says_what_to_do(plan, monkeypatch) -> None:
    real = builtins.__import__

    def fail(name, *args, **more):
        if name == "dmesh.security" and "authority" in (args[2] or ()):
            raise ImportError("No module named 'cryptography'")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(MissingExtraError) as caught:
        plan()
    for advice in ("pip install 'dmesh[security]'", "DMESH_TLS_CA", "--insecure"):
        assert advice in str(caught.value)


def test_certificates_of_ones_own_are_handed_over_whole_or_refused(plan, home: Path) -> None:
    own = {f"DMESH_TLS_{name}": str(home / name) for name in ("CA", "CERT", "KEY")}
    for path in own.values():
        Path(path).write_text(f"content of {path}")
    assert plan(own).files == {name: f"content of {path}" for name, path in own.items()}
    (home / "made").rmdir()
    with pytest.raises(ConfigurationError, match="DMESH_TLS_KEY must be set, too: client 0 hosts"):
        plan({name: path for name, path in own.items() if name != "DMESH_TLS_KEY"})
    (home / "made").rmdir()
    with pytest.raises(ConfigurationError, match="DMESH_TLS_CA is /no/where, which cannot be read here"):
        plan({**own, "DMESH_TLS_CA": "/no/where"})


def test_a_coordinators_token_is_handed_over_from_this_machines_files(plan, home: Path) -> None:
    (home / "tokens").write_text("a-token-of-the-servers-own\n")
    (home / "tokens").chmod(0o600)
    given = plan({"DMESH_TOKEN_FILE": str(home / "tokens")}, coordinator="h:8470").plan.clients[2].environment
    assert (given["DMESH_TOKEN"], given["DMESH_TOKEN_FILE"]) == ("a-token-of-the-servers-own", "")
    assert given["DMESH_CLUSTER"].startswith("run-")
    (home / "made").rmdir()
    (home / "config" / "dmesh").mkdir(parents=True)
    (home / "tokens").rename(home / "config" / "dmesh" / "token")
    given = plan({"XDG_CONFIG_HOME": str(home / "config")}, coordinator="h:8470").plan.clients[2].environment
    assert given["DMESH_TOKEN"] == "a-token-of-the-servers-own"
    assert not any(name.startswith("DMESH_TLS") for name in given)  # the server's, if it has some


def test_a_setting_that_cannot_work_is_refused_here(plan) -> None:
    with pytest.raises(ConfigurationError, match="DMESH_INIT_TIMEOUT"):
        plan({"DMESH_INIT_TIMEOUT": "soon"})
