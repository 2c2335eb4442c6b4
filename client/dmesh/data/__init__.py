"""Datasets: sequences of elements made of NumPy arrays, under the names of `tf.data`.

```python
dataset = dmesh.data.Dataset.from_tensor_slices((images, labels)).shuffle(10_000, seed=1).batch(64)
for images, labels in dataset:
    ...
```
"""

from __future__ import annotations

from dmesh.data import experimental
from dmesh.data.dataset import AUTOTUNE, Dataset
from dmesh.data.elements import TensorSpec
from dmesh.data.examples import FixedLenFeature, VarLenFeature, parse_single_example, serialize_example
from dmesh.data.iterator import DatasetIterator
from dmesh.data.options import Options
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from dmesh.data.tfrecord import TFRecordDataset

__all__ = [
    "AUTOTUNE",
    "Dataset",
    "DatasetIterator",
    "experimental",
    "FixedLenFeature",
    "INFINITE_CARDINALITY",
    "Options",
    "parse_single_example",
    "serialize_example",
    "TensorSpec",
    "TFRecordDataset",
    "UNKNOWN_CARDINALITY",
    "VarLenFeature",
]
