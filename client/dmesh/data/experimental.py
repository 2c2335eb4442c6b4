"""The names of `tf.data.experimental`: constants and options of distribution, and `Optional`."""

from __future__ import annotations

from dmesh.data.dataset import AUTOTUNE
from dmesh.data.optional import Optional
from dmesh.data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = [
    "AutoShardPolicy",
    "AUTOTUNE",
    "DistributeOptions",
    "INFINITE_CARDINALITY",
    "Optional",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
]
