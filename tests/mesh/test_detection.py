"""GPUs: what NVML or the file system shows, and nothing else."""

import pytest

from dmesh.devices import detection
from dmesh.devices.detection import Gpu, detect_gpus, gpus_from_nvml, gpus_from_proc, visible_gpus

THREE = tuple(Gpu(i, "A100", f"GPU-{i}{i}-x") for i in range(3))


class FakeNvml:
    """The driver's library, as ctypes would show it."""

    def __init__(self, names, init=0, count=0, broken=()):
        self.names, self.init, self.count, self.broken = names, init, count, broken
        self.open = 0

    def nvmlInit_v2(self):
        if self.init == 0:
            self.open += 1
        return self.init

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.names)
        return self.count

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1 + index.value
        return 15 if index.value in self.broken else 0

    def nvmlDeviceGetName(self, handle, buffer, length):
        buffer.value = self.names[handle.value - 1].encode()
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, length):
        buffer.value = f"GPU-{handle.value}".encode()
        return 0 if handle.value != 2 else 999


def test_nvml():
    library = FakeNvml(["A100", "H100"])
    assert gpus_from_nvml(library) == (Gpu(0, "A100", "GPU-1"), Gpu(1, "H100", ""))
    assert library.open == 0


def test_nvml_leaves_out_what_does_not_answer():
    library = FakeNvml(["A100", "A100", "H100"], broken=[1])
    assert gpus_from_nvml(library) == (Gpu(0, "A100", "GPU-1"), Gpu(1, "H100", "GPU-3"))


@pytest.mark.parametrize("library", [FakeNvml(["A100"], init=9), FakeNvml(["A100"], count=1), object()])
def test_nvml_that_does_not_work(library):
    assert gpus_from_nvml(library) is None
    assert getattr(library, "open", 0) == 0


def test_nvml_without_gpus():
    assert gpus_from_nvml(FakeNvml([])) == ()


def gpu_folder(root, address, text):
    folder = root / "proc/driver/nvidia/gpus" / address
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "information").write_text(text)


def test_proc(tmp_path):
    assert gpus_from_proc(tmp_path) == ()
    gpu_folder(tmp_path, "0000:02:00.0", "Model: \t T4\nGPU UUID: GPU-b\nDevice Minor: \t 1\n")
    gpu_folder(tmp_path, "0000:01:00.0", "Model: \t NVIDIA A100: 80GB\nGPU UUID: \t GPU-a\nDevice Minor: 0\n")
    gpu_folder(tmp_path, "0000:03:00.0", "garbage")
    gpu_folder(tmp_path, "0000:04:00.0", None)
    assert gpus_from_proc(tmp_path) == (), "a container may see the host's GPUs in /proc without having them"
    (tmp_path / "dev").mkdir()
    for minor in range(3):
        (tmp_path / f"dev/nvidia{minor}").touch()
    assert gpus_from_proc(tmp_path) == (Gpu(0, "NVIDIA A100: 80GB", "GPU-a"), Gpu(1, "T4", "GPU-b"))


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        (" 2, 0 ", [2, 0]),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-22", [2]),
        ("GPU-", []),
        ("A100", []),
        ("NoDevFiles", []),
        ("00", [0]),
    ],
)
def test_cuda_visible_devices(selection, chosen):
    found = visible_gpus(THREE, selection)
    assert [gpu.uuid for gpu in found] == [THREE[i].uuid for i in chosen]
    assert [gpu.index for gpu in found] == list(range(len(chosen)))


def test_the_environment_selects(monkeypatch):
    monkeypatch.setattr(detection, "_physical_gpus", lambda: THREE)
    assert len(detect_gpus({})) == 3
    assert len(detect_gpus({"CUDA_VISIBLE_DEVICES": "0,1"})) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert detect_gpus()[0].uuid == THREE[2].uuid


def test_this_machine_is_looked_at_without_harm():
    assert isinstance(detect_gpus({}), tuple)
