from dilocox.protocol.pb import messages_pb2 as _messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Run(_message.Message):
    __slots__ = ("manifest", "coordinator", "appointment", "wall_ms")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    APPOINTMENT_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    manifest: _messages_pb2.Envelope
    coordinator: _messages_pb2.Envelope
    appointment: _messages_pb2.Envelope
    wall_ms: int
    def __init__(self, manifest: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., coordinator: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., appointment: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., wall_ms: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("from_round", "hello")
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    from_round: int
    hello: _messages_pb2.Envelope
    def __init__(self, from_round: _Optional[int] = ..., hello: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ...) -> None: ...

class Tip(_message.Message):
    __slots__ = ("round", "head", "why", "appointment", "stands_still")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    APPOINTMENT_FIELD_NUMBER: _ClassVar[int]
    STANDS_STILL_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    why: str
    appointment: _messages_pb2.Envelope
    stands_still: bool
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., why: _Optional[str] = ..., appointment: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., stands_still: _Optional[bool] = ...) -> None: ...

class LeadRequest(_message.Message):
    __slots__ = ("above", "newest")
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    above: int
    newest: _messages_pb2.Envelope
    def __init__(self, above: _Optional[int] = ..., newest: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ...) -> None: ...

class LeadReply(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: _messages_pb2.Envelope
    def __init__(self, record: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ...) -> None: ...

class Presence(_message.Message):
    __slots__ = ("peer", "present", "round", "step", "loss", "tokens_per_second")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    present: bool
    round: int
    step: int
    loss: float
    tokens_per_second: float
    def __init__(self, peer: _Optional[str] = ..., present: _Optional[bool] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("statement", "tip", "disagreement")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    TIP_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_FIELD_NUMBER: _ClassVar[int]
    statement: _messages_pb2.Envelope
    tip: Tip
    disagreement: Disagreement
    def __init__(self, statement: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., tip: _Optional[_Union[Tip, _Mapping]] = ..., disagreement: _Optional[_Union[Disagreement, _Mapping]] = ...) -> None: ...

class GetPresenceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PresenceList(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Presence]
    def __init__(self, peers: _Optional[_Iterable[_Union[Presence, _Mapping]]] = ...) -> None: ...

class Disagreement(_message.Message):
    __slots__ = ("round", "clusters")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    clusters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., clusters: _Optional[_Iterable[str]] = ...) -> None: ...

class ChallengeRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digest", "first_chunk")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    first_chunk: int
    def __init__(self, digest: _Optional[bytes] = ..., first_chunk: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: BlobIndex
    data: bytes
    def __init__(self, index: _Optional[_Union[BlobIndex, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class BlobIndex(_message.Message):
    __slots__ = ("size", "chunk_hashes")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    size: int
    chunk_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, size: _Optional[int] = ..., chunk_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("blob",)
    BLOB_FIELD_NUMBER: _ClassVar[int]
    blob: bytes
    def __init__(self, blob: _Optional[bytes] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("blob", "size", "shares", "needed", "index", "digest", "root", "proof", "round", "state")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    blob: bytes
    size: int
    shares: int
    needed: int
    index: int
    digest: bytes
    root: bytes
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    round: int
    state: bool
    def __init__(self, blob: _Optional[bytes] = ..., size: _Optional[int] = ..., shares: _Optional[int] = ..., needed: _Optional[int] = ..., index: _Optional[int] = ..., digest: _Optional[bytes] = ..., root: _Optional[bytes] = ..., proof: _Optional[_Iterable[bytes]] = ..., round: _Optional[int] = ..., state: _Optional[bool] = ...) -> None: ...

class Shares(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    def __init__(self, shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: PushIndex
    data: bytes
    def __init__(self, index: _Optional[_Union[PushIndex, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushIndex(_message.Message):
    __slots__ = ("digest", "index")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    index: BlobIndex
    def __init__(self, digest: _Optional[bytes] = ..., index: _Optional[_Union[BlobIndex, _Mapping]] = ...) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: _messages_pb2.Envelope
    def __init__(self, record: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ...) -> None: ...

class DialBackReply(_message.Message):
    __slots__ = ("reachable", "why")
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    reachable: bool
    why: str
    def __init__(self, reachable: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...
