"""The manifest: what a run is. TOML run file -> typed values -> canonical bytes -> run id.

Canonical bytes are JSON with sorted keys, no spaces and every default written out, so two files that mean the same run have the
same id. Values that a file leaves out and admission decides (`_resolved`) are written out, too. A setting that does not apply is
absent, never null. Unknown keys fail with the nearest right name.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256, verify
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import key_of_peer, peer_id, several
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.allowed_values import faults, raise_all
from dilocox.protocol.run.model import Count, Lora, Model, Positive, Section
from dilocox.protocol.run.tensors import phase_bytes

__all__ = ["NAME", "RUN_NAME", "Data", "Lora", "Manifest", "Model", "RunFileError", "Schedule"]

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=100)]
Ratio = Annotated[float, Field(ge=1, le=1024)]
Schedule = Literal["1f1b", "interleaved"]


def _peers(names: Iterable[str]) -> None:
    """Raises ValueError where one is no peer id."""
    for name in names:
        try:
            key_of_peer(name)
        except ValueError as error:
            raise ValueError(f"{error}: copy what `dilocox id --home FOLDER` prints for that daemon's folder") from error


RUN_NAME = r"[A-Za-z0-9._-]{1,64}"


class Run(Section):
    name: Annotated[str, Field(pattern=f"^{RUN_NAME}$")]
    owner: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The owner's raw Ed25519 public key; the manifest is signed with it."""
    coordinator: str | None = None
    """Peer id whose signature makes the run's commits; default: the owner's."""

    relays: Annotated[tuple[str, ...], Field(max_length=limits.HOLDERS)] = ()
    """Peer ids of relays, which store data for peers that are not reachable and train nothing: `dilocox relay`."""

    @field_validator("coordinator", "relays")
    @classmethod
    def _are_peers(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        _peers((value,) if isinstance(value, str) else value or ())
        return value


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Name of data: an operator gives the folder of a copy with `--data NAME=DIR`."""


class Data(Section):
    """Training data, by digest. A manifest names no files: otherwise it could read everything that a node's user can."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    """Name for people, and for `--data NAME=DIR`."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the corpus: `dilocox data build` prints it."""
    private: bool = False
    """Each cluster trains on private text (`dilocox node --private DIR`), and publishes pseudo-gradients only. The named
    corpus provides the tokenizer and the evaluation text; scores are measured on its training text."""
    loss_mask: bool = False
    """Train and evaluate on answers only, in conversations (`dilocox data build --chat`). A step's loss is the mean over the
    answers' tokens of its batch; these are also a contribution's tokens, and so its weight."""
    seed: Count = 0
    """Seed of the order in which samples are read."""
    evaluation_sequences: Positive = 32
    """So many of the held-out samples are evaluated, spread evenly."""


class Training(Section):
    """The inner loop."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate
    muon_learning_rate: Rate = 0.02
    """Learning rate of hidden matrices with the optimizer muon; AdamW trains the rest at learning_rate."""
    muon_momentum: Beta = 0.95
    """A cluster alone, with a small batch, does better with less of it (docs/results.md)."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Count = 0
    total_steps: Positive
    """The cosine ends here, at a tenth of the peak."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Positive
    """Sequences per inner step and cluster."""
    microbatches: Count = 0
    """Microbatches of an inner step. 0: each node chooses them, and whether it computes activations again, for its devices."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. interleaved gives each worker several chunks of the model: it waits less at the ends of a step,
    and transfers more activations."""
    checkpoint_activations: bool = False
    """Store only the input of each layer until its gradient, and compute the rest again: less memory, more computation.
    Without `microbatches` each node chooses."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Precision of matrix products, and of activations between stages; auto: bf16 on GPUs. Parameters, gradients and
    moments are always float32."""

    def in_bfloat16(self, cuda: bool) -> bool:
        return self.precision == "bf16" or (self.precision == "auto" and cuda)

    @model_validator(mode="after")
    def _divides(self) -> "Training":
        if self.microbatches and self.batch_size % self.microbatches:
            raise ValueError("batch_size must be a multiple of microbatches")
        if self.checkpoint_activations and not self.microbatches:
            raise ValueError("checkpoint_activations needs microbatches: set both, or neither and each node chooses")
        return self


class Outer(Section):
    """The outer optimizer: Nesterov on the mean pseudo-gradient. Momentum 0 is plain averaging."""

    learning_rate: Rate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    aggregate: Literal["mean", "centered-clip"] = "mean"
    """Aggregation of payloads into one pseudo-gradient; node/outer/aggregate.py lists the costs."""


class Compression(Section):
    codec: Literal["lowrank-int4", "int4", "int2", "topk-int2", "fp32"] = "lowrank-int4"
    rank: Annotated[int, Field(gt=0, le=limits.RANK)] | None = None
    """Rank of lowrank-int4."""
    k: Annotated[int, Field(gt=0, le=limits.TOPK)] | None = None
    """Values kept of every 4,096 by topk-int2, on average over the stage."""
    entropy_coding: bool = False
    """Huffman coding of the payload, lossless."""
    adapt: Literal["fixed", "effective-rank"] = "fixed"
    """Rule by which the rank of lowrank-int4 changes from round to round (adaptive.py). At equal bytes effective-rank has
    not ended lower than `fixed` by more than seeds differ (docs/results.md)."""

    @model_validator(mode="after")
    def _consistent(self) -> "Compression":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.codec == "lowrank-int4" and self.rank is None:
            yield "lowrank-int4 needs a rank"
        if self.codec == "topk-int2" and self.k is None:
            yield "topk-int2 needs k"
        if self.adapt != "fixed" and self.codec != "lowrank-int4":
            yield "only lowrank-int4 measures an effective rank"

    @property
    def keep(self) -> int:
        """Return the codec's rank or k; 0 for a codec without one."""
        return {"lowrank-int4": self.rank, "topk-int2": self.k}.get(self.codec) or 0


class Rounds(Section):
    count: Annotated[int, Field(gt=0, lt=limits.ROUNDS)]
    inner_steps: Annotated[int, Field(gt=0, le=limits.INNER_STEPS)]
    max_inner_steps: Annotated[int, Field(gt=0, le=limits.INNER_STEPS)]
    """Most inner steps: a cluster trains on to this number while a commit is late, then waits."""
    round_seconds: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    """Time-boxed rounds: a phase lasts so long instead of inner_steps, and each cluster takes the steps that fit."""
    overlap: Literal["none", "delayed", "rebase"] = "rebase"
    lead_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share for rebase: the part of its own uncommitted work that a cluster trains on with."""
    synchronous_rounds: Count = 0
    """The first rounds wait for their commit (overlap none)."""
    min_clusters: Annotated[int, Field(gt=0, le=limits.CLUSTERS)] = 2
    start_clusters: Annotated[int, Field(gt=0, le=limits.CLUSTERS)] = 2
    """The first round opens when so many clusters are here; where a file leaves it out, min_clusters."""
    deadline_seconds: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0
    """A round never waits longer than this for contributions; measured times shorten it."""
    vote_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Nor longer than this for votes."""
    liveness_seconds: Annotated[float, Field(gt=0, le=3600)] = 15.0
    """A peer is absent after so many seconds without a heartbeat."""
    snapshot_every: Positive = 5
    """Peers store the state of every Nth round for joiners."""
    evaluate_every: Count = 1
    """Measure the held-out loss of the state after every so-manieth round; 0: never."""
    clip_ratio: Ratio = 2.0
    """A contribution whose norm is above this multiple of the round's median counts by as much less; what is cut off goes back to
    its author's error feedback."""
    tensor_clip_ratio: Ratio | Literal[0] = 1.25
    """The same for each tensor, by that tensor's median; 0: tensors are not clipped individually. Default: 1.25 in an open
    run, which costs honest clusters nothing measurable (docs/results/poisoning.md); 2 with an allow-list."""
    weight_cap: Ratio | Literal[0] = 1.0
    """A contribution of a cluster that has earned nothing weighs by its tokens, at most this multiple of the counted ones' lower
    median; 0: no cap. Where a file leaves it out: 1 in an open run, 0 with an allow-list."""

    @model_validator(mode="after")
    def _consistent(self) -> "Rounds":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.max_inner_steps < self.inner_steps:
            yield "inner_steps <= max_inner_steps does not hold"
        if self.start_clusters < self.min_clusters:
            yield "start_clusters must be at least min_clusters"
        if self.round_seconds is not None and self.deadline_seconds <= self.round_seconds:
            yield f"deadline_seconds {self.deadline_seconds:g} is over before a phase of round_seconds {self.round_seconds:g}"


class Scoring(Section):
    """Scores: the measured effect of a contribution on the loss decides whether it counts (protocol/checks)."""

    voters: Annotated[int, Field(ge=0, le=limits.SCORERS)] = 0
    """Number of clusters drawn to score each contribution; all others if there are fewer. 0: no scores."""
    share: Fraction = 0.03
    """Share of a cluster's time for scoring; a voter accepts what it could not score in time."""


class Audit(Section):
    """A stretch of what a cluster trained is computed again by others (protocol/checks/audit_rules.py)."""

    segments: Annotated[int, Field(ge=0, le=limits.SEGMENTS)] = 0
    """Segments of the longest phase between the states that a contribution commits to. 0: no audits."""
    share: Fraction = 0.25
    """Share of the counted contributions that is audited."""
    largest_distance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Largest distance between an auditor's result and the announced one, relative to the length of the segment; machines
    of different kinds differ."""


class Standing(Section):
    """Reputation that a cluster earns by counted work (protocol/consensus/reputation.py)."""

    rounds: Annotated[int, Field(ge=0, le=limits.STANDING)] = 64
    """Counted rounds to the full reputation; a newcomer begins with a sixteenth. 0: all are equal. Default: 64 in an open
    run, 0 with an allow-list."""


class Admission(Section):
    policy: Literal["open", "allow-list"] = "open"
    allow: tuple[str, ...] = ()
    """Peer ids: with an allow-list those who may take part. In an open run the founders: they alone
    take a seat in its first commit, with full standing; where none are named, any cluster may."""
    public_read: bool = True
    """True: any peer may follow the run, and fetch payloads, states and commits. False: only peers that may take part, so those on
    the allow-list, or in an open run every peer that identifies itself. Default: true in an open run."""

    @field_validator("allow")
    @classmethod
    def _are_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _peers(value)
        return value


Registers = Annotated[str, Field(pattern=r"^([0-9a-fA-F]{64,128}|[*])(:([0-9a-fA-F]{64,128}|[*]))*$")]


class Attestation(Section):
    """Evidence that admits a peer. Without kinds the run requires none."""

    kinds: tuple[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")], ...] = ()
    """`tdx`, `sev-snp`, `simulated` (testnets only), or a kind that a plug-in adds."""
    measurements: dict[str, tuple[Registers, ...]] = Field(default={})
    """Allowed measurements by kind; an empty list denies. Registers are joined by colons; `*` allows any value of one."""
    tcb_statuses: tuple[str, ...] = ("UpToDate",)
    """Allowed TCB statuses of TDX."""
    minimum_tcb: dict[str, dict[str, int]] = Field(default={})
    """Minimum versions by kind, then component: `evaluation` for tdx; `bl`, `tee`, `snp`, `ucode`, `fmc` for sev-snp."""
    vmpl: Annotated[int, Field(ge=0, le=3)] = 0
    """Highest admitted virtual machine privilege level number of sev-snp."""
    require_gpu: bool = False
    gpu_measurements: dict[str, dict[str, tuple[str, ...]]] = Field(default={})
    """Allowed SHA-384 values of GPUs, by "driver/VBIOS", then index."""
    lifetime_seconds: Positive = 3600
    """A verdict lasts at most this long, then the peer is challenged again."""

    @model_validator(mode="after")
    def _consistent(self) -> "Attestation":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        for kind in (*self.measurements, *self.minimum_tcb):
            if kind not in self.kinds:
                yield f"{kind} has measurements or a minimum TCB, but is not among kinds"
        if set(self.kinds) & {"nvidia"}:
            yield "GPU evidence never admits alone: name a CPU kind, and set require_gpu"


class Settlement(Section):
    """Contract that pays for the run's work (plugins/settlement). Without it commits carry no merit."""

    chain_id: Annotated[int, Field(gt=0, lt=1 << 63)]
    """Chain id of the EVM chain (EIP-155)."""
    contract: Annotated[str, Field(pattern=r"^0x[0-9a-f]{40}$")]
    """Its address, in lower case."""


class Availability(Section):
    """Erasure shards: peers store shards of what commits name, for the case that no provider is left. Without this, peers
    store whole payloads only until two later snapshots are agreed."""

    needed_share: Annotated[float, Field(gt=0, le=0.9)] = 0.5
    """The part of the shares that restores. Together peers store the inverse of it times what is shared."""
    rounds: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Number of rounds for which shards of counted payloads are stored; of states those of the two newest snapshots."""
    megabytes: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    """Disk space of each peer for its shards (10⁶ bytes): half for counted payloads, then states, then more counted
    payloads."""

    @property
    def most_bytes(self) -> int:
        return self.megabytes * 1_000_000


SHOWN_CHARACTERS = 300
"""Most that an error repeats of what is wrong with a manifest that arrived."""
LOOPED_STAGES, LOOPED_MICROBATCHES = 4, 2
"""Fewest with which a pipeline can be looped: two workers with two chunks each, and a microbatch for either."""


class RunFileError(ConfigError):
    """Error: a run file that defines no run."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        """`faults`: path of a key, empty for the whole file, and what is wrong with it."""
        self.faults = tuple(faults)
        lines = [f"  {path}: {why}" if path else f"  {why}" for path, why in self.faults]
        super().__init__("\n".join(["the run file cannot be used:", *lines]))


def _with_decided(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of the same run in which no value depends on another that is left out."""
    rounds, admission = document.get("rounds", {}), document.get("admission", {})
    if not isinstance(rounds, dict) or not isinstance(admission, dict):
        return document  # sections already, or an error that validation reports
    is_open = admission.get("policy", "open") == "open"
    start = {"start_clusters": rounds["min_clusters"]} if "min_clusters" in rounds else {}
    bounds = {"weight_cap": float(is_open), "tensor_clip_ratio": 1.25 if is_open else 2.0}
    decided = {"rounds": {**start, **bounds}, "standing": {"rounds": 64 * is_open}, "admission": {"public_read": is_open}}
    filled = {name: {**values, **document.get(name, {})} for name, values in decided.items() if _is_table(document, name)}
    return {**document, **filled}


def _is_table(document: dict[str, Any], name: str) -> bool:
    return isinstance(document.get(name, None if name == "rounds" else {}), dict)  # rounds cannot be left out


class Manifest(Section):
    run: Run
    model: Model
    data: Data
    training: Training
    outer: Outer = Outer()
    compression: Compression
    rounds: Rounds
    scoring: Scoring = Scoring()
    audit: Audit = Audit()
    standing: Standing = Standing()
    admission: Admission = Admission()
    attestation: Attestation = Attestation()
    settlement: Settlement | None = None
    availability: Availability | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, document: Any) -> Any:
        """Write out what a run file leaves out and its admission decides."""
        return _with_decided(document) if isinstance(document, dict) else document

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        training, stages = self.training, self.model.stages
        microbatches = training.microbatches or training.batch_size
        if training.schedule == "interleaved" and (stages < LOOPED_STAGES or microbatches < LOOPED_MICROBATCHES):
            yield (
                "training.schedule interleaved wants two stages and a microbatch for each of two workers at least:"
                f" {LOOPED_STAGES} stages and {LOOPED_MICROBATCHES} microbatches, not {stages} and {microbatches}"
            )
        if self.audit.segments and not training.microbatches:
            yield "audit.segments needs training.microbatches, so that auditors compute the same sums: set it, such as 4"
        if self.audit.segments and self.data.private:
            yield "audit.segments and data.private: nobody else has the text that a cluster trained on; leave one out"
        if self.model.lora is not None and self.compression.codec == "lowrank-int4":
            yield 'model.lora and lowrank-int4: adapters are of low rank already; set compression.codec = "int4"'
        founders = frozenset(self.admission.allow)
        # An allow-list grows name by name (`dilocox market hire`): `check` and the coordinator judge that one.
        if self.admission.policy == "open" and 0 < len(founders) < self.rounds.start_clusters:
            yield (
                f"admission.allow names {several(len(founders), 'founder')}, and the first round waits for"
                f" {self.rounds.start_clusters} clusters: name more peer ids that `dilocox id --home FOLDER` prints, or lower"
                " rounds.start_clusters"
            )

    @classmethod
    def from_toml(cls, text: str) -> "Manifest":
        """Raises RunFileError naming every key that is wrong."""
        try:
            document = tomllib.loads(text)
            manifest = cls.model_validate(document)
        except ValidationError as error:
            raise RunFileError(faults(cls, error, document)) from error
        except (ValueError, RecursionError) as error:
            raise RunFileError([("", f"the run file is not TOML: {error}")]) from error
        if (size := len(manifest.canonical_bytes())) > limits.MANIFEST_BYTES:
            raise RunFileError(
                [("", f"the run's manifest has {size:,} bytes; no peer takes more than {limits.MANIFEST_BYTES:,}")]
            )
        return manifest

    @classmethod
    def from_canonical(cls, raw: bytes) -> "Manifest":
        """Parse what arrived. Raises RemoteError, also when the bytes are not the canonical form."""
        if len(raw) > limits.MANIFEST_BYTES:
            raise RemoteError(pb.REASON_OVERSIZE, f"a manifest of {len(raw)} bytes")
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            raise RemoteError(pb.REASON_MALFORMED, f"not a manifest: {cls._first_fault(raw, error)}") from error
        if manifest.canonical_bytes() != raw:
            raise RemoteError(pb.REASON_MALFORMED, "not the canonical form of its manifest")
        return manifest

    @classmethod
    def _first_fault(cls, raw: bytes, error: ValidationError) -> str:
        """Return in words, and at most SHOWN_CHARACTERS of them, what is wrong with bytes that are no manifest."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            return "it is not JSON"
        path, why = faults(cls, error, document)[0]
        return f"{path}: {why}"[:SHOWN_CHARACTERS] if path else why[:SHOWN_CHARACTERS]

    def canonical_bytes(self) -> bytes:
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def run_id(self) -> bytes:
        return sha256(self.canonical_bytes())

    @property
    def owner(self) -> str:
        """Return the peer id that signs the manifest and appoints coordinators."""
        return peer_id(bytes.fromhex(self.run.owner))

    @property
    def coordinator(self) -> str:
        """Return the peer id that signs commits until the owner appoints another one."""
        return self.run.coordinator or self.owner

    def may_read(self, peer: str) -> bool:
        """Whether this peer, empty where a caller does not say who it is, may follow the run before it is on the roster."""
        if self.admission.public_read:
            return True
        is_open = self.admission.policy == "open"
        named = (self.owner, self.coordinator, *self.run.relays, *self.admission.allow)
        return bool(peer) and (is_open or peer in named)

    @property
    def largest_rms(self) -> float:
        """Largest change of a tensor's weights by one payload, as root mean square; voters refuse more.

        max_inner_steps steps of the largest learning rate: farther than an honest phase goes.
        """
        rates = [self.training.learning_rate, self.training.muon_learning_rate * (self.training.optimizer == "muon")]
        return self.rounds.max_inner_steps * max(rates)

    @property
    def phase_bytes(self) -> int:
        """Return the bytes of an audit checkpoint of all stages."""
        return phase_bytes(self.model, self.training.optimizer == "muon")

    @property
    def begins(self) -> str:
        """A sentence without its end: when the run begins."""
        clusters = several(self.rounds.start_clusters, "cluster is", "clusters are")
        return f"the run begins when {clusters} here"

    def nominal_steps(self, round: int) -> int:
        """Return the inner steps before a round, if every round took its H: the position of a time-boxed round in the
        schedule."""
        return (round - 1) * self.rounds.inner_steps

    def overlap(self, round: int) -> str:
        return "none" if round <= self.rounds.synchronous_rounds else self.rounds.overlap

    @property
    def tokens_per_step(self) -> int:
        return self.training.batch_size * self.model.sequence_length

    def snapshot_round(self, round: int) -> int:
        """Return the newest round up to `round` whose starting state peers store for joiners; 1 is the initial state."""
        every = self.rounds.snapshot_every
        return 1 + (round - 1) // every * every


def open_manifest(envelope: pb.Envelope, run_id: bytes) -> Manifest:
    """The manifest of this run, signed by its owner. Raises RemoteError."""
    manifest = Manifest.from_canonical(envelope.body)
    if manifest.run_id != run_id:
        raise RemoteError(pb.REASON_WRONG_RUN, "the manifest does not hash to the run id")
    if not verify(bytes.fromhex(manifest.run.owner), envelope.signature, pb.KIND_MANIFEST, run_id, envelope.body):
        raise RemoteError(pb.REASON_WRONG_RUN, f"the manifest is not signed by its owner {manifest.owner}")
    return manifest
