"""Messages, bytes and HTTP/2 frames that no well-behaved client sends; all from one seed."""

from __future__ import annotations

import random
import struct
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from dmesh.v1 import coordination_pb2, key_value_pb2

Field = FieldDescriptor

TEXTS = (
    "", "a", "worker", "c", "c2", "k", "k/1", "r1", "../../etc/passwd", "/job:worker/task:0", "nul\0nul",
    "\N{PILE OF POO}", "\u202eright to left", "<img src=x onerror=alert(1)>", "line\r\nbreak", "%s%n{0}", " ",
    "x" * 129, "x" * 257, "x" * 1025, "a" * 5000, "-1", "9" * 30, "CPU", "TPU", "127.0.0.1:0", ":99999",
)  # fmt: skip
PLAIN = ("a", "worker", "c", "k", "k/1", "127.0.0.1:80")
NUMBERS = (0, 1, 2, 3, 7, -1, -2, 64, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
LONG = "y" * (2 << 20)

_SIGNED = {Field.TYPE_INT32: 31, Field.TYPE_SINT32: 31, Field.TYPE_INT64: 63, Field.TYPE_SINT64: 63}
_UNSIGNED = {Field.TYPE_UINT32: 32, Field.TYPE_UINT64: 64, Field.TYPE_FIXED64: 64, Field.TYPE_FIXED32: 32}


def methods() -> list[MethodDescriptor]:
    """Returns every method of the protocol."""
    files = (coordination_pb2.DESCRIPTOR, key_value_pb2.DESCRIPTOR)
    return [
        method for file in files for service in file.services_by_name.values() for method in service.methods
    ]


class Fuzzer:
    """Draws what to send.

    Args:
        chance: Where all choices come from.
        caller: A caller that the server knows; put into most of the messages, to get past the first check.
    """

    def __init__(self, chance: random.Random, caller: Message) -> None:
        self._chance = chance
        self._caller = caller

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Draws a message of a type: valid in form, absurd in content."""
        chance = self._chance
        made = message_factory.GetMessageClass(descriptor)()
        chosen: dict[str, Field] = {}
        for field in descriptor.fields:
            if chance.random() < 0.85:
                oneof = field.containing_oneof
                chosen[oneof.name if oneof is not None else field.name] = field
        for field in chosen.values():
            if field.name == "caller" and chance.random() < 0.8:
                made.caller.CopyFrom(self._caller)  # type: ignore[attr-defined]
            elif field.message_type is not None:
                self._fill(made, field, depth)
            elif field.is_repeated:
                getattr(made, field.name).extend(self._value(field) for _ in range(chance.randrange(4)))
            else:
                setattr(made, field.name, self._value(field))
        return made

    def encoded(self, descriptor: Descriptor) -> bytes:
        """Draws what a call sends: a message, one that was damaged, or just bytes."""
        kind = self._chance.random()
        if kind < 0.1:
            return self._chance.randbytes(self._chance.choice([0, 1, 2, 10, 100, 5000]))
        data = self.message(descriptor).SerializeToString()
        if kind < 0.3 and data:
            damaged = bytearray(data)
            for _ in range(self._chance.randint(1, 4)):
                damaged[self._chance.randrange(len(damaged))] = self._chance.randrange(256)
            return bytes(damaged[: self._chance.randint(1, len(damaged))])
        if kind < 0.4:
            return data + b"\xf8\xff\x03\x01"  # a field of a newer protocol
        return data

    def frames(self) -> bytes:
        """Draws what somebody sends who opens a connection: HTTP/2 gone wrong, or nothing like it."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.1:
            return chance.randbytes(chance.choice([1, 10, 1000, 20_000]))
        if kind < 0.2:
            return chance.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r\n"])
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        data = bytearray(preface + _frame(4, 0, 0, b""))
        for _ in range(chance.randint(1, 8)):
            length = chance.choice([0, 1, 4, 8, 9, 100, 5000])
            payload = chance.choice([b"\0" * length, chance.randbytes(length)])
            stream = chance.choice([0, 1, 1, 3, 2, 0x7FFFFFFF, chance.getrandbits(31)])
            data += _frame(chance.choice([*range(11), 255]), chance.randrange(256), stream, payload)
        if chance.random() < 0.3:
            del data[chance.randrange(len(preface), len(data)) :]
        return bytes(data)

    def _fill(self, made: Message, field: Field, depth: int) -> None:
        if depth > 3:
            return
        if field.message_type.GetOptions().map_entry:
            keys, values = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(self._chance.choice([0, 1, 2, 5])):
                getattr(made, field.name)[self._value(keys)] = self._value(values)
        elif field.is_repeated:
            for _ in range(self._chance.choice([0, 1, 2, 5])):
                getattr(made, field.name).add().CopyFrom(self.message(field.message_type, depth + 1))
        else:
            getattr(made, field.name).CopyFrom(self.message(field.message_type, depth + 1))

    def _value(self, field: Field) -> Any:
        chance = self._chance
        match field.type:
            case Field.TYPE_STRING if field.name == "request_id" and chance.random() < 0.7:
                return chance.randbytes(8).hex()
            case Field.TYPE_STRING if chance.random() < 0.5:
                return chance.choice(PLAIN)
            case Field.TYPE_STRING:
                return LONG if chance.random() < 0.0005 else chance.choice(TEXTS)
            case Field.TYPE_BYTES:
                return chance.choice([b"", b"1", b"x", b"\xff\xfe", b"v" * 1000])
            case Field.TYPE_BOOL:
                return chance.random() < 0.5
            case Field.TYPE_ENUM:
                return chance.choice([0, 1, 2, 99, -1, 2**31 - 1])
            case number if number in _SIGNED:
                limit = 1 << _SIGNED[number]
                return chance.choice([one for one in NUMBERS if -limit <= one < limit])
            case number if number in _UNSIGNED:
                limit = 1 << _UNSIGNED[number]
                return chance.choice([one for one in NUMBERS if 0 <= one < limit])
        raise TypeError(f"no values for {field.full_name}")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
