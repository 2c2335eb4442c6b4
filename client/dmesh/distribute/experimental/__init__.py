"""The names of `tf.distribute.experimental`: options, partitioners, and former names of strategies."""

from __future__ import annotations

from dmesh.distribute.experimental import partitioners
from dmesh.distribute.experimental.former import CollectiveHints, MultiWorkerMirroredStrategy, TPUStrategy
from dmesh.distribute.input_options import ValueContext
from dmesh.distribute.options import CommunicationImplementation, CommunicationOptions

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "partitioners",
    "TPUStrategy",
    "ValueContext",
]
