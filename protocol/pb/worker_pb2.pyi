from dilocox.protocol.pb import messages_pb2 as _messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageState(_message.Message):
    __slots__ = ("stage", "digest")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage: int
    digest: bytes
    def __init__(self, stage: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StagePayload(_message.Message):
    __slots__ = ("stage", "base_state", "digest", "size", "norm", "effective_rank", "error", "norms", "shares")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BASE_STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    base_state: bytes
    digest: bytes
    size: int
    norm: float
    effective_rank: float
    error: float
    norms: bytes
    shares: bytes
    def __init__(self, stage: _Optional[int] = ..., base_state: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ..., norm: _Optional[float] = ..., effective_rank: _Optional[float] = ..., error: _Optional[float] = ..., norms: _Optional[bytes] = ..., shares: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "pid", "stages", "boundaries", "device", "copy")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    boundaries: _containers.RepeatedCompositeFieldContainer[Boundary]
    device: str
    copy: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., boundaries: _Optional[_Iterable[_Union[Boundary, _Mapping]]] = ..., device: _Optional[str] = ..., copy: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("origin", "round", "states", "boundary", "replays", "opening_commit", "boundary_commit", "kept")
    class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ORIGIN_UNSPECIFIED: _ClassVar[Start.Origin]
        ORIGIN_INITIAL: _ClassVar[Start.Origin]
        ORIGIN_SNAPSHOT: _ClassVar[Start.Origin]
        ORIGIN_BOUNDARY: _ClassVar[Start.Origin]
    ORIGIN_UNSPECIFIED: Start.Origin
    ORIGIN_INITIAL: Start.Origin
    ORIGIN_SNAPSHOT: Start.Origin
    ORIGIN_BOUNDARY: Start.Origin
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    OPENING_COMMIT_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_COMMIT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    origin: Start.Origin
    round: int
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    boundary: int
    replays: int
    opening_commit: bytes
    boundary_commit: Apply
    kept: Boundary
    def __init__(self, origin: _Optional[_Union[Start.Origin, str]] = ..., round: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ..., boundary: _Optional[int] = ..., replays: _Optional[int] = ..., opening_commit: _Optional[bytes] = ..., boundary_commit: _Optional[_Union[Apply, _Mapping]] = ..., kept: _Optional[_Union[Boundary, _Mapping]] = ...) -> None: ...

class Take(_message.Message):
    __slots__ = ("cluster", "weight", "clip", "payloads", "clips")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    CLIPS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    weight: int
    clip: int
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    clips: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cluster: _Optional[str] = ..., weight: _Optional[int] = ..., clip: _Optional[int] = ..., payloads: _Optional[_Iterable[bytes]] = ..., clips: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ("commit", "takes")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    commit: bytes
    takes: _containers.RepeatedCompositeFieldContainer[Take]
    def __init__(self, commit: _Optional[bytes] = ..., takes: _Optional[_Iterable[_Union[Take, _Mapping]]] = ...) -> None: ...

class Recheck(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("round", "contribution", "clip", "payloads", "own", "positions", "signs")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    round: int
    contribution: bytes
    clip: int
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    own: _containers.RepeatedScalarFieldContainer[bytes]
    positions: _containers.RepeatedScalarFieldContainer[int]
    signs: int
    def __init__(self, round: _Optional[int] = ..., contribution: _Optional[bytes] = ..., clip: _Optional[int] = ..., payloads: _Optional[_Iterable[bytes]] = ..., own: _Optional[_Iterable[bytes]] = ..., positions: _Optional[_Iterable[int]] = ..., signs: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("start", "apply", "stop", "recheck", "score")
    START_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RECHECK_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    start: Start
    apply: Apply
    stop: Stop
    recheck: Recheck
    score: Score
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., apply: _Optional[_Union[Apply, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., recheck: _Optional[_Union[Recheck, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("round", "states", "evaluated", "evaluation_loss", "applied_at_step", "boundary")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_AT_STEP_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    round: int
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    evaluated: bool
    evaluation_loss: float
    applied_at_step: int
    boundary: int
    def __init__(self, round: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ..., evaluated: _Optional[bool] = ..., evaluation_loss: _Optional[float] = ..., applied_at_step: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("round", "step", "loss", "seconds", "tokens", "waiting", "total_steps", "clock_seconds", "codec_cpu_seconds", "why")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CODEC_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    loss: float
    seconds: float
    tokens: int
    waiting: bool
    total_steps: int
    clock_seconds: float
    codec_cpu_seconds: float
    why: str
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., waiting: _Optional[bool] = ..., total_steps: _Optional[int] = ..., clock_seconds: _Optional[float] = ..., codec_cpu_seconds: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("round", "inner_steps", "tokens", "loss", "samples_read", "payloads", "head", "optimizer_steps", "marks", "steps_within", "noise", "corpus", "complete")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_READ_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_WITHIN_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    round: int
    inner_steps: int
    tokens: int
    loss: float
    samples_read: int
    payloads: _containers.RepeatedCompositeFieldContainer[StagePayload]
    head: bytes
    optimizer_steps: int
    marks: _messages_pb2.Marks
    steps_within: int
    noise: float
    corpus: bytes
    complete: bool
    def __init__(self, round: _Optional[int] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., samples_read: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[StagePayload, _Mapping]]] = ..., head: _Optional[bytes] = ..., optimizer_steps: _Optional[int] = ..., marks: _Optional[_Union[_messages_pb2.Marks, _Mapping]] = ..., steps_within: _Optional[int] = ..., noise: _Optional[float] = ..., corpus: _Optional[bytes] = ..., complete: _Optional[bool] = ...) -> None: ...

class Rechecked(_message.Message):
    __slots__ = ("round", "states", "report_agrees")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGREES_FIELD_NUMBER: _ClassVar[int]
    round: int
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    report_agrees: bool
    def __init__(self, round: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ..., report_agrees: _Optional[bool] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("round", "contribution", "before", "after", "cosine", "sketch", "own")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    round: int
    contribution: bytes
    before: float
    after: float
    cosine: float
    sketch: _containers.RepeatedScalarFieldContainer[float]
    own: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., contribution: _Optional[bytes] = ..., before: _Optional[float] = ..., after: _Optional[float] = ..., cosine: _Optional[float] = ..., sketch: _Optional[_Iterable[float]] = ..., own: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("hello", "ready", "step", "boundary", "rechecked", "scored", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    RECHECKED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    step: Step
    boundary: Boundary
    rechecked: Rechecked
    scored: Scored
    failed: str
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., boundary: _Optional[_Union[Boundary, _Mapping]] = ..., rechecked: _Optional[_Union[Rechecked, _Mapping]] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., failed: _Optional[str] = ...) -> None: ...
