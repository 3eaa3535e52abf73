from dilocox.protocol.pb import messages_pb2 as _messages_pb2
from dilocox.protocol.pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BoxHello(_message.Message):
    __slots__ = ("proof", "devices", "cuda", "device_bytes", "host_bytes", "corpus")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    devices: int
    cuda: bool
    device_bytes: int
    host_bytes: int
    corpus: bytes
    def __init__(self, proof: _Optional[bytes] = ..., devices: _Optional[int] = ..., cuda: _Optional[bool] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., corpus: _Optional[bytes] = ...) -> None: ...

class BoxAlive(_message.Message):
    __slots__ = ("ticks", "serves")
    TICKS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    ticks: int
    serves: bool
    def __init__(self, ticks: _Optional[int] = ..., serves: _Optional[bool] = ...) -> None: ...

class WorkerSaid(_message.Message):
    __slots__ = ("generation", "rank", "event")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    event: _worker_pb2.WorkerEvent
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., event: _Optional[_Union[_worker_pb2.WorkerEvent, _Mapping]] = ...) -> None: ...

class BoxAnswer(_message.Message):
    __slots__ = ("ask", "reason", "stage", "detail", "holders")
    ASK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ask: int
    reason: _messages_pb2.Reason
    stage: int
    detail: str
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ask: _Optional[int] = ..., reason: _Optional[_Union[_messages_pb2.Reason, str]] = ..., stage: _Optional[int] = ..., detail: _Optional[str] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class BoxEvent(_message.Message):
    __slots__ = ("hello", "alive", "said", "ended", "answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: BoxHello
    alive: BoxAlive
    said: WorkerSaid
    ended: int
    answer: BoxAnswer
    def __init__(self, hello: _Optional[_Union[BoxHello, _Mapping]] = ..., alive: _Optional[_Union[BoxAlive, _Mapping]] = ..., said: _Optional[_Union[WorkerSaid, _Mapping]] = ..., ended: _Optional[int] = ..., answer: _Optional[_Union[BoxAnswer, _Mapping]] = ...) -> None: ...

class LaunchBox(_message.Message):
    __slots__ = ("generation", "ranks", "workers", "copies", "stages", "microbatches", "recompute")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    workers: int
    copies: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    microbatches: int
    recompute: bool
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., workers: _Optional[int] = ..., copies: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., microbatches: _Optional[int] = ..., recompute: _Optional[bool] = ...) -> None: ...

class AskJudge(_message.Message):
    __slots__ = ("contribution", "base", "rank_or_k")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    RANK_OR_K_FIELD_NUMBER: _ClassVar[int]
    contribution: _messages_pb2.Envelope
    base: bytes
    rank_or_k: int
    def __init__(self, contribution: _Optional[_Union[_messages_pb2.Envelope, _Mapping]] = ..., base: _Optional[bytes] = ..., rank_or_k: _Optional[int] = ...) -> None: ...

class AskStart(_message.Message):
    __slots__ = ("start",)
    START_FIELD_NUMBER: _ClassVar[int]
    start: _worker_pb2.Start
    def __init__(self, start: _Optional[_Union[_worker_pb2.Start, _Mapping]] = ...) -> None: ...

class AskKeep(_message.Message):
    __slots__ = ("blobs",)
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    blobs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, blobs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BoxAsk(_message.Message):
    __slots__ = ("number", "judge", "take", "keep", "start")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    number: int
    judge: AskJudge
    take: int
    keep: AskKeep
    start: AskStart
    def __init__(self, number: _Optional[int] = ..., judge: _Optional[_Union[AskJudge, _Mapping]] = ..., take: _Optional[int] = ..., keep: _Optional[_Union[AskKeep, _Mapping]] = ..., start: _Optional[_Union[AskStart, _Mapping]] = ...) -> None: ...

class ClusterReady(_message.Message):
    __slots__ = ("round", "states")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    round: int
    states: _messages_pb2.StageStates
    def __init__(self, round: _Optional[int] = ..., states: _Optional[_Union[_messages_pb2.StageStates, _Mapping]] = ...) -> None: ...

class BoxCommand(_message.Message):
    __slots__ = ("launch", "worker", "end", "ask", "drop", "consent", "ready", "step", "alive", "begin", "apply")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    launch: LaunchBox
    worker: _worker_pb2.WorkerCommand
    end: int
    ask: BoxAsk
    drop: int
    consent: _messages_pb2.Claim
    ready: ClusterReady
    step: _worker_pb2.Step
    alive: BoxAlive
    begin: int
    apply: int
    def __init__(self, launch: _Optional[_Union[LaunchBox, _Mapping]] = ..., worker: _Optional[_Union[_worker_pb2.WorkerCommand, _Mapping]] = ..., end: _Optional[int] = ..., ask: _Optional[_Union[BoxAsk, _Mapping]] = ..., drop: _Optional[int] = ..., consent: _Optional[_Union[_messages_pb2.Claim, _Mapping]] = ..., ready: _Optional[_Union[ClusterReady, _Mapping]] = ..., step: _Optional[_Union[_worker_pb2.Step, _Mapping]] = ..., alive: _Optional[_Union[BoxAlive, _Mapping]] = ..., begin: _Optional[int] = ..., apply: _Optional[int] = ...) -> None: ...

class Bytes(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
