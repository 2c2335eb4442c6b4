"""Options that programs written for TensorFlow pass, and former names of strategies."""

import pytest

import dmesh
from dmesh.data.experimental import AutoShardPolicy, DistributeOptions
from dmesh.distribute import RunOptions, experimental
from dmesh.distribute.experimental import CommunicationImplementation, CommunicationOptions
from dmesh.errors import ArgumentTypeError, StrategyTypeError, StrategyValueError
from dmesh.testing import FakeCluster
from dmesh.v1.topology_pb2 import TPUHardwareFeature


def test_options_are_merged_where_they_are_not_the_default():
    own = CommunicationOptions(bytes_per_pack=1000, timeout_seconds=3.0, implementation="ring")
    assert own.merge(None) == own
    assert own.merge(CommunicationOptions()) == own
    others = CommunicationOptions(7, 2.0, CommunicationImplementation.NCCL)
    assert own.merge(others) == others
    assert own.merge(CommunicationOptions(timeout_seconds=2.0)) == CommunicationOptions(1000, 2.0, "RING")
    with pytest.raises(StrategyTypeError, match="must be CommunicationOptions or None, got int"):
        own.merge(7)


def test_an_unknown_implementation_is_refused():
    assert CommunicationOptions(implementation="nccl").implementation is CommunicationImplementation.NCCL
    assert experimental.CollectiveCommunication is CommunicationImplementation
    with pytest.raises(StrategyValueError, match="one of AUTO, RING, NCCL, got 'gloo'"):
        CommunicationOptions(implementation="gloo")


def test_hints_are_options_by_their_former_name():
    with pytest.deprecated_call(match="use CommunicationOptions"):
        hints = experimental.CollectiveHints(bytes_per_pack=10, timeout_seconds=2.0)
    assert CommunicationOptions().merge(hints) == CommunicationOptions(10, 2.0)
    with pytest.deprecated_call(), pytest.raises(StrategyValueError):
        experimental.CollectiveHints(-1)


def test_the_former_multi_worker_strategy_trains_in_step(caplog):
    def program():
        strategy = experimental.MultiWorkerMirroredStrategy(CommunicationImplementation.RING)
        assert isinstance(strategy, dmesh.distribute.MultiWorkerMirroredStrategy)
        return float(strategy.reduce("SUM", strategy.run(lambda: 2.0), axis=None))

    with FakeCluster(2, timeout=20.0) as cluster:
        assert cluster.run(program) == [4.0, 4.0]
    assert "use dmesh.distribute.MultiWorkerMirroredStrategy" in caplog.text


def test_num_devices_of_a_dataset():
    options = dmesh.data.Options()
    assert options.experimental_distribute.num_devices is None
    options.experimental_distribute.num_devices = 4
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    assert repr(options.experimental_distribute).endswith("num_devices=4)")
    dataset = dmesh.data.Dataset.range(3).with_options(options)
    assert dataset.options() == options
    other = DistributeOptions()
    other.auto_shard_policy = AutoShardPolicy.OFF
    assert other != options.experimental_distribute
    with pytest.raises(ArgumentTypeError):
        other.num_devices = "four"


def test_options_of_a_compiler_are_taken():
    options = dmesh.tpu.XLAOptions(enable_xla_dynamic_padder=False)
    assert options == (True, False, False)
    strategy = dmesh.distribute.get_strategy()
    assert strategy.run(lambda: 3, options=RunOptions(experimental_xla_options=options)) == 3


def test_hardware_features():
    feature = dmesh.tpu.experimental.HardwareFeature
    assert feature(None).embedding_feature is feature.EmbeddingFeature.UNSUPPORTED
    proto = TPUHardwareFeature(embedding_feature=TPUHardwareFeature.EMBEDDING_FEATURE_V2)
    assert feature(proto).embedding_feature is feature.EmbeddingFeature.V2
