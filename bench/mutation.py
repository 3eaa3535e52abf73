"""Mutated inputs: almost valid bytes, text and messages, from a seeded generator. Equal seeds give equal mutations."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

__all__ = ["Mutator"]

INTEGERS = (0, 1, 2, 7, 8, 16, 31, 32, 33, 127, 128, 255, 256, 1023, 1024, 4096, 65535, 1 << 20, 1 << 30)
EDGES = tuple((1 << bits) + off for bits in (31, 32, 40, 53, 63, 64) for off in (-1, 0))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e6, 1e7, 1e308, 5e-324, math.inf, -math.inf, math.nan)
LENGTHS = (0, 1, 16, 19, 20, 21, 31, 32, 33, 48, 63, 64, 65, 128, 256, 2049)
TOKENS = (
    *(b"[" * 3000, b'{"a":' * 1500, b"(" * 200, b"9" * 5000, b"-1", b"1e400", b"1.0", b"NaN", b"inf", b"null", b"true", b"''"),
    *("é".encode(), "１２".encode(), "\u202e".encode(), b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\0", b"\n", b"\r\n", b" "),
    *(
        b"%00",
        b"%ff",
        b"../",
        b"~",
        b"//",
        b"[::1",
        b"]",
        b"@",
        b"?",
        b"#",
        b"&",
        b"=",
        b":",
        b"::",
        b"_",
        b"+",
        b"-----BEGIN ",
    ),
)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def spoil(self, raw: bytes, corpus: Sequence[bytes], message: type[Message] | None = None) -> bytes:
        """Return other bytes in place of `raw`; rarely the same. `message`: the type whose canonical form they have."""
        if message is not None and message.DESCRIPTOR.fields and self.random.random() < 0.7:
            return self.message_bytes(raw, message)
        if self.random.random() < 0.03:
            return self.random.randbytes(int(self.random.paretovariate(0.6)) % 2000)
        data = bytearray(raw)
        for _ in range(1 + int(self.random.expovariate(1.0))):
            self.edit(data, corpus)
        return bytes(data)

    # Bytes

    def edit(self, data: bytearray, corpus: Sequence[bytes]) -> None:
        random, at = self.random, self.random.randrange(len(data) + 1)
        end = min(len(data), at + int(random.paretovariate(0.7)))
        match random.randrange(12):
            case 0 | 1 | 2 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 3 if data:
                data[at % len(data)] = random.randrange(256)
            case 4:
                del data[at:end]
            case 5:
                data[at:at] = data[at:end] * random.choice((1, 1, 2, 30))
            case 6:
                del data[at:]
            case 7:
                other = random.choice(corpus)
                data[at:] = other[random.randrange(len(other) + 1) :]
            case 8:
                width = random.choice((1, 2, 3, 4, 8))
                number = random.choice((*INTEGERS, len(data), *EDGES)) % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
            case 9:
                data[at:at] = random.choice(TOKENS)
            case 10:
                data[at:at] = self.wire_field()
            case _:
                data[at:end] = random.randbytes(random.choice((0, 1, 4, 16)))

    def wire_field(self) -> bytes:
        """Return a field of protobuf's wire format, most likely unknown to its message."""
        number, kind = self.random.choice((1, 2, 3, 9, 15, 16, 99, 1 << 20)), self.random.randrange(8)
        value = {0: varint(self.random.choice(EDGES)), 1: bytes(8), 2: varint(3) + b"abc", 5: bytes(4)}.get(kind, b"")
        return varint(number << 3 | kind) + value

    # Messages

    def message_bytes(self, raw: bytes, kind: type[Message]) -> bytes:
        """Return mutated bytes in canonical form, so that they reach the checks of the fields. Sometimes an unknown field
        follows."""
        message = kind()
        try:
            message.MergeFromString(raw)
        except DecodeError:
            return raw
        for _ in range(1 + int(self.random.expovariate(1.2))):
            self.change(message)
        again = message.SerializeToString(deterministic=True)
        return again + self.wire_field() if self.random.random() < 0.03 else again

    def change(self, message: Message) -> None:
        """Change one field somewhere inside."""
        field: Any = self.random.choice(message.DESCRIPTOR.fields)
        if field.is_repeated:
            self._change_list(message, field)
        elif field.message_type is None:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))
        elif self.random.random() < 0.1:
            message.ClearField(field.name)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if field.message_type.fields:
                self.change(inner)

    def _change_list(self, message: Message, field: FieldDescriptor) -> None:
        items, random = getattr(message, field.name), self.random
        at = random.randrange(len(items)) if items else 0
        match random.randrange(5) if items else 4:
            case 0:
                del items[at]
            case 1:
                items.extend(list(items[at : at + 1]) * random.choice((1, 1, 2, 40)))
            case 2:
                kept = list(items)
                random.shuffle(kept)
                del items[:]
                items.extend(kept)
            case 3 if field.message_type is not None:
                self.change(items[at])
            case 3:
                items[at] = self._value(field, items[at])
            case _ if field.message_type is not None:
                self.change(items.add())
            case _:
                items.append(self._value(field, None))

    def _value(self, field: FieldDescriptor, old: Any) -> Any:
        random = self.random
        if field.cpp_type in _RANGES:
            least, most = _RANGES[field.cpp_type]
            near = (old or 0) + random.choice((-1, 1))
            return min(most, max(least, random.choice((*INTEGERS, *EDGES, -1, near, near, near))))
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return random.choice(FLOATS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return not old
        if field.type == FieldDescriptor.TYPE_STRING:
            text = bytearray((old or "x").encode())
            self.edit(text, (b"x", b"12D3KooW"))
            return bytes(text).decode(errors="ignore")
        if old and random.random() < 0.5:
            data = bytearray(old)
            self.edit(data, (bytes(32),))
            return bytes(data)
        return random.randbytes(random.choice(LENGTHS))


def varint(number: int) -> bytes:
    raw = bytearray()
    while number > 127:
        raw.append(number & 127 | 128)
        number >>= 7
    return bytes((*raw, number))
