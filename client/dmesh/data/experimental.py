"""Names of `tf.data.experimental`: options of distribution, `Optional`, `TFRecordWriter`."""

from __future__ import annotations

from dmesh.data.dataset import AUTOTUNE
from dmesh.data.optional import Optional
from dmesh.data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from dmesh.data.records import TFRecordWriter

__all__ = [
    "AutoShardPolicy",
    "AUTOTUNE",
    "DistributeOptions",
    "INFINITE_CARDINALITY",
    "Optional",
    "SHARD_HINT",
    "TFRecordWriter",
    "UNKNOWN_CARDINALITY",
]
