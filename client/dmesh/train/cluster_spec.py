"""Tasks of a cluster and their addresses: `ClusterSpec`, as `tf.train.ClusterSpec` has it.

```python
spec = dmesh.train.ClusterSpec({"worker": ["host1:10000", "host2:10000"], "ps": {1: "host3:10000"}})
spec.task_address("worker", 1)      # host2:10000
spec.as_dict()                      # {'worker': ['host1:10000', 'host2:10000'], 'ps': {1: 'host3:10000'}}
```
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import SupportsIndex

from dmesh.errors import ArgumentTypeError, ClusterSpecError

MOST_TASKS = 1_000_000
"""Tasks that a job may have, and one more than the highest index."""

Addresses = list[str] | tuple[str, ...] | Mapping[int, str]
"""Addresses of a job's tasks: of all, by index, or of some, as a mapping from index to address."""


class ClusterSpec:
    """Jobs by name, each with the addresses of its tasks by index.

    Addresses are text, which this class does not interpret.

    Args:
        cluster: For each job a list (or tuple) of its tasks' addresses, or a mapping from task index to
            address if not all of them are known; or another ClusterSpec, which is copied.

    Raises:
        ArgumentTypeError: It is none of these, or a name or an address is not text.
        ClusterSpecError: A task index is not an integer from 0, or there twice.
    """

    def __init__(self, cluster: Mapping[str, Addresses] | ClusterSpec) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
            return
        if not isinstance(cluster, Mapping):
            raise ArgumentTypeError(
                f"a cluster must be a dict from job names to lists of addresses, or a ClusterSpec; got "
                f"{type(cluster).__name__}"
            )
        self._jobs = {}
        for name, tasks in cluster.items():
            job = _text(name, f"the job name {name!r:.200}")
            self._jobs[job] = _read_tasks(job, tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks of a job are known.

        Raises:
            ClusterSpecError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, sorted.

        Raises:
            ClusterSpecError: There is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
            ClusterSpecError: There is no such job or task.
        """
        job = self._job(job_name)
        try:
            return job[task_index]
        except (KeyError, TypeError):
            known = ", ".join(map(str, sorted(job)[:20])) or "none"
            raise ClusterSpecError(
                f"the job {job_name!r} has no task {task_index!r}; its tasks are: {known}"
                f"{', ...' if len(job) > 20 else ''}"
            ) from None

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks, by index; None for unknown ones.

        Raises:
            ClusterSpecError: There is no such job.
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns what makes an equal ClusterSpec.

        Returns:
            For each job a list of addresses; a dict from index to address if not all are known or there are
            none.
        """
        shape: dict[str, list[str] | dict[int, str]] = {}
        for name, tasks in self._jobs.items():
            indices = sorted(tasks)
            dense = bool(indices) and indices[-1] + 1 == len(indices)
            shape[name] = [tasks[i] for i in indices] if dense else {i: tasks[i] for i in indices}
        return shape

    def __bool__(self) -> bool:
        """Return whether there is any job."""
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        """Return whether `other`, a ClusterSpec or what makes one, has the same tasks and addresses."""
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            try:
                return self._jobs == ClusterSpec(other)._jobs
            except (ArgumentTypeError, ClusterSpecError):
                return False
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it is equal to dicts, which have none either

    def __repr__(self) -> str:
        jobs = ", ".join(f"{name!r}: {tasks!r}" for name, tasks in sorted(self.as_dict().items()))
        return f"ClusterSpec({{{jobs}}})"

    def _job(self, name: str) -> dict[int, str]:
        try:
            return self._jobs[name]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._jobs)) or "none"
            raise ClusterSpecError(
                f"there is no job {name!r:.200} in the cluster; its jobs are: {known}"
            ) from None


def _read_tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        pairs: list[tuple[object, object]] = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = list(tasks.items())
    else:
        raise ArgumentTypeError(
            f"the tasks of job {job!r} must be a list of addresses or a dict from task indices to addresses; "
            f"got {type(tasks).__name__}"
        )
    read: dict[int, str] = {}
    for key, address in pairs:
        index = _index(job, key)
        if index in read:
            raise ClusterSpecError(f"task {index} of job {job!r} is there twice; each index has one address")
        read[index] = _text(address, f"the address of task {index} of job {job!r}")
    return read


def _index(job: str, key: object) -> int:
    index = -1
    if isinstance(key, str):  # JSON, and so TF_CONFIG, knows no other keys
        index = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
    elif isinstance(key, SupportsIndex) and not isinstance(key, bool):
        index = operator.index(key)
    if not 0 <= index < MOST_TASKS:
        raise ClusterSpecError(
            f"{key!r:.200} is not a task index of job {job!r}: expected an integer from 0 to {MOST_TASKS - 1}"
        )
    return index


def _text(value: object, what: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ArgumentTypeError(f"{what} is bytes that are not UTF-8: {value!r:.200}") from None
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{what} must be a str, got {value!r:.200}")
    return value


__all__ = ["ClusterSpec"]
