"""What many tests need: identities by number, small manifests, statements."""

import hashlib
from typing import Any

from dilocox.protocol import chain, round
from dilocox.protocol.chain import Head
from dilocox.protocol.crypto import Identity
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb

COORDINATOR = Identity(b"\xc0" * 32)


def identity(number: int) -> Identity:
    return Identity(hashlib.sha256(b"test identity %d" % number).digest())


def digest(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def manifest(**sections: dict[str, Any]) -> Manifest:
    """A small valid manifest; `rounds={"count": 3}` overrides single values."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "owner": "ab" * 32},
        "model": {
            "family": "qwen2",
            "vocabulary_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "layers": 3,
            "heads": 2,
            "kv_heads": 1,
            "sequence_length": 16,
            "stages": 2,
        },
        "data": {"evaluation_sequences": 4},
        "training": {"learning_rate": 1e-2, "total_steps": 100, "batch_size": 4, "microbatches": 2},
        "compression": {"rank": 8},
        "rounds": {"count": 5, "inner_steps": 4, "max_inner_steps": 12, "min_clusters": 2, "start_clusters": 3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Manifest.model_validate(base)


class Table:
    """A round machine with its coordinator's pen: what it seals is kept as the chain."""

    def __init__(self, run: Manifest, clock: float = 1000.0) -> None:
        self.run, self.now = run, clock
        self.state = round.start(run, clock)
        self.commits: list[Statement] = []
        self.ballots: list[Statement] = []
        self.effects: list[round.Effect] = []

    @property
    def head(self) -> Head:
        return self.state.head

    def feed(self, event: round.Input) -> list[round.Effect]:
        self.state, effects = round.step(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, round.SealCommit):
                self.commits.append(seal(COORDINATOR, pb.KIND_COMMIT, self.run.run_id, effect.body))
            if isinstance(effect, round.SealBallot):
                self.ballots.append(seal(COORDINATOR, pb.KIND_BALLOT, self.run.run_id, effect.body))
        self.effects = effects
        return effects

    def submit(self, statement: Statement) -> round.Judgement:
        effects = self.feed(round.Received(statement))
        return next(effect.judgement for effect in effects if isinstance(effect, round.Reply))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(round.Tick())

    def verify(self) -> Head:
        """Recheck the whole chain from outside; the machine must stand where the chain ends."""
        head = chain.initial_head()
        for commit in self.commits:
            head, _ = chain.extend(self.run, COORDINATOR.peer, head, commit.envelope)
        assert head == self.head
        return head

    # Statements of peer number n that would be accepted now; keywords spoil them.

    def attest(self, number: int, seconds: float = 1000.0, label: str = "") -> pb.Attestation:
        """The coordinator's verdict on this peer's evidence."""
        attestation = pb.Attestation(
            peer=identity(number).peer,
            nonce=digest("nonce", number, label),
            kind="sev-snp",
            measurement="ab" * 48,
            valid_until_ms=int(1000 * (self.now + seconds)),
        )
        self.feed(round.Attested(attestation))
        return attestation

    def claim(self, number: int, **changes: Any) -> Statement:
        stages = self.run.model.stages
        body = pb.Claim(
            round=max(1, self.head.round),
            head=self.head.digest,
            cluster=identity(number).peer,
            first_stage=0,
            stage_count=stages,
            states=[pb.StageState(stage=stage, digest=self.state_digest(stage)) for stage in range(stages)],
        )
        return self._seal(number, pb.KIND_CLAIM, body, changes)

    def state_digest(self, stage: int) -> bytes:
        """The state every honest peer holds before the open round: a fold over the chain."""
        return digest("state", stage, max(1, self.head.round))

    def contribution(self, number: int, spoil: Any = None, **changes: Any) -> Statement:
        lease = self.head.ledger.leases.get(identity(number).peer)
        steps = self.run.rounds.inner_steps
        attestation = self.head.attestations.get(identity(number).peer, pb.Attestation())
        body = pb.Contribution(
            round=self.head.round,
            head=self.head.digest,
            cluster=identity(number).peer,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=2.0,
            samples_read=(lease.counted if lease else 0) + steps * self.run.training.batch_size,
            payloads=[
                pb.StagePayload(
                    stage=stage,
                    base_state=self.state_digest(stage),
                    digest=digest("payload", number, stage, self.head.round),
                    size=1000,
                    norm=1.0,
                    effective_rank=4.0,
                )
                for stage in range(self.run.model.stages)
            ],
            attestation=attestation.nonce,
        )
        if spoil is not None:
            spoil(body)
        return self._seal(number, pb.KIND_CONTRIBUTION, body, changes)

    def receipt(self, number: int, reject: dict[int, int] | None = None, **changes: Any) -> Statement:
        """Verdicts on everything on the ballot; `reject` maps peer numbers to reasons."""
        reasons = {identity(other).peer: reason for other, reason in (reject or {}).items()}
        verdicts = [
            pb.ContributionVerdict(contribution=key, reason=reasons.get(other.peer, 0))
            for key, other in sorted(self.state.contributions.items())
            if other.peer != identity(number).peer
        ]
        body = pb.Receipt(round=self.head.round, head=self.head.digest, verdicts=verdicts)
        return self._seal(number, pb.KIND_RECEIPT, body, changes)

    def report(self, number: int, **changes: Any) -> Statement:
        stages = range(self.run.model.stages)
        body = pb.StateReport(
            round=self.head.round,
            head=self.head.digest,
            states=[pb.StageState(stage=stage, digest=self.state_digest(stage)) for stage in stages],
        )
        return self._seal(number, pb.KIND_STATE_REPORT, body, changes)

    def _seal(self, number: int, kind: pb.Kind, body: Any, changes: dict[str, Any]) -> Statement:
        for key, value in changes.items():
            setattr(body, key, value)
        return seal(identity(number), kind, self.run.run_id, body)

    # Whole rounds

    def genesis(self, numbers: range = range(3)) -> "Table":
        for number in numbers:
            self.submit(self.claim(number))
        return self

    def contribute(self, numbers: range | list[int] = range(3)) -> "Table":
        for number in numbers:
            self.submit(self.contribution(number))
        return self

    def vote(self, numbers: range | list[int] = range(3), reject: dict[int, int] | None = None) -> "Table":
        for number in numbers:
            self.submit(self.receipt(number, reject))
        return self

    def counted(self) -> list[int]:
        """Numbers of the peers in the last commit."""
        names = {identity(number).peer: number for number in range(100)}
        return sorted(names[item.cluster] for item in self.commits[-1].body.counted)

    def why(self, number: int) -> int:
        """The reason under which the last commit excluded a peer."""
        return next(i.reason for i in self.commits[-1].body.excluded if i.peer == identity(number).peer)
