"""What every resolver does, the three of clouds do, too."""

from collections.abc import Sequence

import pytest

from dmesh.distribute.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesServiceResolver,
    TPUClusterResolver,
)
from dmesh.testing.resolvers import ResolverConformance


class Cluster(ResolverConformance):
    hosts: Sequence[str]

    def expected_cluster(self):
        return {"worker": [f"{host}:8470" for host in self.hosts]}

    def change_cluster(self):
        self.add(f"10.0.0.{len(self.hosts)}")

    def add(self, host):
        raise NotImplementedError


class TestTpuConformance(Cluster):
    @pytest.fixture(autouse=True)
    def _system(self, cloud, policy):
        self.cloud, self.policy, self.hosts = cloud, policy, []
        self.secrets = (cloud.credentials().token,)
        self.add("10.0.0.0")

    def add(self, host):
        self.hosts += [host, f"{host}1"]
        self.cloud.apis.add_tpu("my-tpu", "v2-32", self.hosts)

    def make_resolver(self):
        return TPUClusterResolver("my-tpu", credentials=self.cloud.credentials(), policy=self.policy)


class TestTpuAddressesConformance(Cluster):
    hosts = ("10.0.0.1", "10.0.0.2")

    def change_cluster(self):
        return False

    def make_resolver(self):
        return TPUClusterResolver("grpc://10.0.0.1,10.0.0.2")


class TestGceConformance(Cluster):
    @pytest.fixture(autouse=True)
    def _system(self, cloud, policy):
        self.cloud, self.policy, self.hosts = cloud, policy, []
        self.secrets = (cloud.credentials().token,)
        self.add("10.0.0.0")

    def add(self, host):
        self.hosts.append(host)
        self.cloud.apis.add_instance(f"vm-{host}", host, group="group")

    def make_resolver(self):
        return GCEClusterResolver(
            "my-project", "us-central1-b", "group", 8470, credentials=self.cloud.credentials(),
            discovery_url=self.cloud.apis.discovery_url, policy=self.policy,
        )  # fmt: skip


class TestKubernetesConformance(Cluster):
    @pytest.fixture(autouse=True)
    def _system(self, kubernetes, in_pod, policy):
        in_pod("pod-10.0.0.0")
        self.kubernetes, self.policy, self.hosts = kubernetes, policy, []
        self.secrets = (kubernetes.token,)
        self.add("10.0.0.0")

    def add(self, host):
        self.hosts.append(host)
        self.kubernetes.add_pod(f"pod-{host}", host, labels={"job-name": "tensorflow"})

    def make_resolver(self):
        return KubernetesClusterResolver(policy=self.policy)


class TestKubernetesServiceConformance(Cluster):
    hosts = ("train-0.svc", "train-1.svc")

    @pytest.fixture(autouse=True)
    def _system(self, monkeypatch):
        monkeypatch.setenv("HOSTNAME", "train-1")

    def change_cluster(self):
        return False

    def make_resolver(self):
        return KubernetesServiceResolver("svc", 2)


del Cluster  # a base only
