from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogRow(_message.Message):
    __slots__ = ("seconds", "wall_ms", "kind", "peer", "reason", "detail", "envelope")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    wall_ms: int
    kind: str
    peer: str
    reason: int
    detail: str
    envelope: bytes
    def __init__(self, seconds: _Optional[float] = ..., wall_ms: _Optional[int] = ..., kind: _Optional[str] = ..., peer: _Optional[str] = ..., reason: _Optional[int] = ..., detail: _Optional[str] = ..., envelope: _Optional[bytes] = ...) -> None: ...

class LogBatch(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[LogRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[LogRow, _Mapping]]] = ...) -> None: ...
