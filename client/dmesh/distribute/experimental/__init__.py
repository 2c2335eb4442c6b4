"""The names of `tf.distribute.experimental`: preemption, partitioners, options, former names."""

from __future__ import annotations

from dmesh.distribute.experimental import coordinator, partitioners
from dmesh.distribute.experimental.former import CollectiveHints, MultiWorkerMirroredStrategy, TPUStrategy
from dmesh.distribute.failure_handling.checkpoint_handler import PreemptionCheckpointHandler
from dmesh.distribute.failure_handling.termination import TerminationConfig
from dmesh.distribute.failure_handling.watcher import PreemptionWatcher
from dmesh.distribute.input_options import ValueContext
from dmesh.distribute.options import CommunicationImplementation, CommunicationOptions

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "coordinator",
    "MultiWorkerMirroredStrategy",
    "partitioners",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "TPUStrategy",
    "ValueContext",
]
