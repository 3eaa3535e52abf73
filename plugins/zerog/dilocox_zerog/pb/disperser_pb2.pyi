from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlobStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[BlobStatus]
    PROCESSING: _ClassVar[BlobStatus]
    CONFIRMED: _ClassVar[BlobStatus]
    FAILED: _ClassVar[BlobStatus]
    FINALIZED: _ClassVar[BlobStatus]
    INSUFFICIENT_SIGNATURES: _ClassVar[BlobStatus]
UNKNOWN: BlobStatus
PROCESSING: BlobStatus
CONFIRMED: BlobStatus
FAILED: BlobStatus
FINALIZED: BlobStatus
INSUFFICIENT_SIGNATURES: BlobStatus

class DisperseBlobRequest(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class DisperseBlobReply(_message.Message):
    __slots__ = ("result", "request_id")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    result: BlobStatus
    request_id: bytes
    def __init__(self, result: _Optional[_Union[BlobStatus, str]] = ..., request_id: _Optional[bytes] = ...) -> None: ...

class BlobStatusRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ...) -> None: ...

class BlobStatusReply(_message.Message):
    __slots__ = ("status", "info")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    status: BlobStatus
    info: BlobInfo
    def __init__(self, status: _Optional[_Union[BlobStatus, str]] = ..., info: _Optional[_Union[BlobInfo, _Mapping]] = ...) -> None: ...

class RetrieveBlobRequest(_message.Message):
    __slots__ = ("storage_root", "epoch", "quorum_id")
    STORAGE_ROOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    storage_root: bytes
    epoch: int
    quorum_id: int
    def __init__(self, storage_root: _Optional[bytes] = ..., epoch: _Optional[int] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class RetrieveBlobReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class BlobInfo(_message.Message):
    __slots__ = ("blob_header",)
    BLOB_HEADER_FIELD_NUMBER: _ClassVar[int]
    blob_header: BlobHeader
    def __init__(self, blob_header: _Optional[_Union[BlobHeader, _Mapping]] = ...) -> None: ...

class BlobHeader(_message.Message):
    __slots__ = ("storage_root", "epoch", "quorum_id")
    STORAGE_ROOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    storage_root: bytes
    epoch: int
    quorum_id: int
    def __init__(self, storage_root: _Optional[bytes] = ..., epoch: _Optional[int] = ..., quorum_id: _Optional[int] = ...) -> None: ...
