"""Device names, and who has which devices."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dmesh
from dmesh.devices import device
from dmesh.devices.detection import Gpu
from dmesh.devices.device import (
    DeviceSpec,
    device_name,
    local_devices,
    num_global_devices,
    num_local_devices,
    preferred_device_type,
)
from dmesh.errors import ConfigurationError, DeviceError

FULL = "/job:worker/replica:0/task:1/device:CPU:3"


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    monkeypatch.setattr(device, "detect_gpus", lambda: ())


# Names ------------------------------------------------------------------------------------------------------


def test_to_string():
    assert (
        DeviceSpec("worker", 0, 1, "CPU", 3).to_string() == str(DeviceSpec("worker", 0, 1, "cpu", 3)) == FULL
    )
    assert DeviceSpec().to_string() == ""
    assert DeviceSpec(job="ps", device_type="GPU").to_string() == "/job:ps/device:GPU:*"
    assert DeviceSpec(job="ps", task=2).to_string() == "/job:ps/task:2"
    assert repr(DeviceSpec(device_type="TPU", device_index=0)) == "DeviceSpec.from_string('/device:TPU:0')"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (FULL, FULL),
        ("job:localhost/replica:0/task:0/TPU:0", "/job:localhost/replica:0/task:0/device:TPU:0"),
        ("CPU:0", "/device:CPU:0"),
        ("/gpu:7", "/device:GPU:7"),
        ("GPU", "/device:GPU:*"),
        ("CPU:*", "/device:CPU:*"),
        ("/device:cpu:*", "/device:CPU:*"),
        ("/device:CUSTOM:0", "/device:CUSTOM:0"),
        ("/job:a.b-c_1", "/job:a.b-c_1"),
        ("", ""),
        ("/", ""),
    ],
)
def test_from_string(text, canonical):
    spec = DeviceSpec.from_string(text)
    assert spec.to_string() == canonical
    assert DeviceSpec.from_string(canonical) == spec == DeviceSpec(job="x").parse_from_string(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "foo",
            r"cannot read 'foo' in the device name 'foo'; expected /job:NAME/replica:0/task:N/device:CPU:N",
        ),
        ("/task:x", r"'x' in the device name '/task:x' is not a number"),
        ("/task:-1", "'-1' in the device name"),
        ("/task:\u0661", "is not a number"),
        ("/task:" + "1" * 5000, "is not a number from 0 to 999999999"),
        ("/device:CPU", "cannot read 'device:CPU'"),
        ("/device:CPU:", "is not a number"),
        ("CPU:0/GPU:0", "has more than one device_type; keep one"),
        ("/job:a/job:b", "has more than one job; keep one"),
        ("/device:1:0", "'1' is not a device type"),
        ("/job:/task:0", "'' is not a job name: expected 1 to 128 letters"),
        ("/job:a b", "'a b' is not a job name"),
        ("a|b", "cannot read"),
        (7, "a device name must be a str, got int"),
        (None, "a device name must be a str, got NoneType"),
    ],
)
def test_malformed_names(text, message):
    with pytest.raises(DeviceError, match=message):
        DeviceSpec.from_string(text)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task": -1}, r"task is -1; expected an integer from 0 up"),
        ({"replica": 1.5}, r"replica is 1\.5; expected an integer"),
        ({"device_index": True}, "device_index is True; expected an integer"),
        ({"device_type": 3}, "3 is not a device type"),
        ({"job": "a/b"}, "'a/b' is not a job name"),
        ({"job": "/replica:0/task:1"}, "'/replica:0/task:1' is not a job name"),
        ({"job": "a/replica:0/task:1/device:CPU:0"}, "is not a job name"),
        ({"job": True}, "True is not a job name"),
        ({"device": "CPU"}, "a device name has no part device; its parts are job, replica, task"),
    ],
)
def test_malformed_parts(parts, message):
    with pytest.raises(ValueError, match=message):
        DeviceSpec().replace(**parts)


def test_jobs_as_full_job_name_returns_them(monkeypatch):
    full = DeviceSpec(job="worker/replica:0/task:1", device_type="CPU", device_index=3)
    assert full == DeviceSpec.from_string(FULL)
    assert hash(full) == hash(DeviceSpec.from_string(FULL))
    assert (full.job, full.replica, full.task) == ("worker", 0, 1)
    assert DeviceSpec(job="worker/replica:0/task:1", replica=0, task=1).to_string() == FULL.rpartition("/")[0]
    assert DeviceSpec(job="a").replace(job="worker/replica:0/task:1").task == 1
    with pytest.raises(DeviceError, match=r"job is 'worker/replica:0/task:1', but task is 2; pass only one"):
        DeviceSpec(job="worker/replica:0/task:1", task=2)
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "1")
    assert DeviceSpec(job=dmesh.full_job_name(), device_type="CPU", device_index=3).to_string() == FULL


def test_a_job_that_is_a_number_is_its_text():
    assert DeviceSpec(job=0) == DeviceSpec(job="0") == DeviceSpec.from_string("/job:0")
    assert DeviceSpec(job=0, task=1).job == "0"


def test_values():
    spec = DeviceSpec.from_string(FULL)
    assert (spec.job, spec.replica, spec.task, spec.device_type, spec.device_index) == (
        "worker",
        0,
        1,
        "CPU",
        3,
    )
    assert spec == DeviceSpec("worker", np.int32(0), np.int64(1), "CPU", 3)
    assert spec != spec.replace(task=2)
    assert spec != FULL
    assert spec.replace(device_type="GPU").to_string() == FULL.replace("CPU", "GPU")
    assert spec.replace(device_type=None, device_index=None).to_string() == "/job:worker/replica:0/task:1"
    assert len({spec, DeviceSpec.from_string(FULL)}) == 1
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises(AttributeError):
        spec.task = 2


def test_merging():
    here = DeviceSpec("worker", 0, 1)
    assert here.make_merged_spec(DeviceSpec.from_string("CPU:3")).to_string() == FULL
    assert here.make_merged_spec(DeviceSpec(task=4)).task == 4


indices = st.one_of(st.none(), st.integers(0, 999_999_999))
specs = st.builds(
    DeviceSpec,
    job=st.one_of(st.none(), st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)),
    replica=indices,
    task=indices,
    device_type=st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True),
    device_index=indices,
)


@given(specs)
def test_round_trip(spec):
    assert DeviceSpec.from_string(spec.to_string()) == spec


@given(
    st.one_of(
        st.text(max_size=30), st.from_regex(r"(/?(job|task|device|CPU|[a-z]+)(:[*a-zA-Z0-9]*){0,2}){0,5}")
    )
)
def test_any_text_is_a_name_or_a_device_error(text):
    try:
        spec = DeviceSpec.from_string(text)
    except DeviceError:
        return
    assert DeviceSpec.from_string(spec.to_string()) == spec


# Who has which ----------------------------------------------------------------------------------------------


def names(device_type, client=None):
    return [spec.to_string() for spec in local_devices(device_type, client)]


def test_before_initialization(monkeypatch):
    assert names("cpu") == ["/job:localhost/replica:0/task:0/device:CPU:0"]
    assert names("GPU") == names("TPU") == []
    assert (num_local_devices("CPU"), num_global_devices("CPU"), preferred_device_type()) == (1, 1, "CPU")
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1,c:1")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "2")
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "2")
    assert names("CPU") == [f"/job:worker/replica:0/task:2/device:CPU:{i}" for i in range(2)]
    assert names("CPU", 0) == [f"/job:worker/replica:0/task:0/device:CPU:{i}" for i in range(2)]
    assert num_global_devices("CPU") == 6
    assert device_name() == "/job:worker/replica:0/task:2/device:CUSTOM:0"


def test_gpus_before_initialization(monkeypatch):
    monkeypatch.setattr(device, "detect_gpus", lambda: (Gpu(0, "A100", ""), Gpu(1, "A100", "")))
    assert (num_local_devices("GPU"), preferred_device_type()) == (2, "GPU")
    assert names("GPU")[1] == "/job:localhost/replica:0/task:0/device:GPU:1"


def test_local_mode(alone):
    alone(cpus=4)
    assert names("CPU") == [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]
    assert (num_local_devices("cpu"), num_global_devices("cpu"), preferred_device_type()) == (4, 4, "CPU")
    assert device_name() == "/job:localhost/replica:0/task:0/device:CUSTOM:0"


def test_the_others_devices_are_known(join, monkeypatch):
    join(1, cpus=[2, 4, 1], gpus=[1, 0, 0])
    monkeypatch.setenv("DTENSOR_JOBS", "the environment no longer matters")
    assert (num_local_devices("CPU"), num_global_devices("CPU"), num_global_devices("GPU")) == (4, 7, 1)
    assert names("CPU", 2) == ["/job:worker/replica:0/task:2/device:CPU:0"]
    assert names("GPU") == []
    assert names("GPU", 0) == ["/job:worker/replica:0/task:0/device:GPU:0"]


def test_without_a_coordination_service_all_are_taken_to_be_equal(join):
    join(1, cpus=[2, 4, 1], known=False)
    assert num_global_devices("CPU") == 12
    assert len(names("CPU", 0)) == 4


@pytest.mark.parametrize("function", [local_devices, num_local_devices, num_global_devices])
@pytest.mark.parametrize("kind", ["FPGA", "", None, "CPU:0"])
def test_unknown_types(function, kind):
    with pytest.raises(DeviceError, match=r"device type .* is not known; expected one of CPU, GPU, TPU"):
        function(kind)


def test_unknown_clients(join):
    with pytest.raises(ConfigurationError, match="there is no client 1: the only client is 0"):
        local_devices("CPU", 1)
    join(0, cpus=[1, 1])
    with pytest.raises(ConfigurationError, match="there is no client -1: the 2 clients are 0 to 1"):
        local_devices("CPU", -1)
