"""Clouds and clusters on this machine; no test sees the ones that it may run in."""

import os
import ssl

import pytest
import trustme

from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.testing import ManualClock
from dmesh.testing.cloud import FakeGoogleCloud, FakeKubernetes


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch):
    prefixes = ("TPU_", "CLOUD_TPU_", "KUBE", "GCE_", "GOOGLE_", "JOB_COMPLETION_", "POD_")
    for name in list(os.environ):
        if name.startswith(prefixes) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOSTNAME", "nobody-in-particular")


@pytest.fixture
def cloud(monkeypatch):
    """A cloud that the environment leads to."""
    with FakeGoogleCloud() as cloud:
        monkeypatch.delenv("NO_GCE_CHECK")
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        yield cloud


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def policy(clock):
    """Waits without taking time, but for answers: those come, however busy this machine is."""
    return LookupPolicy(attempt=60.0, give_up=30.0, clock=clock, sleep=clock.advance)


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture
def kubernetes(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FakeKubernetes(context) as kubernetes:
        yield kubernetes


@pytest.fixture
def in_pod(kubernetes, authority, tmp_path, monkeypatch):
    """Gives this process the environment of a pod's."""

    def enter(name="train-0", namespace="default"):
        pem = authority.cert_pem.bytes()
        for key, value in kubernetes.pod_environment(name, tmp_path / "account", pem, namespace).items():
            monkeypatch.setenv(key, value)

    return enter
