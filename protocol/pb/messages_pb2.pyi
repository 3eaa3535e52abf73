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
    KIND_CLUSTER: _ClassVar[Kind]
    KIND_CALL: _ClassVar[Kind]
    KIND_ANSWER: _ClassVar[Kind]
    KIND_HELD: _ClassVar[Kind]
    KIND_APPOINTMENT: _ClassVar[Kind]
    KIND_JOB: _ClassVar[Kind]
    KIND_OFFER: _ClassVar[Kind]
    KIND_LINE: _ClassVar[Kind]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPT: _ClassVar[Outcome]
    OUTCOME_IGNORE: _ClassVar[Outcome]
    OUTCOME_REJECT: _ClassVar[Outcome]

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
    REASON_DID_NOT_VOTE: _ClassVar[Reason]
    REASON_RESTING: _ClassVar[Reason]
    REASON_CLUSTER: _ClassVar[Reason]
    REASON_SUPERSEDED: _ClassVar[Reason]
    REASON_COPIED: _ClassVar[Reason]
    REASON_HARMS: _ClassVar[Reason]
    REASON_AUDIT: _ClassVar[Reason]
    REASON_LEFT: _ClassVar[Reason]
    REASON_SHARES: _ClassVar[Reason]

class AuditVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIT_UNSPECIFIED: _ClassVar[AuditVerdict]
    AUDIT_EQUAL: _ClassVar[AuditVerdict]
    AUDIT_NEAR: _ClassVar[AuditVerdict]
    AUDIT_DIFFERS: _ClassVar[AuditVerdict]
    AUDIT_UNSERVED: _ClassVar[AuditVerdict]
    AUDIT_MALFORMED: _ClassVar[AuditVerdict]
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
KIND_CLUSTER: Kind
KIND_CALL: Kind
KIND_ANSWER: Kind
KIND_HELD: Kind
KIND_APPOINTMENT: Kind
KIND_JOB: Kind
KIND_OFFER: Kind
KIND_LINE: Kind
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPT: Outcome
OUTCOME_IGNORE: Outcome
OUTCOME_REJECT: Outcome
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
REASON_DID_NOT_VOTE: Reason
REASON_RESTING: Reason
REASON_CLUSTER: Reason
REASON_SUPERSEDED: Reason
REASON_COPIED: Reason
REASON_HARMS: Reason
REASON_AUDIT: Reason
REASON_LEFT: Reason
REASON_SHARES: Reason
AUDIT_UNSPECIFIED: AuditVerdict
AUDIT_EQUAL: AuditVerdict
AUDIT_NEAR: AuditVerdict
AUDIT_DIFFERS: AuditVerdict
AUDIT_UNSERVED: AuditVerdict
AUDIT_MALFORMED: AuditVerdict

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
    __slots__ = ("address", "certificate", "dht_addresses", "sequence", "name", "version", "elsewhere")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    DHT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    address: str
    certificate: bytes
    dht_addresses: _containers.RepeatedScalarFieldContainer[str]
    sequence: int
    name: str
    version: str
    elsewhere: _containers.RepeatedCompositeFieldContainer[Elsewhere]
    def __init__(self, address: _Optional[str] = ..., certificate: _Optional[bytes] = ..., dht_addresses: _Optional[_Iterable[str]] = ..., sequence: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., elsewhere: _Optional[_Iterable[_Union[Elsewhere, _Mapping]]] = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ("address", "certificate")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    address: str
    certificate: bytes
    def __init__(self, address: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...

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

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("serial", "round", "head", "state", "cluster", "account")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    serial: int
    round: int
    head: bytes
    state: bytes
    cluster: bytes
    account: bytes
    def __init__(self, serial: _Optional[int] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., state: _Optional[bytes] = ..., cluster: _Optional[bytes] = ..., account: _Optional[bytes] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("serial", "round", "head", "hosts")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    serial: int
    round: int
    head: bytes
    hosts: _containers.RepeatedCompositeFieldContainer[Host]
    def __init__(self, serial: _Optional[int] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., hosts: _Optional[_Iterable[_Union[Host, _Mapping]]] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("peer", "first_stage", "stage_count", "copy", "attestation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    first_stage: int
    stage_count: int
    copy: int
    attestation: Attestation
    def __init__(self, peer: _Optional[str] = ..., first_stage: _Optional[int] = ..., stage_count: _Optional[int] = ..., copy: _Optional[int] = ..., attestation: _Optional[_Union[Attestation, _Mapping]] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("stage", "digest", "size", "norms", "shares")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    digest: bytes
    size: int
    norms: bytes
    shares: bytes
    def __init__(self, stage: _Optional[int] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ..., norms: _Optional[bytes] = ..., shares: _Optional[bytes] = ...) -> None: ...

class Leaves(_message.Message):
    __slots__ = ("leaves",)
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    def __init__(self, leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ...) -> None: ...

class StageStates(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("round", "head", "inner_steps", "tokens", "loss", "samples_read", "leaves", "base_state", "norm", "effective_rank", "error", "attestation", "holders", "audit", "size", "shares")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_READ_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    BASE_STATE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    inner_steps: int
    tokens: int
    loss: float
    samples_read: int
    leaves: bytes
    base_state: bytes
    norm: int
    effective_rank: float
    error: float
    attestation: bytes
    holders: _containers.RepeatedScalarFieldContainer[str]
    audit: bytes
    size: int
    shares: bytes
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., samples_read: _Optional[int] = ..., leaves: _Optional[bytes] = ..., base_state: _Optional[bytes] = ..., norm: _Optional[int] = ..., effective_rank: _Optional[float] = ..., error: _Optional[float] = ..., attestation: _Optional[bytes] = ..., holders: _Optional[_Iterable[str]] = ..., audit: _Optional[bytes] = ..., size: _Optional[int] = ..., shares: _Optional[bytes] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("step", "samples_read", "optimizer_steps", "states")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_READ_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples_read: int
    optimizer_steps: int
    states: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, step: _Optional[int] = ..., samples_read: _Optional[int] = ..., optimizer_steps: _Optional[int] = ..., states: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Marks(_message.Message):
    __slots__ = ("marks", "machine", "threads", "workers")
    MARKS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    machine: str
    threads: int
    workers: int
    def __init__(self, marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ..., machine: _Optional[str] = ..., threads: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("round", "head", "contributions", "seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    contributions: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., contributions: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("index", "reason", "stage", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: Reason
    stage: int
    score: int
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., stage: _Optional[int] = ..., score: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("round", "ballot", "accepted", "findings", "scores", "scored", "score", "measured", "audits", "lacking")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    round: int
    ballot: bytes
    accepted: bytes
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    scores: bytes
    scored: _containers.RepeatedScalarFieldContainer[int]
    score: _containers.RepeatedScalarFieldContainer[int]
    measured: bytes
    audits: _containers.RepeatedCompositeFieldContainer[AuditResult]
    lacking: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., ballot: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., scores: _Optional[bytes] = ..., scored: _Optional[_Iterable[int]] = ..., score: _Optional[_Iterable[int]] = ..., measured: _Optional[bytes] = ..., audits: _Optional[_Iterable[_Union[AuditResult, _Mapping]]] = ..., lacking: _Optional[_Iterable[int]] = ...) -> None: ...

class AuditResult(_message.Message):
    __slots__ = ("index", "verdict", "distance")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    index: int
    verdict: AuditVerdict
    distance: float
    def __init__(self, index: _Optional[int] = ..., verdict: _Optional[_Union[AuditVerdict, str]] = ..., distance: _Optional[float] = ...) -> None: ...

class StateReport(_message.Message):
    __slots__ = ("round", "head", "state", "evaluated", "evaluation_loss", "replayed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    round: int
    head: bytes
    state: bytes
    evaluated: bool
    evaluation_loss: float
    replayed: bool
    def __init__(self, round: _Optional[int] = ..., head: _Optional[bytes] = ..., state: _Optional[bytes] = ..., evaluated: _Optional[bool] = ..., evaluation_loss: _Optional[float] = ..., replayed: _Optional[bool] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("serial", "round", "head")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    serial: int
    round: int
    head: bytes
    def __init__(self, serial: _Optional[int] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("statement", "outcome", "reason", "detail", "round", "head", "valid_until_ms")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    VALID_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    statement: bytes
    outcome: Outcome
    reason: Reason
    detail: str
    round: int
    head: bytes
    valid_until_ms: int
    def __init__(self, statement: _Optional[bytes] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., valid_until_ms: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("blob", "round")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    blob: bytes
    round: int
    def __init__(self, blob: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("first", "second", "appointment")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    APPOINTMENT_FIELD_NUMBER: _ClassVar[int]
    first: Envelope
    second: Envelope
    appointment: Envelope
    def __init__(self, first: _Optional[_Union[Envelope, _Mapping]] = ..., second: _Optional[_Union[Envelope, _Mapping]] = ..., appointment: _Optional[_Union[Envelope, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("contribution", "answer")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    contribution: Envelope
    answer: Envelope
    def __init__(self, contribution: _Optional[_Union[Envelope, _Mapping]] = ..., answer: _Optional[_Union[Envelope, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "round", "step", "loss", "head", "tokens_per_second", "incomplete")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    step: int
    loss: float
    head: bytes
    tokens_per_second: float
    incomplete: bool
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., head: _Optional[bytes] = ..., tokens_per_second: _Optional[float] = ..., incomplete: _Optional[bool] = ...) -> None: ...

class Signed(_message.Message):
    __slots__ = ("signer", "body", "signature")
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signer: int
    body: bytes
    signature: bytes
    def __init__(self, signer: _Optional[int] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("cluster", "hosts", "joined", "missed", "samples_counted", "lease", "standing", "account")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_COUNTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    hosts: _containers.RepeatedCompositeFieldContainer[Host]
    joined: int
    missed: int
    samples_counted: int
    lease: _containers.RepeatedCompositeFieldContainer[Span]
    standing: Standing
    account: bytes
    def __init__(self, cluster: _Optional[str] = ..., hosts: _Optional[_Iterable[_Union[Host, _Mapping]]] = ..., joined: _Optional[int] = ..., missed: _Optional[int] = ..., samples_counted: _Optional[int] = ..., lease: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., account: _Optional[bytes] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("earned", "counted", "refused", "scored", "audited", "lacking")
    EARNED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    earned: int
    counted: int
    refused: int
    scored: int
    audited: int
    lacking: int
    def __init__(self, earned: _Optional[int] = ..., counted: _Optional[int] = ..., refused: _Optional[int] = ..., scored: _Optional[int] = ..., audited: _Optional[int] = ..., lacking: _Optional[int] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("round", "cluster", "lot", "auditors")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    LOT_FIELD_NUMBER: _ClassVar[int]
    AUDITORS_FIELD_NUMBER: _ClassVar[int]
    round: int
    cluster: str
    lot: int
    auditors: _containers.RepeatedCompositeFieldContainer[Auditor]
    def __init__(self, round: _Optional[int] = ..., cluster: _Optional[str] = ..., lot: _Optional[int] = ..., auditors: _Optional[_Iterable[_Union[Auditor, _Mapping]]] = ...) -> None: ...

class Auditor(_message.Message):
    __slots__ = ("cluster", "votes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    votes: int
    def __init__(self, cluster: _Optional[str] = ..., votes: _Optional[int] = ...) -> None: ...

class Away(_message.Message):
    __slots__ = ("key", "standing")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    standing: Standing
    def __init__(self, key: _Optional[bytes] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("contribution", "weight", "clip", "standing")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    contribution: int
    weight: int
    clip: int
    standing: int
    def __init__(self, contribution: _Optional[int] = ..., weight: _Optional[int] = ..., clip: _Optional[int] = ..., standing: _Optional[int] = ...) -> None: ...

class Exclusion(_message.Message):
    __slots__ = ("peer", "reason", "detail")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: Reason
    detail: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Rest(_message.Message):
    __slots__ = ("cluster", "until", "removals")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    until: int
    removals: int
    def __init__(self, cluster: _Optional[str] = ..., until: _Optional[int] = ..., removals: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "previous", "closed_at_ms", "collect_ms", "vote_ms", "open_ms", "ballot", "claims", "clusters", "leaves", "contributions", "receipts", "reports", "refusals", "attested", "closing", "roster", "counted", "excluded", "state", "norm", "loss", "evaluated", "evaluation_loss", "data_cursor", "free_spans", "rank_or_k", "inner_steps", "trained", "built_by", "resting", "collect_history", "vote_history", "data_root", "merit_root", "signers", "term", "appointment", "away", "audits", "merits")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    COLLECT_MS_FIELD_NUMBER: _ClassVar[int]
    VOTE_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_MS_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ATTESTED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    FREE_SPANS_FIELD_NUMBER: _ClassVar[int]
    RANK_OR_K_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    BUILT_BY_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    COLLECT_HISTORY_FIELD_NUMBER: _ClassVar[int]
    VOTE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    DATA_ROOT_FIELD_NUMBER: _ClassVar[int]
    MERIT_ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    APPOINTMENT_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    MERITS_FIELD_NUMBER: _ClassVar[int]
    round: int
    previous: bytes
    closed_at_ms: int
    collect_ms: int
    vote_ms: int
    open_ms: int
    ballot: Envelope
    claims: _containers.RepeatedCompositeFieldContainer[Signed]
    clusters: _containers.RepeatedCompositeFieldContainer[Signed]
    leaves: _containers.RepeatedCompositeFieldContainer[Signed]
    contributions: _containers.RepeatedCompositeFieldContainer[Signed]
    receipts: _containers.RepeatedCompositeFieldContainer[Signed]
    reports: _containers.RepeatedCompositeFieldContainer[Signed]
    refusals: _containers.RepeatedCompositeFieldContainer[Exclusion]
    attested: _containers.RepeatedCompositeFieldContainer[Attestation]
    closing: bool
    roster: _containers.RepeatedCompositeFieldContainer[Member]
    counted: _containers.RepeatedCompositeFieldContainer[Counted]
    excluded: _containers.RepeatedCompositeFieldContainer[Exclusion]
    state: bytes
    norm: int
    loss: float
    evaluated: bool
    evaluation_loss: float
    data_cursor: int
    free_spans: _containers.RepeatedCompositeFieldContainer[Span]
    rank_or_k: int
    inner_steps: int
    trained: int
    built_by: _containers.RepeatedScalarFieldContainer[str]
    resting: _containers.RepeatedCompositeFieldContainer[Rest]
    collect_history: _containers.RepeatedScalarFieldContainer[int]
    vote_history: _containers.RepeatedScalarFieldContainer[int]
    data_root: bytes
    merit_root: bytes
    signers: _containers.RepeatedScalarFieldContainer[bytes]
    term: int
    appointment: Envelope
    away: _containers.RepeatedCompositeFieldContainer[Away]
    audits: _containers.RepeatedCompositeFieldContainer[Audit]
    merits: _containers.RepeatedCompositeFieldContainer[Merit]
    def __init__(self, round: _Optional[int] = ..., previous: _Optional[bytes] = ..., closed_at_ms: _Optional[int] = ..., collect_ms: _Optional[int] = ..., vote_ms: _Optional[int] = ..., open_ms: _Optional[int] = ..., ballot: _Optional[_Union[Envelope, _Mapping]] = ..., claims: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., clusters: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., leaves: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., contributions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., reports: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., attested: _Optional[_Iterable[_Union[Attestation, _Mapping]]] = ..., closing: _Optional[bool] = ..., roster: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., counted: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ..., excluded: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., state: _Optional[bytes] = ..., norm: _Optional[int] = ..., loss: _Optional[float] = ..., evaluated: _Optional[bool] = ..., evaluation_loss: _Optional[float] = ..., data_cursor: _Optional[int] = ..., free_spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., rank_or_k: _Optional[int] = ..., inner_steps: _Optional[int] = ..., trained: _Optional[int] = ..., built_by: _Optional[_Iterable[str]] = ..., resting: _Optional[_Iterable[_Union[Rest, _Mapping]]] = ..., collect_history: _Optional[_Iterable[int]] = ..., vote_history: _Optional[_Iterable[int]] = ..., data_root: _Optional[bytes] = ..., merit_root: _Optional[bytes] = ..., signers: _Optional[_Iterable[bytes]] = ..., term: _Optional[int] = ..., appointment: _Optional[_Union[Envelope, _Mapping]] = ..., away: _Optional[_Iterable[_Union[Away, _Mapping]]] = ..., audits: _Optional[_Iterable[_Union[Audit, _Mapping]]] = ..., merits: _Optional[_Iterable[_Union[Merit, _Mapping]]] = ...) -> None: ...

class Merit(_message.Message):
    __slots__ = ("account", "merit")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    MERIT_FIELD_NUMBER: _ClassVar[int]
    account: bytes
    merit: int
    def __init__(self, account: _Optional[bytes] = ..., merit: _Optional[int] = ...) -> None: ...

class Appointment(_message.Message):
    __slots__ = ("term", "coordinator", "round", "head", "state")
    TERM_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    term: int
    coordinator: str
    round: int
    head: bytes
    state: bytes
    def __init__(self, term: _Optional[int] = ..., coordinator: _Optional[str] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., state: _Optional[bytes] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("link", "expires_at", "manifest", "appointment")
    LINK_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    APPOINTMENT_FIELD_NUMBER: _ClassVar[int]
    link: str
    expires_at: int
    manifest: Envelope
    appointment: Envelope
    def __init__(self, link: _Optional[str] = ..., expires_at: _Optional[int] = ..., manifest: _Optional[_Union[Envelope, _Mapping]] = ..., appointment: _Optional[_Union[Envelope, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("name", "expires_at", "devices", "cuda", "device_bytes", "host_bytes", "upload_bits", "download_bits", "hours", "price", "account", "evidence", "lines")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BITS_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BITS_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    name: str
    expires_at: int
    devices: int
    cuda: bool
    device_bytes: int
    host_bytes: int
    upload_bits: int
    download_bits: int
    hours: str
    price: int
    account: bytes
    evidence: BoundEvidence
    lines: _containers.RepeatedCompositeFieldContainer[Envelope]
    def __init__(self, name: _Optional[str] = ..., expires_at: _Optional[int] = ..., devices: _Optional[int] = ..., cuda: _Optional[bool] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., upload_bits: _Optional[int] = ..., download_bits: _Optional[int] = ..., hours: _Optional[str] = ..., price: _Optional[int] = ..., account: _Optional[bytes] = ..., evidence: _Optional[_Union[BoundEvidence, _Mapping]] = ..., lines: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ...) -> None: ...

class Line(_message.Message):
    __slots__ = ("peer", "upload_bits", "download_bits", "measured_at")
    PEER_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BITS_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BITS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    upload_bits: int
    download_bits: int
    measured_at: int
    def __init__(self, peer: _Optional[str] = ..., upload_bits: _Optional[int] = ..., download_bits: _Optional[int] = ..., measured_at: _Optional[int] = ...) -> None: ...
