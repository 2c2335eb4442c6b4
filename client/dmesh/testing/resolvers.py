"""Suite of tests that every cluster resolver passes, to run on yours.

```python
from dmesh.testing.resolvers import ResolverConformance

class TestMyResolver(ResolverConformance):
    def make_resolver(self):
        return MyResolver()

    def expected_cluster(self):
        return {"worker": ["host1:8470", "host2:8470"]}

    def change_cluster(self):
        my_fake_system.start_host("host3")
```

It does not import pytest; pytest finds the tests in the class that derives from this one. What has to be set
up, such as environment variables or a server, a fixture of that class with `autouse=True` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.train import ClusterSpec


class ResolverConformance:
    """The contract of `dmesh.distribute.cluster_resolver.ClusterResolver`."""

    secrets: tuple[str, ...] = ()
    """Secrets that must not be seen where the resolver is printed."""

    def make_resolver(self) -> ClusterResolver:
        """Make a resolver of a cluster that has at least one task."""
        raise NotImplementedError(f"{type(self).__name__} must define make_resolver()")

    def expected_cluster(self) -> Mapping[str, object]:
        """Return what makes the cluster's spec, as it is now."""
        raise NotImplementedError(f"{type(self).__name__} must define expected_cluster()")

    def change_cluster(self) -> bool | None:
        """Add or removes a task; `expected_cluster` is another one then. Returns False if that cannot be."""
        raise NotImplementedError(f"{type(self).__name__} must define change_cluster()")

    def test_it_knows_the_cluster(self) -> None:
        """The spec is a `ClusterSpec` of its own, and the same if nothing has changed."""
        resolver = self.make_resolver()
        spec = resolver.cluster_spec()
        assert isinstance(spec, ClusterSpec)
        assert spec == self.expected_cluster()
        assert resolver.cluster_spec() == spec

    def test_it_asks_again(self) -> None:
        """Changes are in the next answer; an answer that was given before stays as it is."""
        resolver = self.make_resolver()
        before = resolver.cluster_spec()
        shape = before.as_dict()
        if self.change_cluster() is False:
            return
        assert before == shape
        assert resolver.cluster_spec() == self.expected_cluster() != shape

    def test_every_task_has_a_master_url(self) -> None:
        """It is the task's address, behind the protocol: the caller's, or else the resolver's."""
        resolver = self.make_resolver()
        spec = resolver.cluster_spec()
        for job in spec.jobs:
            for index in spec.task_indices(job):
                address = spec.task_address(job, index)
                assert resolver.master(job, index, "layer") == f"layer://{address}"
                assert resolver.master(task_type=job, task_id=index) == (
                    f"{resolver.rpc_layer}://{address}" if resolver.rpc_layer else address
                )

    def test_the_master_is_a_task_or_nobody(self) -> None:
        """Without arguments, it is empty, or the URL of a task."""
        resolver = self.make_resolver()
        master = resolver.master()
        assert isinstance(master, str)
        spec = resolver.cluster_spec()
        addresses = {address for job in spec.jobs for address in spec.job_tasks(job)}
        assert not master or master.rpartition("://")[2] in addresses

    def test_an_unknown_task_is_an_error(self) -> None:
        """It is a ValueError, of a job that is not there and of a task that is not there."""
        resolver = self.make_resolver()
        [*jobs] = resolver.cluster_spec().jobs
        for job, index in (("no-such-job", 0), (jobs[0], 999_999)):
            try:
                master = resolver.master(job, index)
            except ValueError:
                continue
            raise AssertionError(f"master({job!r}, {index}) is {master!r}; expected a ValueError")

    def test_it_knows_which_task_this_is_or_says_that_it_does_not(self) -> None:
        """`task_type` is one of the jobs or None; `task_id` one of its tasks or None."""
        resolver = self.make_resolver()
        spec = resolver.cluster_spec()
        assert resolver.task_type is None or resolver.task_type in spec.jobs
        if resolver.task_id is not None:
            assert type(resolver.task_id) is int
            assert resolver.task_type is None or resolver.task_id in spec.task_indices(resolver.task_type)

    def test_it_keeps_its_arguments(self) -> None:
        """`task_id` and `rpc_layer` can be set; `task_type`, too, unless that is a RuntimeError."""
        resolver = self.make_resolver()
        resolver.task_id = 0
        resolver.rpc_layer = "layer"
        assert (resolver.task_id, resolver.rpc_layer) == (0, "layer")
        job = resolver.cluster_spec().jobs[-1]
        try:
            resolver.task_type = job
        except RuntimeError:
            return
        assert resolver.task_type == job

    def test_accelerators_are_counted_by_type(self) -> None:
        """Of all, and of one task."""
        resolver = self.make_resolver()
        job = resolver.cluster_spec().jobs[0]
        index = resolver.cluster_spec().task_indices(job)[0]
        for counts in (resolver.num_accelerators(), resolver.num_accelerators(job, index, config_proto=None)):
            assert isinstance(counts, dict)
            for kind, count in counts.items():
                assert kind.isupper()
                assert count >= 0

    def test_the_environment_is_text(self) -> None:
        """Empty for most."""
        assert isinstance(self.make_resolver().environment, str)

    def test_it_does_not_reveal_secrets(self) -> None:
        """Neither where it is printed, nor in its spec."""
        resolver = self.make_resolver()
        for secret in self.secrets:
            assert secret not in f"{resolver!r} {resolver} {resolver.cluster_spec()}"


__all__ = ["ResolverConformance"]
