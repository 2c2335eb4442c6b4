"""Transactions: several keys compared and changed in one atomic call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from dmesh.coordination.leases import Lease
from dmesh.coordination.values import INT64, Snapshot, Value, encode_amount, encode_key, encode_value
from dmesh.errors import ConfigurationError, KeyTypeError
from dmesh.v1 import key_value_pb2 as pb

_OPERATORS = {
    "==": pb.Condition.OPERATOR_EQUAL,
    "!=": pb.Condition.OPERATOR_NOT_EQUAL,
    "<": pb.Condition.OPERATOR_LESS,
    ">": pb.Condition.OPERATOR_GREATER,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition on one key. Made by `exists`, `absent`, `value`, `revision` and `create_revision`."""

    key: str
    """The key."""
    target: str
    """Property of the key that is compared: `value`, `revision` or `create_revision`."""
    operator: str
    """`==`, `!=`, `<` or `>`: the key's is on the left."""
    operand: Value | int
    """Operand of the comparison."""

    @classmethod
    def exists(cls, key: str) -> Condition:
        """The key has a value."""
        return cls(key, "revision", ">", 0)

    @classmethod
    def absent(cls, key: str) -> Condition:
        """There is no such key."""
        return cls(key, "revision", "==", 0)

    @classmethod
    def value(cls, key: str, operator: str, operand: Value) -> Condition:
        """The key's value compares so with `operand`, byte by byte. Of a missing key only `!=` is true."""
        return cls(key, "value", operator, operand)

    @classmethod
    def revision(cls, key: str, operator: str, operand: int) -> Condition:
        """The revision of the key's last change compares so with `operand`; that of a missing key is 0."""
        return cls(key, "revision", operator, operand)

    @classmethod
    def create_revision(cls, key: str, operator: str, operand: int) -> Condition:
        """The revision at which the key was created compares so with `operand`; of a missing key it is 0."""
        return cls(key, "create_revision", operator, operand)

    def to_proto(self) -> pb.Condition:
        """Convert for the wire.

        Raises:
            ConfigurationError: It makes no sense.
            KeyTypeError: The operand is of the wrong type.
        """
        if self.operator not in _OPERATORS:
            raise ConfigurationError(f"a condition's operator is one of == != < >, not {self.operator!r}")
        message = pb.Condition(key=encode_key(self.key), operator=_OPERATORS[self.operator])
        if self.target == "value":
            if isinstance(self.operand, int):
                raise KeyTypeError(f"key {self.key!r} is compared with str or bytes, not {self.operand!r}")
            message.value = encode_value(self.operand, self.key)
            return message
        if isinstance(self.operand, bool) or not isinstance(self.operand, int) or self.operand not in INT64:
            raise KeyTypeError(
                f"a revision of key {self.key!r} is compared with an integer, not {self.operand!r}"
            )
        if self.target == "revision":
            message.mod_revision = self.operand
        else:
            message.create_revision = self.operand
        return message


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key. Its result is the transaction's revision."""

    key: str
    """The key."""
    value: Value
    """Its new value; a `str` stands for its UTF-8 encoding."""
    lease: Lease | None = None
    """Lease with which the key ends."""
    ephemeral: bool = False
    """True if the key ends when this process leaves, fails or is lost."""

    def to_proto(self) -> pb.Operation:
        """Convert for the wire."""
        value = encode_value(self.value, self.key)
        request = pb.SetRequest(
            key=encode_key(self.key),
            value=value,
            allow_overwrite=True,
            lease=self.lease.number if self.lease else 0,
            ephemeral=self.ephemeral,
        )
        return pb.Operation(set=request)


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key, or all keys with a prefix. Its result is how many there were."""

    key: str
    """The key, or the prefix."""
    is_prefix: bool = False
    """True to delete every key that starts with `key`."""

    def to_proto(self) -> pb.Operation:
        """Convert for the wire."""
        key = encode_key(self.key, "prefix" if self.is_prefix else "key")
        return pb.Operation(delete=pb.DeleteRequest(key=key, is_prefix=bool(self.is_prefix)))


@dataclass(frozen=True, slots=True)
class Increment:
    """Adds to a decimal integer, where a missing key counts as 0. Its result is the sum."""

    key: str
    """The key."""
    amount: int = 1
    """Number to add; may be negative."""

    def to_proto(self) -> pb.Operation:
        """Convert for the wire."""
        return pb.Operation(
            increment=pb.IncrementRequest(key=encode_key(self.key), amount=encode_amount(self.amount))
        )


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key, or all keys with a prefix. Its result is a `Snapshot`: empty if there is no such key."""

    key: str
    """The key, or the prefix."""
    is_prefix: bool = False
    """True to read every key that starts with `key`."""

    def to_proto(self) -> pb.Operation:
        """Convert for the wire."""
        key = encode_key(self.key, "prefix" if self.is_prefix else "key")
        if self.is_prefix:
            return pb.Operation(list=pb.ListRequest(prefix=key))
        return pb.Operation(get_many=pb.GetManyRequest(keys=[key]))


Operation: TypeAlias = Put | Delete | Increment | Get
"""One operation of a transaction."""


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """Result of a transaction; true if all its conditions held."""

    succeeded: bool
    """True if all conditions held, so that `then` was carried out; otherwise `otherwise` was."""
    results: tuple[int | Snapshot, ...]
    """Result of each operation that was carried out, in order: see `Put`, `Delete`, `Increment`, `Get`."""
    revision: int
    """Revision of the changes; the current one if nothing changed."""

    def __bool__(self) -> bool:
        return self.succeeded


_OPERATIONS = (Put, Delete, Increment, Get)


def request(
    request_id: str, compare: Iterable[Condition], then: Iterable[Operation], otherwise: Iterable[Operation]
) -> pb.TransactionRequest:
    """Make the message that asks for a transaction.

    Raises:
        ConfigurationError: An argument makes no sense.
        KeyTypeError: A value or an operand is of the wrong type.
    """
    conditions = list(compare)
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise ConfigurationError(
                f"compare takes conditions such as Condition.exists(key), not {condition!r}"
            )
    return pb.TransactionRequest(
        request_id=request_id,
        compare=[condition.to_proto() for condition in conditions],
        then=[_encoded(operation) for operation in then],
        otherwise=[_encoded(operation) for operation in otherwise],
    )


def result(response: pb.TransactionResponse) -> TransactionResult:
    """Read what came of a transaction."""
    return TransactionResult(
        response.succeeded, tuple(_result(one) for one in response.results), response.revision
    )


def _encoded(operation: Operation) -> pb.Operation:
    if not isinstance(operation, _OPERATIONS):
        raise ConfigurationError(
            f"an operation of a transaction is a Put, Delete, Increment or Get, not {operation!r}"
        )
    return operation.to_proto()


def _result(message: pb.OperationResult) -> int | Snapshot:
    match message.WhichOneof("kind"):
        case "set":
            return message.set.revision
        case "delete":
            return message.delete.deleted
        case "increment":
            return message.increment.value
        case _:
            return Snapshot(message.read.kvs, message.read.revision)
