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
from dilocox.protocol.allowed import faults, raise_all
from dilocox.protocol.crypto import sha256, verify
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import key_of_peer, peer_id, several
from dilocox.protocol.model import Count, Lora, Model, Positive, Section
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.tensors import phase_bytes

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
"""Of data: an operator says where a copy lies on that machine with `--data NAME=DIR`."""


class Data(Section):
    """What to train on: by digest. Where files lie is not said: a manifest would reach whatever a node's user can read."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    """For people, and for `--data NAME=DIR`."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the corpus: what `dilocox data build` printed."""
    private: bool = False
    """Each cluster trains on text of its own (`dilocox node --private DIR`), of which nothing leaves but pseudo-gradients. The
    corpus that is named here says the tokenizer and what all evaluate on; scores are measured on what it has to train on."""
    loss_mask: bool = False
    """Of conversations (`dilocox data build --chat`): only answers are trained on and evaluated. A step's loss is the mean over the
    answers' tokens of its batch, each weighs the same; a contribution's tokens, and so its weight, are those."""
    seed: Count = 0
    """Of the order in which its samples are read."""
    evaluation_sequences: Positive = 32
    """So many of the held-out samples are evaluated, spread evenly."""


class Training(Section):
    """The inner loop."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate
    muon_learning_rate: Rate = 0.02
    """For hidden matrices when optimizer is muon; the rest uses AdamW at learning_rate."""
    muon_momentum: Beta = 0.95
    """A cluster alone, with a small batch, does better with less of it (docs/results.md)."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Count = 0
    total_steps: Positive
    """The cosine ends here, at a tenth of the peak."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Positive
    """Sequences per inner step and cluster."""
    microbatches: Positive = 2
    schedule: Schedule = "1f1b"
    """Of a pipeline. interleaved gives each worker several chunks of the model instead of one stretch: it waits less at the ends of
    a step, and passes on more activations."""
    checkpoint_activations: bool = False
    """Hold only the input of each layer until its gradient is due, and compute the rest again: less memory, more computing."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Of matrix products, and of what stages pass on; auto: bf16 on GPUs. Parameters, gradients and moments are float32 in any."""

    def in_bfloat16(self, cuda: bool) -> bool:
        return self.precision == "bf16" or (self.precision == "auto" and cuda)

    @model_validator(mode="after")
    def _divides(self) -> "Training":
        if self.batch_size % self.microbatches:
            raise ValueError("batch_size must be a multiple of microbatches")
        return self


class Outer(Section):
    """The outer optimizer: Nesterov on the mean pseudo-gradient. Momentum 0 is plain averaging."""

    learning_rate: Rate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    aggregate: Literal["mean", "centered-clip"] = "mean"
    """How payloads become one pseudo-gradient (node/outer/aggregate.py says what each costs)."""


class Compression(Section):
    codec: Literal["lowrank-int4", "int4", "int2", "topk-int2", "fp32"] = "lowrank-int4"
    rank: Annotated[int, Field(gt=0, le=limits.RANK)] | None = None
    """Of lowrank-int4."""
    k: Annotated[int, Field(gt=0, le=limits.TOPK)] | None = None
    """Of topk-int2: values kept of every 4,096, on average over the stage."""
    entropy_coding: bool = False
    """Huffman coding of the payload, lossless."""
    adapt: Literal["fixed", "effective-rank"] = "fixed"
    """Rule by which the rank of lowrank-int4 changes from round to round (protocol/adaptive.py). At equal bytes effective-rank has
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
        """What the codec keeps: rank or k; 0 where there is nothing to choose."""
        return {"lowrank-int4": self.rank, "topk-int2": self.k}.get(self.codec) or 0


class Rounds(Section):
    count: Annotated[int, Field(gt=0, lt=limits.ROUNDS)]
    inner_steps: Annotated[int, Field(gt=0, le=limits.INNER_STEPS)]
    max_inner_steps: Annotated[int, Field(gt=0, le=limits.INNER_STEPS)]
    """While a commit is late a peer goes on to this many steps, then waits."""
    round_seconds: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    """Time-boxed rounds: a phase lasts so long instead of inner_steps, and each cluster takes the steps that fit."""
    overlap: Literal["none", "delayed", "rebase"] = "rebase"
    lead_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of rebase: how much of its own work a cluster keeps in its parameters until the commit that holds it arrives."""
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
    """A peer that was not heard from for so long is not waited for."""
    snapshot_every: Positive = 5
    """Peers keep the state of every so-manieth round for joiners."""
    evaluate_every: Count = 1
    """Measure the held-out loss of the state after every so-manieth round; 0: never."""
    clip_ratio: Ratio = 2.0
    """A contribution whose norm is above this multiple of the round's median counts by as much less; what is cut off goes back to
    its author's error feedback."""
    tensor_clip_ratio: Ratio | Literal[0] = 1.25
    """The same for each tensor, by that tensor's median; 0: tensors are not clipped one by one. Where a file leaves it out: 1.25 in
    an open run (which costs honest clusters nothing that could be measured: docs/poisoning.md), 2 with an allow-list."""
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
    """What a contribution does to the loss decides whether it counts (protocol/scoring.py)."""

    voters: Annotated[int, Field(ge=0, le=limits.SCORERS)] = 0
    """So many clusters, drawn for each contribution, score it: all others where they are fewer. 0: nobody does."""
    share: Fraction = 0.03
    """Of a cluster's time that scoring may take; what is not scored in time is accepted as far as its voter is concerned."""


class Audit(Section):
    """A stretch of what a cluster trained is computed again by others (protocol/auditing.py)."""

    segments: Annotated[int, Field(ge=0, le=limits.SEGMENTS)] = 0
    """The longest phase has so many stretches, between states that a contribution commits to. 0: nobody audits."""
    share: Fraction = 0.25
    """Of the counted contributions, that are audited."""
    largest_distance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Between machines of different kinds, of what an auditor computes to what was said, relative to the way of the stretch."""


class Standing(Section):
    """What a cluster earns by work that counts (protocol/standing.py)."""

    rounds: Annotated[int, Field(ge=0, le=limits.STANDING)] = 64
    """Counted rounds that are all there is to earn; a newcomer begins with a sixteenth of them. 0: all are equal. Where a file
    leaves it out: 64 in an open run, 0 with an allow-list."""


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
    """What evidence admits a peer. Without kinds none is asked for."""

    kinds: tuple[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")], ...] = ()
    """`tdx`, `sev-snp`, `simulated` (testnets only), or a kind that a plug-in adds."""
    measurements: dict[str, tuple[Registers, ...]] = Field(default={})
    """By kind; an empty list denies. Registers joined by colons; `*` admits any value of one."""
    tcb_statuses: tuple[str, ...] = ("UpToDate",)
    """Of TDX."""
    minimum_tcb: dict[str, dict[str, int]] = Field(default={})
    """By kind, then component: `evaluation` for tdx; `bl`, `tee`, `snp`, `ucode`, `fmc` for sev-snp."""
    vmpl: Annotated[int, Field(ge=0, le=3)] = 0
    """Highest admitted virtual machine privilege level number of sev-snp."""
    require_gpu: bool = False
    gpu_measurements: dict[str, dict[str, tuple[str, ...]]] = Field(default={})
    """By "driver/VBIOS", then index: the SHA-384 values that the operator allows."""
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
    """Of the EVM chain (EIP-155)."""
    contract: Annotated[str, Field(pattern=r"^0x[0-9a-f]{40}$")]
    """Its address, in lower case."""


class Availability(Section):
    """Peers keep shares of what commits name (shares.py), so that it can be had when whoever held it is gone. Without it they keep
    whole payloads until two later snapshots are agreed, and no longer."""

    needed_share: Annotated[float, Field(gt=0, le=0.9)] = 0.5
    """The part of the shares that restores. Together peers store the inverse of it times what is shared."""
    rounds: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """For so many rounds shares of what was counted are kept; of states those of the two newest snapshots."""
    megabytes: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    """Of each peer's disk for its shares (10⁶ bytes): half for what was counted, then states, then more of what was counted."""

    @property
    def most_bytes(self) -> int:
        return self.megabytes * 1_000_000


SHOWN_CHARACTERS = 300
"""Most that an error repeats of what is wrong with a manifest that arrived."""
LOOPED_STAGES, LOOPED_MICROBATCHES = 4, 2
"""Fewest with which a pipeline can be looped: two workers with two chunks each, and a microbatch for either."""


class RunFileError(ConfigError):
    """A run file that says no run."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        """`faults`: path of a key, empty for the whole file, and what is wrong with it."""
        self.faults = tuple(faults)
        lines = [f"  {path}: {why}" if path else f"  {why}" for path, why in self.faults]
        super().__init__("\n".join(["the run file cannot be used:", *lines]))


def _with_decided(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of the same run in which no value depends on another that is left out."""
    rounds, admission = document.get("rounds", {}), document.get("admission", {})
    if not isinstance(rounds, dict) or not isinstance(admission, dict):
        return document  # sections already, or a fault that validation tells
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
        if training.schedule == "interleaved" and (stages < LOOPED_STAGES or training.microbatches < LOOPED_MICROBATCHES):
            yield (
                "training.schedule interleaved wants two stages and a microbatch for each of two workers at least:"
                f" {LOOPED_STAGES} stages and {LOOPED_MICROBATCHES} microbatches, not {stages} and {training.microbatches}"
            )
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
        """Peer id of whoever signs the manifest, and appoints coordinators."""
        return peer_id(bytes.fromhex(self.run.owner))

    @property
    def coordinator(self) -> str:
        """Peer id of whoever signs the commits, until the owner appoints another."""
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
        """Of a state that a phase is audited by: all stages."""
        return phase_bytes(self.model, self.training.optimizer == "muon")

    @property
    def begins(self) -> str:
        """A sentence without its end: when the run begins."""
        clusters = several(self.rounds.start_clusters, "cluster is", "clusters are")
        return f"the run begins when {clusters} here"

    def nominal_steps(self, round: int) -> int:
        """Inner steps before a round, were every round to take its H: where a time-boxed round stands in the schedule."""
        return (round - 1) * self.rounds.inner_steps

    def overlap(self, round: int) -> str:
        return "none" if round <= self.rounds.synchronous_rounds else self.rounds.overlap

    @property
    def tokens_per_step(self) -> int:
        return self.training.batch_size * self.model.sequence_length

    def snapshot_round(self, round: int) -> int:
        """The newest round up to `round` whose starting state peers keep for joiners; 1 is the initial state."""
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
