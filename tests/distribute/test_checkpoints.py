"""Checkpoints: what was saved comes back; a file is whole or not there; what does not fit changes nothing."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dmesh
from dmesh.errors import ArgumentTypeError, CheckpointError
from dmesh.testing import FakeCluster
from dmesh.train import Checkpoint, CheckpointManager, latest_checkpoint


def model():
    return Checkpoint(
        weights=[dmesh.Variable(np.arange(3.0)), dmesh.Variable(np.ones((2, 2), ml_dtypes.bfloat16))],
        step=np.array(7),
        optimizer=Checkpoint(momentum={"a": dmesh.Variable(2.5)}),
        file=dmesh.Variable(1),
    )


def test_values_come_back(tmp_path):
    saved = model()
    path = saved.save(tmp_path / "new" / "ckpt")
    assert path == str(tmp_path / "new" / "ckpt-1.npz") == latest_checkpoint(tmp_path / "new")
    assert saved.save(tmp_path / "new" / "ckpt").endswith("ckpt-2.npz")
    other = model()
    other.weights[0].assign(np.zeros(3))
    other.weights[1].assign(np.zeros((2, 2), ml_dtypes.bfloat16))
    other.step[...] = 0
    other.optimizer.momentum["a"].assign(0.0)
    other.restore(path)
    assert other.weights[0].numpy().tolist() == [0.0, 1.0, 2.0]
    assert other.weights[1].dtype == ml_dtypes.bfloat16
    assert other.weights[1].numpy().astype(float).tolist() == [[1, 1], [1, 1]]
    assert (int(other.step), float(other.optimizer.momentum["a"])) == (7, 2.5)
    assert sorted(other.values()) == ["file", "optimizer/momentum/a", "step", "weights/0", "weights/1"]
    assert other.save(tmp_path / "ckpt").endswith("ckpt-2.npz"), "numbers go on after those restored"


def test_what_was_restored_can_be_asserted(tmp_path):
    a, b = dmesh.Variable(1.0), dmesh.Variable(2.0)
    path = Checkpoint(a=a, b=b).write(file_prefix=tmp_path / "c", options=None)
    whole = Checkpoint(a=a, b=b)
    for status in (whole.restore(save_path=path, options=None), whole.read(save_path=path)):
        for method in (
            status.assert_consumed, status.assert_existing_objects_matched, status.assert_nontrivial_match,
            status.expect_partial,
        ):  # fmt: skip
            assert method() is status
    a.assign(5.0)
    part = Checkpoint(a=a).restore(path)
    assert float(a) == 1.0
    assert part.assert_existing_objects_matched() is part.assert_nontrivial_match() is part.expect_partial()
    for error in (AssertionError, CheckpointError):
        with pytest.raises(error, match=r"nothing was given the value of b in .*c"):
            part.assert_consumed()
    with pytest.raises(AssertionError, match="the Checkpoint is empty"):
        Checkpoint().restore(path).assert_nontrivial_match()


def test_restoring_no_checkpoint_changes_nothing(tmp_path):
    a = dmesh.Variable(1.0)
    manager = CheckpointManager(Checkpoint(a=a), tmp_path, max_to_keep=2)
    status = manager.checkpoint.restore(manager.latest_checkpoint)
    assert status.expect_partial() is status
    for method in (
        status.assert_consumed, status.assert_existing_objects_matched, status.assert_nontrivial_match,
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="no checkpoint was given"):
            method()
    assert float(a) == 1.0


def test_a_directory_that_cannot_be_read_does_not_pass_for_one_without_checkpoints(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(OSError, match="name too long"):
        latest_checkpoint(tmp_path / ("x" * 300))


def test_a_manager_keeps_the_latest(tmp_path):
    begun = []
    count = dmesh.Variable(0)
    manager = CheckpointManager(
        Checkpoint(count=count), tmp_path / "c", max_to_keep=2, init_fn=lambda: begun.append(1)
    )
    assert manager.restore_or_initialize() is None
    assert (begun, manager.latest_checkpoint, manager.checkpoints) == ([1], None, [])
    for _ in range(11):
        count.assign_add(1)
        manager.save()
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-10.npz", "ckpt-11.npz"]
    count.assign(0)
    assert manager.restore_or_initialize() == manager.latest_checkpoint == f"{manager.directory}/ckpt-11.npz"
    assert int(count) == 11
    assert begun == [1]
    assert CheckpointManager(Checkpoint(), tmp_path / "c", 1, None, "other").latest_checkpoint is None


def test_a_manager_saves_at_intervals(tmp_path):
    step = dmesh.Variable(0)

    def manager(**more):
        return CheckpointManager(
            Checkpoint(step=step), tmp_path / "c", None, step_counter=step, checkpoint_interval=2, **more
        )

    first = manager()
    assert first.checkpoint_interval == 2
    assert str(first.save()).endswith("ckpt-1.npz")  # the first one, whatever the step
    assert first.save(check_interval=True, options=None) is None
    step.assign_add(1)
    assert first.save() is None
    assert str(first.save(check_interval=False)).endswith("ckpt-2.npz")
    step.assign_add(2)
    assert str(first.save()).endswith("ckpt-3.npz")
    second = manager()
    step.assign(0)
    assert second.restore_or_initialize() == first.latest_checkpoint
    assert second.save() is None, "step 3 was saved"
    third = manager(last_checkpoint_step=2)
    assert third.save() is None
    step.assign_add(1)
    assert str(third.save(checkpoint_number=step)).endswith("ckpt-4.npz")  # a variable's value


def test_a_manager_keeps_a_checkpoint_for_every_few_hours(tmp_path):
    manager = CheckpointManager(Checkpoint(a=np.zeros(1)), tmp_path, 2, keep_checkpoint_every_n_hours=1.5)
    for hour in (0, 1, 1.2, 1.7, 2.2, 3.1, 3.3, 3.4):
        path = manager.save()
        os.utime(path, (1e9, 1e9 + 3600 * hour))
    kept = [os.path.basename(path) for path in manager.checkpoints]
    assert kept == ["ckpt-1.npz", "ckpt-4.npz", "ckpt-7.npz", "ckpt-8.npz"]


def test_what_does_not_fit_changes_nothing(tmp_path):
    a, b = dmesh.Variable(np.zeros(2)), dmesh.Variable(np.zeros(3))
    path = Checkpoint(a=dmesh.Variable(np.ones(2)), b=dmesh.Variable(np.ones(4))).save(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"x-1.npz cannot be restored: b is float64 of shape \(3,\)"):
        Checkpoint(a=a, b=b).restore(path)
    with pytest.raises(CheckpointError, match="has no value of c; it has a, b"):
        Checkpoint(a=a, c=b).restore(path)
    with pytest.raises(CheckpointError, match="float32"):
        Checkpoint(a=dmesh.Variable(np.zeros(2, np.float32))).restore(path)
    assert a.numpy().tolist() == [0, 0]
    Checkpoint(a=a).restore(path)  # a part of it
    assert a.numpy().tolist() == [1, 1]


def test_a_damaged_file_is_an_error(tmp_path):
    path = Checkpoint(a=np.arange(1000.0)).save(tmp_path / "x")
    content = Path(path).read_bytes()
    for damaged in (content[:100], content[:-40], content[:2000] + b"\xff" * 8 + content[2008:], b""):
        Path(path).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint(a=np.zeros(1000)).restore(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpoint(a=np.zeros(1000)).restore(tmp_path / "nothing.npz")


def test_a_failed_write_leaves_what_is_there(tmp_path):
    checkpoint = Checkpoint(a=np.zeros(2))
    path = checkpoint.write(tmp_path / "x.npz")
    before = Path(path).read_bytes()
    with pytest.raises(ValueError, match="Object arrays"):
        Checkpoint(a=np.zeros(2), b=np.array([None])).write(path)
    assert Path(path).read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Checkpoint(a=3).values(),
            ArgumentTypeError,
            "a of a checkpoint is a int; expected a dmesh.Var",
        ),
        (lambda: Checkpoint(a={"b/c": np.ones(1)}).values(), ArgumentTypeError, "has a slash"),
        (
            lambda: CheckpointManager({}, "x", 1),
            ArgumentTypeError,
            "must be a dmesh.train.Checkpoint, got dict",
        ),
        (lambda: CheckpointManager(Checkpoint(), "x", 0), CheckpointError, "at least 1"),
        (
            lambda: CheckpointManager(Checkpoint(), "x", 1, checkpoint_name="a/b"),
            CheckpointError,
            "beginning of a file's name",
        ),
        (
            lambda: CheckpointManager(Checkpoint(), "x", 1, checkpoint_interval=2),
            CheckpointError,
            "checkpoint_interval needs step_counter",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_structure_that_contains_itself_is_refused():
    checkpoint = Checkpoint(a=[np.zeros(1)])
    checkpoint.a.append(checkpoint)
    with pytest.raises(ArgumentTypeError, match="a/1/a of a checkpoint contains itself"):
        checkpoint.values()


def test_variables_that_replicas_combine_are_saved_combined(tmp_path):
    def program():
        strategy = dmesh.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            total = dmesh.Variable(
                0.0,
                synchronization=dmesh.VariableSynchronization.ON_READ,
                aggregation=dmesh.VariableAggregation.SUM,
            )
        strategy.run(lambda: total.assign_add(2.0) and None)
        return Checkpoint(total=total).values()["total"].item()

    with FakeCluster(2, num_cpu_devices=2, timeout=20.0) as cluster:
        assert cluster.run(program) == [8.0, 8.0]
