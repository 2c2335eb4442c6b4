"""`tf.train.Example`: named features, each a list of bytes, of float32 or of int64.

The message types have a descriptor pool of their own, so that they do not clash with TensorFlow's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.data.elements import TensorSpec, check_integer
from dmesh.errors import ArgumentTypeError, DatasetError

__all__ = [
    "FixedLenFeature",
    "VarLenFeature",
    "example_of",
    "features_of",
    "parse_single_example",
    "serialize_example",
]

_Field = descriptor_pb2.FieldDescriptorProto


@cache
def _example_class() -> Any:
    """Return the message class, with TensorFlow's field numbers."""
    file = descriptor_pb2.FileDescriptorProto(
        name="dmesh/example.proto", package="dmesh.example", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, int, str], parent: Any = file.message_type) -> Any:
        made = parent.add(name=name)
        for field, number, label, kind, kind_name in fields:
            made.field.add(name=field, number=number, label=label, type=kind, type_name=kind_name or None)
        return made

    for name, kind in (
        ("BytesList", _Field.TYPE_BYTES),
        ("FloatList", _Field.TYPE_FLOAT),
        ("Int64List", _Field.TYPE_INT64),
    ):
        message(name, ("value", 1, _Field.LABEL_REPEATED, kind, ""))
    one, sub = _Field.LABEL_OPTIONAL, _Field.TYPE_MESSAGE
    feature = message(
        "Feature",
        ("bytes_list", 1, one, sub, ".dmesh.example.BytesList"),
        ("float_list", 2, one, sub, ".dmesh.example.FloatList"),
        ("int64_list", 3, one, sub, ".dmesh.example.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(
        "Features", ("feature", 1, _Field.LABEL_REPEATED, sub, ".dmesh.example.Features.FeatureEntry")
    )
    entry = message(
        "FeatureEntry",
        ("key", 1, one, _Field.TYPE_STRING, ""),
        ("value", 2, one, sub, ".dmesh.example.Feature"),
        parent=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", ("features", 1, one, sub, ".dmesh.example.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("dmesh.example.Example"))


def _checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    made = np.dtype(dtype)
    if made.kind not in "biufcUS" and made.name != "bfloat16":
        raise ArgumentTypeError(f"the dtype of a feature must be of numbers or text, got {made}")
    return made


@dataclass(frozen=True)
class FixedLenFeature:
    """A feature of fixed shape, like `tf.io.FixedLenFeature`.

    A list of int64 or float32 becomes an array of the dtype. A list of bytes becomes text (`str`). If the
    dtype is numeric, a single bytes value is the array's little-endian memory, as for `tf.io.decode_raw`.

    Raises:
        DatasetError: A length is negative, or the default has another shape.
        ArgumentTypeError: The dtype is neither numeric nor text.
    """

    shape: Sequence[int]
    """Its shape; empty for a single value."""
    dtype: DTypeLike
    """Type of its elements."""
    default_value: ArrayLike | None = None
    """Value for examples without the feature; None to refuse them."""

    def __post_init__(self) -> None:
        shape = tuple(check_integer("a length of a feature", length, 0) for length in self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype))
        if self.default_value is not None:
            default = np.asarray(self.default_value, self.dtype)
            if default.shape not in (shape, ()):
                raise DatasetError(
                    f"the default_value of a feature of shape {shape} has shape {default.shape}"
                )
            object.__setattr__(self, "default_value", np.broadcast_to(default, shape))

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return TensorSpec(tuple(self.shape), self.dtype)


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, like `tf.io.VarLenFeature`: a dense, one-dimensional array.

    An example without the feature has an empty array. `FixedLenFeature` describes the conversion of lists.

    Raises:
        ArgumentTypeError: The dtype is neither numeric nor text.
    """

    dtype: DTypeLike
    """Type of its elements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype))

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return TensorSpec((None,), self.dtype)


def features_of(
    data: bytes, wanted: Mapping[str, FixedLenFeature | VarLenFeature]
) -> dict[str, NDArray[Any]]:
    """Return features of an encoded example, by name.

    Raises:
        ValueError: `data` is not an example, or a feature is missing or has another shape or type.
    """
    try:
        found = _example_class().FromString(data).features.feature
    except DecodeError as error:
        raise ValueError(f"it is not a tf.train.Example: {error}") from None
    read: dict[str, NDArray[Any]] = {}
    for name, feature in wanted.items():
        values = _values(name, found[name], np.dtype(feature.dtype)) if name in found else None
        if isinstance(feature, VarLenFeature):
            read[name] = np.zeros(0, feature.dtype) if values is None else values
        elif values is not None:
            if len(values) != math.prod(feature.shape):
                raise ValueError(
                    f"the feature {name!r} has {len(values)} values, expected shape {tuple(feature.shape)}"
                )
            read[name] = values.reshape(tuple(feature.shape))
        elif feature.default_value is not None:
            read[name] = np.asarray(feature.default_value)
        else:
            names = ", ".join(sorted(found)[:20]) or "none"
            raise ValueError(f"the example has no feature {name!r}; it has {names}")
    return read


def _values(name: str, feature: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return the values of a feature; None if it has no list."""
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        if dtype.kind == "S":
            return np.array(list(values), dtype)
        if dtype.kind == "U":
            return np.array([value.decode() for value in values], dtype)
        if len(values) == 1 and len(values[0]) % dtype.itemsize == 0:
            return np.frombuffer(values[0], dtype.newbyteorder("<")).astype(dtype, copy=False)
    elif kind == "int64_list" and dtype.kind in "biu":
        wide = np.array(values, np.int64)
        narrow = wide.astype(dtype)
        if np.array_equal(narrow.astype(np.int64), wide):
            return narrow
        raise ValueError(f"the feature {name!r} has values out of the range of {dtype}")
    elif kind == "float_list" and (dtype.kind in "fc" or dtype.name == "bfloat16"):
        return np.array(values, np.float32).astype(dtype)
    raise ValueError(
        f"the feature {name!r} is a {kind} of {len(values)} values, which cannot be read as {dtype}"
    )


def parse_single_example(
    serialized: bytes | NDArray[np.uint8], features: Mapping[str, FixedLenFeature | VarLenFeature]
) -> dict[str, NDArray[Any]]:
    """Return features of a `tf.train.Example`, by name, like `tf.io.parse_single_example`.

    ```python
    import numpy as np
    from dmesh.data import FixedLenFeature, parse_single_example, serialize_example

    data = serialize_example({"label": 7, "image": np.ones(4, np.float32)})
    parse_single_example(data, {"label": FixedLenFeature((), np.int64)})  # -> {'label': array(7)}
    ```

    Args:
        serialized: The encoded message: bytes, or a record of `TFRecordDataset`.
        features: Features to read, by name.

    Raises:
        DatasetError: `serialized` is not an example, or a feature is missing or has another shape or type.
    """
    try:
        return features_of(bytes(serialized), features)
    except ValueError as error:
        raise DatasetError(f"the example cannot be parsed: {error}") from None


def serialize_example(features: Mapping[str, Any]) -> bytes:
    """Return a `tf.train.Example` as bytes.

    Args:
        features: Values by name: integers, floats, bytes, text, or arrays or lists of them. Arrays lose their
            shape, and integers and floats become int64 and float32.

    Raises:
        ArgumentTypeError: A value has another type.
    """
    return example_of(features)


def example_of(features: Mapping[str, Any]) -> bytes:
    """Return an encoded example; see `serialize_example`."""
    example = _example_class()()
    for name, value in features.items():
        feature = example.features.feature[str(name)]
        if isinstance(value, bytes | str):
            value = [value]
        if isinstance(value, list | tuple) and value and all(isinstance(part, bytes | str) for part in value):
            feature.bytes_list.value.extend(
                part.encode() if isinstance(part, str) else part for part in value
            )
            continue
        array = np.asarray(value)
        if array.dtype.kind in "US":
            feature.bytes_list.value.extend(
                part.encode() if isinstance(part, str) else part for part in array.ravel().tolist()
            )
        elif array.dtype.kind in "biu":
            feature.int64_list.value.extend(array.ravel().astype(np.int64).tolist())
        elif array.dtype.kind == "f" or array.dtype.name == "bfloat16":
            feature.float_list.value.extend(array.ravel().astype(np.float32).tolist())
        else:
            raise ArgumentTypeError(
                f"the feature {name!r} is {array.dtype}; expected integers, floats, bytes or text"
            )
    return bytes(example.SerializeToString(deterministic=True))
