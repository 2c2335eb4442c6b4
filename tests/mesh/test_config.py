"""TensorFlow's configuration functions: from the environment, at every call."""

import numpy as np
import pytest

from dmesh import config
from dmesh.errors import ConfigurationError


def test_local_mode():
    assert config.jobs() == []
    assert (config.num_clients(), config.client_id()) == (1, 0)
    assert (config.job_name(), config.full_job_name()) == ("localhost", "localhost/replica:0/task:0")
    assert config.heartbeat_enabled()


@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_jobs_are_local_mode(monkeypatch, empty):
    monkeypatch.setenv("DTENSOR_JOBS", empty)
    assert config.jobs() == []
    assert config.job_name() == "localhost"


def test_multi_client_mode(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "host1:10000,host1:10001,host2:10000,host2:10003")
    assert config.jobs() == ["host1:10000", "host1:10001", "host2:10000", "host2:10003"]
    assert (config.num_clients(), config.client_id(), config.job_name()) == (4, 0, "worker")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "3")
    assert config.full_job_name() == "worker/replica:0/task:3"
    assert config.full_job_name(1) == config.full_job_name(task_id=np.int64(1)) == "worker/replica:0/task:1"
    monkeypatch.setenv("DTENSOR_JOB_NAME", "trainer")
    assert config.full_job_name(0) == "trainer/replica:0/task:0"


def test_one_client_alone(monkeypatch):
    """A job list of one entry is not empty, so this is multi-client mode, with its job name."""
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:10000")
    assert (config.num_clients(), config.full_job_name()) == (1, "worker/replica:0/task:0")


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_heartbeat(monkeypatch, text, expected):
    monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", text)
    assert config.heartbeat_enabled() is expected


def test_jobs_is_a_list_of_the_caller(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1")
    config.jobs().clear()
    assert config.num_clients() == 2


@pytest.mark.parametrize("task", [-1, 2, True, "0", 1.0, None])
def test_no_such_task(monkeypatch, task):
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1")
    if task is None:
        monkeypatch.setenv("DTENSOR_CLIENT_ID", "2")
        with pytest.raises(
            ConfigurationError, match="DTENSOR_CLIENT_ID is '2'; expected an integer from 0 to 1"
        ):
            config.full_job_name()
        return
    with pytest.raises(ValueError, match=r"there is no client .*: the 2 clients are 0 to 1"):
        config.full_job_name(task)


def test_no_such_task_in_local_mode():
    with pytest.raises(ConfigurationError, match="there is no client 1: the only client is 0"):
        config.full_job_name(1)


def test_each_function_reads_only_what_it_needs(monkeypatch):
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "x")
    monkeypatch.setenv("DMESH_INIT_TIMEOUT", "x")
    assert (config.num_clients(), config.job_name()) == (1, "localhost")
    with pytest.raises(ConfigurationError, match="DTENSOR_CLIENT_ID is 'x'"):
        config.client_id()
    with pytest.raises(ConfigurationError, match="DTENSOR_CLIENT_ID is 'x'"):
        config.full_job_name()


def test_malformed_jobs_are_found_by_every_function_that_needs_them(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,a:1")
    for function in (
        config.jobs,
        config.num_clients,
        config.client_id,
        config.job_name,
        config.full_job_name,
    ):
        with pytest.raises(ConfigurationError, match="DTENSOR_JOBS lists a:1 more than once"):
            function()
