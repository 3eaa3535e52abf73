from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_MANIFEST: _ClassVar[Kind]
    KIND_PEER_RECORD: _ClassVar[Kind]
    KIND_CLAIM: _ClassVar[Kind]
    KIND_CONTRIBUTION: _ClassVar[Kind]
    KIND_BALLOT: _ClassVar[Kind]
    KIND_RECEIPT: _ClassVar[Kind]
    KIND_COMMIT: _ClassVar[Kind]
    KIND_STATE_REPORT: _ClassVar[Kind]
    KIND_LEAVE: _ClassVar[Kind]
    KIND_HEARTBEAT: _ClassVar[Kind]
    KIND_EVIDENCE: _ClassVar[Kind]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_BAD_SIGNATURE: _ClassVar[Reason]
    REASON_WRONG_RUN: _ClassVar[Reason]
    REASON_MALFORMED: _ClassVar[Reason]
    REASON_OVERSIZE: _ClassVar[Reason]
    REASON_STALE_ROUND: _ClassVar[Reason]
    REASON_FUTURE_ROUND: _ClassVar[Reason]
    REASON_WRONG_HEAD: _ClassVar[Reason]
    REASON_WRONG_BASE: _ClassVar[Reason]
    REASON_EQUIVOCATION: _ClassVar[Reason]
    REASON_NOT_ON_ROSTER: _ClassVar[Reason]
    REASON_NOT_ADMITTED: _ClassVar[Reason]
    REASON_WRONG_STAGES: _ClassVar[Reason]
    REASON_DIGEST_MISMATCH: _ClassVar[Reason]
    REASON_SIZE_MISMATCH: _ClassVar[Reason]
    REASON_NON_FINITE: _ClassVar[Reason]
    REASON_NORM_TOO_LARGE: _ClassVar[Reason]
    REASON_NORM_MISMATCH: _ClassVar[Reason]
    REASON_IMPOSSIBLE_TOKENS: _ClassVar[Reason]
    REASON_UNAVAILABLE: _ClassVar[Reason]
    REASON_ABSENT: _ClassVar[Reason]
    REASON_LATE: _ClassVar[Reason]
    REASON_TOO_FEW_ACCEPTS: _ClassVar[Reason]
    REASON_TOO_FEW_CLUSTERS: _ClassVar[Reason]
    REASON_RATE: _ClassVar[Reason]
    REASON_RUN_FINISHED: _ClassVar[Reason]
    REASON_NOT_ATTESTED: _ClassVar[Reason]
    REASON_ATTESTATION: _ClassVar[Reason]
    REASON_ATTESTATION_EXPIRED: _ClassVar[Reason]
KIND_UNSPECIFIED: Kind
KIND_MANIFEST: Kind
KIND_PEER_RECORD: Kind
KIND_CLAIM: Kind
KIND_CONTRIBUTION: Kind
KIND_BALLOT: Kind
KIND_RECEIPT: Kind
KIND_COMMIT: Kind
KIND_STATE_REPORT: Kind
KIND_LEAVE: Kind
KIND_HEARTBEAT: Kind
KIND_EVIDENCE: Kind
REASON_UNSPECIFIED: Reason
REASON_BAD_SIGNATURE: Reason
REASON_WRONG_RUN: Reason
REASON_MALFORMED: Reason
REASON_OVERSIZE: Reason
REASON_STALE_ROUND: Reason
REASON_FUTURE_ROUND: Reason
REASON_WRONG_HEAD: Reason
REASON_WRONG_BASE: Reason
REASON_EQUIVOCATION: Reason
REASON_NOT_ON_ROSTER: Reason
REASON_NOT_ADMITTED: Reason
REASON_WRONG_STAGES: Reason
REASON_DIGEST_MISMATCH: Reason
REASON_SIZE_MISMATCH: Reason
REASON_NON_FINITE: Reason
REASON_NORM_TOO_LARGE: Reason
REASON_NORM_MISMATCH: Reason
REASON_IMPOSSIBLE_TOKENS: Reason
REASON_UNAVAILABLE: Reason
REASON_ABSENT: Reason
REASON_LATE: Reason
REASON_TOO_FEW_ACCEPTS: Reason
REASON_TOO_FEW_CLUSTERS: Reason
REASON_RATE: Reason
REASON_RUN_FINISHED: Reason
REASON_NOT_ATTESTED: Reason
REASON_ATTESTATION: Reason
REASON_ATTESTATION_EXPIRED: Reason

class Envelope(_message.Message):
    __slots__ = ("kind", "key", "body", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    key: bytes
    body: bytes
    signature: bytes
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., key: _Optional[bytes] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("address", "certificate", "dht_addresses", "sequence", "name", "version")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    DHT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    address: str
    certificate: bytes
    dht_addresses: _containers.RepeatedScalarFieldContainer[str]
    sequence: int
    name: str
    version: str
    def __init__(self, address: _Optional[str] = ..., certificate: _Optional[bytes] = ..., dht_addresses: _Optional[_Iterable[str]] = ..., sequence: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("kind", "blob", "certificates", "collateral", "gpus")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    COLLATERAL_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    blob: bytes
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    collateral: bytes
    gpus: _containers.RepeatedCompositeFieldContainer[Evidence]
    def __init__(self, kind: _Optional[str] = ..., blob: _Optional[bytes] = ..., certificates: _Optional[_Iterable[bytes]] = ..., collateral: _Optional[bytes] = ..., gpus: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ...) -> None: ...

class BoundEvidence(_message.Message):
    __slots__ = ("key", "run", "nonce", "evidence")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    run: bytes
    nonce: bytes
    evidence: Evidence
    def __init__(self, key: _Optional[bytes] = ..., run: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ...) -> None: ...

class Attestation(_message.Message):
    __slots__ = ("peer", "nonce", "kind", "measurement", "tcb_status", "gpus", "valid_until_ms")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENT_FIELD_NUMBER: _ClassVar[int]
    TCB_STATUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    VALID_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    nonce: bytes
    kind: str
    measurement: str
    tcb_status: str
    gpus: int
    valid_until_ms: int
    def __init__(self, peer: _Optional[str] = ..., nonce: _Optional[bytes] = ..., kind: _Optional[str] = ..., measurement: _Optional[str] = ..., tcb_status: _Optional[str] = ..., gpus: _Optional[int] = ..., valid_until_ms: _Optional[int] = ...) -> None: ...

class StageState(_message.Message):
    __slots__ = ("stage", "digest")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage: int
    digest: bytes
    def __init__(self, stage: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("round", "head", "cluster", "first_stage", "stage_count", "states")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    cluster: str
    first_stage: int
    stage_count: int
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., cluster: _Optional[str] = ..., first_stage: _Optional[int] = ..., stage_count: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ...) -> None: ...

class StagePayload(_message.Message):
    __slots__ = ("stage", "base_state", "digest", "size", "norm", "effective_rank", "error")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BASE_STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stage: int
    base_state: bytes
    digest: bytes
    size: int
    norm: float
    effective_rank: float
    error: float
    def __init__(self, stage: _Optional[int] = ..., base_state: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ..., norm: _Optional[float] = ..., effective_rank: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("round", "head", "cluster", "inner_steps", "tokens", "loss", "samples_read", "payloads", "attestation")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_READ_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    cluster: str
    inner_steps: int
    tokens: int
    loss: float
    samples_read: int
    payloads: _containers.RepeatedCompositeFieldContainer[StagePayload]
    attestation: bytes
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., cluster: _Optional[str] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., samples_read: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[StagePayload, _Mapping]]] = ..., attestation: _Optional[bytes] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("round", "head", "contributions")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    contributions: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., contributions: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ContributionVerdict(_message.Message):
    __slots__ = ("contribution", "reason", "stage")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    contribution: bytes
    reason: Reason
    stage: int
    def __init__(self, contribution: _Optional[bytes] = ..., reason: _Optional[_Union[Reason, str]] = ..., stage: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("round", "head", "verdicts")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    verdicts: _containers.RepeatedCompositeFieldContainer[ContributionVerdict]
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., verdicts: _Optional[_Iterable[_Union[ContributionVerdict, _Mapping]]] = ...) -> None: ...

class StateReport(_message.Message):
    __slots__ = ("round", "head", "states", "evaluated", "evaluation_loss", "replayed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    evaluated: bool
    evaluation_loss: float
    replayed: bool
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ..., evaluated: _Optional[bool] = ..., evaluation_loss: _Optional[float] = ..., replayed: _Optional[bool] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    def __init__(self, head: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "round", "step", "loss", "head", "tokens_per_second")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    step: int
    loss: float
    head: bytes
    tokens_per_second: float
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., head: _Optional[bytes] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("cluster", "hosts", "joined", "missed", "samples_counted", "lease")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_COUNTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    hosts: _containers.RepeatedCompositeFieldContainer[Host]
    joined: int
    missed: int
    samples_counted: int
    lease: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, cluster: _Optional[str] = ..., hosts: _Optional[_Iterable[_Union[Host, _Mapping]]] = ..., joined: _Optional[int] = ..., missed: _Optional[int] = ..., samples_counted: _Optional[int] = ..., lease: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("peer", "first_stage", "stage_count", "attestation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    first_stage: int
    stage_count: int
    attestation: Attestation
    def __init__(self, peer: _Optional[str] = ..., first_stage: _Optional[int] = ..., stage_count: _Optional[int] = ..., attestation: _Optional[_Union[Attestation, _Mapping]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("cluster", "tokens", "payloads", "holders", "attestations")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ATTESTATIONS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    tokens: int
    payloads: _containers.RepeatedCompositeFieldContainer[StagePayload]
    holders: _containers.RepeatedScalarFieldContainer[str]
    attestations: _containers.RepeatedCompositeFieldContainer[Attestation]
    def __init__(self, cluster: _Optional[str] = ..., tokens: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[StagePayload, _Mapping]]] = ..., holders: _Optional[_Iterable[str]] = ..., attestations: _Optional[_Iterable[_Union[Attestation, _Mapping]]] = ...) -> None: ...

class Exclusion(_message.Message):
    __slots__ = ("peer", "reason", "detail")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: Reason
    detail: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class StageNorm(_message.Message):
    __slots__ = ("stage", "norm")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    stage: int
    norm: float
    def __init__(self, stage: _Optional[int] = ..., norm: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "previous", "closing", "opened_at_ms", "closed_at_ms", "ballot_at_ms", "claims", "leaves", "contributions", "receipts", "reports", "refusals", "roster", "counted", "excluded", "states", "median_norms", "loss", "evaluated", "evaluation_loss", "data_cursor", "free_spans", "attested", "keep", "inner_steps")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    BALLOT_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_NORMS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    FREE_SPANS_FIELD_NUMBER: _ClassVar[int]
    ATTESTED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    round: int
    previous: bytes
    closing: bool
    opened_at_ms: int
    closed_at_ms: int
    ballot_at_ms: int
    claims: _containers.RepeatedCompositeFieldContainer[Envelope]
    leaves: _containers.RepeatedCompositeFieldContainer[Envelope]
    contributions: _containers.RepeatedCompositeFieldContainer[Envelope]
    receipts: _containers.RepeatedCompositeFieldContainer[Envelope]
    reports: _containers.RepeatedCompositeFieldContainer[Envelope]
    refusals: _containers.RepeatedCompositeFieldContainer[Exclusion]
    roster: _containers.RepeatedCompositeFieldContainer[Member]
    counted: _containers.RepeatedCompositeFieldContainer[Counted]
    excluded: _containers.RepeatedCompositeFieldContainer[Exclusion]
    states: _containers.RepeatedCompositeFieldContainer[StageState]
    median_norms: _containers.RepeatedCompositeFieldContainer[StageNorm]
    loss: float
    evaluated: bool
    evaluation_loss: float
    data_cursor: int
    free_spans: _containers.RepeatedCompositeFieldContainer[Span]
    attested: _containers.RepeatedCompositeFieldContainer[Attestation]
    keep: int
    inner_steps: int
    def __init__(self, round: _Optional[int] = ..., previous: _Optional[bytes] = ..., closing: _Optional[bool] = ..., opened_at_ms: _Optional[int] = ..., closed_at_ms: _Optional[int] = ..., ballot_at_ms: _Optional[int] = ..., claims: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., leaves: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., contributions: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., reports: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., roster: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., counted: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ..., excluded: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[StageState, _Mapping]]] = ..., median_norms: _Optional[_Iterable[_Union[StageNorm, _Mapping]]] = ..., loss: _Optional[float] = ..., evaluated: _Optional[bool] = ..., evaluation_loss: _Optional[float] = ..., data_cursor: _Optional[int] = ..., free_spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., attested: _Optional[_Iterable[_Union[Attestation, _Mapping]]] = ..., keep: _Optional[int] = ..., inner_steps: _Optional[int] = ...) -> None: ...
