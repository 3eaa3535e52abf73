"""Helpers of many tests: identities by number, small manifests, statements."""

import asyncio
import hashlib
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from bench.sections import merge, model_section
from dilocox.protocol import events
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.head import Head, initial_head, resting_on
from dilocox.protocol.consensus.reputation import by_standing
from dilocox.protocol.crypto import Identity
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_events import RoundEvents
from dilocox.protocol.run.allowed_values import annotated, section_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.attestation import AttestationError, Code
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.net.blob_server import PeerService

if TYPE_CHECKING:
    import pytest

COORDINATOR = Identity(b"\xc0" * 32)
HEARS_CTRL_C = ("env", "--default-signal=INT")
"""Prefix of a command: a shell's background job ignores Ctrl-C, and the tests may be one. No `preexec_fn`: with it a child
is forked, and beside gRPC's threads some die before they become the command."""
SETTLEMENT: Mapping[str, Any] = {"chain_id": 1, "contract": "0x" + "ab" * 20}
"""Section of a manifest whose run takes accounts."""


def identity(number: int) -> Identity:
    return Identity(hashlib.sha256(b"test identity %d" % number).digest())


def digest(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def manifest(**sections: Mapping[str, Any]) -> Manifest:
    """Return a small valid manifest; `rounds={"count": 3}` overrides single values."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "owner": "ab" * 32, "coordinator": COORDINATOR.peer},
        "model": {
            "model_type": "qwen2",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sequence_length": 16,
            "stages": 2,
        },
        "data": {"name": "none", "digest": "00" * 32, "evaluation_sequences": 4},
        "training": {"learning_rate": 1e-2, "total_steps": 100, "batch_size": 4, "microbatches": 2},
        "compression": {"rank": 8},
        "rounds": {"count": 5, "inner_steps": 4, "max_inner_steps": 12, "min_clusters": 2, "start_clusters": 3},
    }
    base["model"] = model_section(base["model"])
    merge(base, sections)
    return Manifest.model_validate(base)


async def no_status() -> dict[str, Any]:
    """Return the status of an app in tests that only read /metrics."""
    return {"answers": []}


def told_fields(known: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Return the described fields of these names; fail for a name without a sentence, unless it is null or empty."""
    found = set()
    for name in names:
        fit = [each for each in known if re.fullmatch(re.escape(each).replace(r"\*", r"[^.\[\]]+"), name)]
        empty = [each for each in known if each.startswith((f"{name}.", f"{name}["))]
        assert fit or empty, f"{name} has no sentence"
        found |= {*fit, *empty}
    return found


def manifest_keys(section: type[BaseModel] = Manifest, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a manifest's keys, those of sections included."""
    for name, field in section.model_fields.items():
        if (inner := section_of(annotated(field))) is not None:
            yield from manifest_keys(inner, (*path, name))
        yield *path, name


class Table:
    """A round machine with its coordinator's pen: what it seals is kept as the chain."""

    def __init__(self, run: Manifest, clock: float = 1000.0, pen: Identity = COORDINATOR) -> None:
        self.run, self.now, self.pen = run, clock, pen
        self.wall_ms = 1_700_000_000_000
        self.state = round_machine.start(run, initial_head(pen.peer, run.model.root), clock)
        self.commits: list[Statement] = []
        self.ballots: list[Statement] = []
        self.effects: list[round_machine.Effect] = []
        self.serials: dict[int, int] = {}

    @property
    def head(self) -> Head:
        return self.state.head

    @property
    def moment(self) -> round_machine.Moment:
        return round_machine.Moment(self.now, self.wall_ms + int(1000 * self.now))

    def feed(self, event: round_machine.Input) -> list[round_machine.Effect]:
        self.state, effects = round_machine.step(self.state, event, self.moment)
        self.effects = effects
        for effect in effects:
            if isinstance(effect, round_machine.SealCommit):
                self.commits.append(seal(self.pen, pb.KIND_COMMIT, self.run.run_id, effect.body))
                assert self._from_log() == self.state, "what a log keeps makes another round"
            if isinstance(effect, round_machine.SealBallot):
                self.ballots.append(seal(self.pen, pb.KIND_BALLOT, self.run.run_id, effect.body))
                self.feed(round_machine.Received(self.ballots[-1]))
        self.effects = effects
        return effects

    def _from_log(self) -> round_machine.RoundState:
        """Return the round that was just opened, as a restart would find it."""
        state = round_machine.start(self.run, self.head, self.now)
        for event in round_machine.inherited(self.state):
            state, _ = round_machine.step(state, event, self.moment)
        return state

    def submit(self, statement: Statement) -> rules.Judgement:
        effects = self.feed(round_machine.Received(statement))
        return next(effect.judgement for effect in effects if isinstance(effect, round_machine.Reply))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(round_machine.Tick())

    def absent(self, *numbers: int) -> None:
        for number in numbers:
            self.feed(round_machine.Absent(identity(number).peer))

    def present(self, *numbers: int) -> None:
        for number in numbers:
            self.feed(round_machine.Present(identity(number).peer))

    def verify(self) -> Head:
        """Recheck the whole chain from outside; the machine must be at the chain's end."""
        head = initial_head(COORDINATOR.peer, self.run.model.root)
        for commit in self.commits:
            head, _ = chain.extend(self.run, head, commit.envelope)
        assert head == self.head
        return head

    # Statements of peer number n that would be accepted now; keywords spoil them.

    def attest(self, number: int, seconds: float = 1000.0, label: str = "") -> pb.Attestation:
        """Return the coordinator's verdict on this peer's evidence."""
        attestation = pb.Attestation(
            peer=identity(number).peer,
            nonce=digest("nonce", number, label),
            kind="sev-snp",
            measurement="ab" * 48,
            valid_until_ms=self.moment.wall_ms + int(1000 * seconds),
        )
        self.feed(round_machine.Attested(attestation))
        return attestation

    def serial(self, number: int) -> int:
        self.serials[number] = self.serials.get(number, 0) + 1
        return self.serials[number]

    def claim(self, number: int, **changes: Any) -> Statement:
        body = pb.Claim(
            serial=self.serial(number), round=max(1, self.head.round), head=self.head.digest, state=self.state_root()
        )
        return self._seal(number, pb.KIND_CLAIM, body, changes)

    def layout(self, lead: int, hosts: list[tuple[int, int, int, int]], **changes: Any) -> Statement:
        """Return the layout of a cluster of several hosts: (peer number, first stage, stage count, copy)."""
        body = pb.Cluster(
            serial=self.serial(1000 + lead),
            round=max(1, self.head.round),
            head=self.head.digest,
            hosts=[
                pb.Host(peer=identity(n).peer, first_stage=first, stage_count=count, copy=copy)
                for n, first, count, copy in hosts
            ],
        )
        return self._seal(lead, pb.KIND_CLUSTER, body, changes)

    def leave(self, number: int, **changes: Any) -> Statement:
        body = pb.Leave(serial=self.serial(number), round=max(1, self.head.round), head=self.head.digest)
        return self._seal(number, pb.KIND_LEAVE, body, changes)

    def state_root(self) -> bytes:
        """Return the state root of every honest peer before the open round: a fold over the counted contributions."""
        counted = [c.body.round for c in self.commits if c.body.counted]
        return digest("state", counted) if counted or not self.run.model.root else self.run.model.root

    def contribution(self, number: int, spoil: Any = None, **changes: Any) -> Statement:
        name = identity(number).peer
        lease = self.head.ledger.leases.get(name)
        cluster = self.head.roster.get(name)
        steps = self.run.rounds.inner_steps
        body = pb.Contribution(
            round=self.head.round,
            head=self.head.digest,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=2.0,
            samples_read=(lease.counted if lease else 0) + steps * self.run.training.batch_size,
            leaves=digest("leaves", number, self.head.round),
            base_state=self.state_root(),
            norm=norm_code(1.0),
            size=2000,
            effective_rank=4.0,
            attestation=resting_on(self.head.attestations, cluster) if cluster else b"",
            audit=digest("marks", number, self.head.round) if self.run.audit.segments else b"",
            shares=digest("shares", number, self.head.round) if self.run.availability is not None else b"",
        )
        if spoil is not None:
            spoil(body)
        return self._seal(number, pb.KIND_CONTRIBUTION, body, changes)

    def receipt(self, number: int, reject: dict[int, pb.Reason] | None = None, **changes: Any) -> Statement:
        """Return a vote on everything on the ballot; `reject` maps peer numbers to reasons."""
        reasons = {identity(other).peer: reason for other, reason in (reject or {}).items()}
        listed, me = self.state.gathered.listed(), identity(number).peer
        findings = [
            pb.Finding(index=index, reason=reasons[name]) for index, name in enumerate(listed) if name in reasons and name != me
        ]
        body = pb.Receipt(
            round=self.head.round,
            ballot=self.ballots[-1].signing,
            accepted=rules.bits([name != me and name not in reasons for name in listed]),
            findings=findings,
            measured=self._measured(me, {name for name, why in reasons.items() if why != pb.REASON_HARMS}),
        )
        return self._seal(number, pb.KIND_RECEIPT, body, changes)

    def _measured(self, me: str, besides: set[str]) -> bytes:
        """Return the bits of a voter that scored all well-made contributions for which it was drawn."""
        if not self.run.scoring.voters:
            return b""
        from dilocox.protocol.checks import score_rules  # a run that scores nothing does without

        listed = by_standing(self.run, self.head.standings, self.state.gathered.listed())
        drawn = score_rules.duties(self.run, self.ballots[-1], me, listed)
        return rules.bits([name not in besides for name in listed if name in drawn])

    def report(self, number: int, **changes: Any) -> Statement:
        body = pb.StateReport(round=self.head.round, head=self.head.digest, state=self.state_root())
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

    def vote(self, numbers: range | list[int] = range(3), reject: dict[int, pb.Reason] | None = None) -> "Table":
        for receipt in [self.receipt(number, reject) for number in numbers]:
            self.submit(receipt)
        return self

    def train(self, rounds: int, numbers: range | list[int] = range(3), seconds: float = 0.0) -> "Table":
        """Run whole rounds, each of which takes `seconds` to contribute."""
        for _ in range(rounds):
            self.now += seconds
            self.contribute(numbers).vote(numbers)
        return self

    def counted(self) -> list[int]:
        """Return the numbers of the peers in the last commit."""
        names = {identity(number).peer: number for number in range(100)}
        return sorted(names[item.cluster] for item in chain.taken(self.commits[-1].body))

    def roster(self) -> list[int]:
        names = {identity(number).peer: number for number in range(100)}
        return sorted(names[name] for name in self.head.roster)

    def why(self, number: int) -> int:
        """Return the reason for which the last commit excluded a peer."""
        return next(i.reason for i in self.commits[-1].body.excluded if i.peer == identity(number).peer)


class Told(Table):
    """Round machine, and the events that it reports."""

    def __init__(self, run: Manifest) -> None:
        self.telling, self.told = RoundEvents(), list[events.Event]()
        self._state: round_machine.RoundState | None = None
        super().__init__(run)

    @property
    def state(self) -> round_machine.RoundState:
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, after: round_machine.RoundState) -> None:
        """Report the state; a new round is reported where it is sealed."""
        before, self._state = self._state, after
        if before is not None and before.head is after.head:
            self.told += self.telling.saw(before, after, self.moment)

    def feed(self, event: round_machine.Input) -> list[round_machine.Effect]:
        before = self.head
        effects = super().feed(event)
        if isinstance(effects[-1] if effects else None, round_machine.SealCommit):
            self.told += self.telling.closed(before, self.commits[-1].body, self.head)
        return effects

    def kinds(self) -> list[str]:
        kinds, self.told = [event.kind for event in self.told], []
        return kinds


PATIENCE_SECONDS = 300.0
"""After which what should happen does not."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def gone(pid: int) -> bool:
    """Return whether the process ends in time. Blocking."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_SECONDS)[0])
    finally:
        os.close(handle)


class Family:
    """Shell that waits for a process that it started, for a test that ends the shell."""

    def __init__(self, folder: Path) -> None:
        self.program, self._go, self._began, self._lived = (folder / name for name in ("family", "go", "began", "lived"))
        child = f"( read line < {self._go}; touch {self._lived} ) > /dev/null & echo $! > {self._began}.part"
        self.program.write_text(f"#!/bin/sh\n{child}; mv {self._began}.part {self._began}\nwait\n")
        self.program.chmod(0o700)
        os.mkfifo(self._go)

    def began(self) -> bool:
        return self._began.exists()

    def left(self) -> bool:
        """Return whether its child continued after the shell's end. Blocking; it ends here."""
        handle = os.open(self._go, os.O_RDWR)
        try:
            os.write(handle, b"\n")
            assert gone(int(self._began.read_text()))
        finally:
            os.close(handle)
        return self._lived.exists()


def serve_also(service: PeerService, **changes: Any) -> None:
    """Let a server serve its methods with these changes."""
    service.serve(replace(service.run, **changes))


def rejected(call: Callable[[], object], code: Code) -> str:
    """Return why evidence is rejected. It must be, with this code."""
    refused: AttestationError | None = None
    try:
        call()
    except AttestationError as error:
        refused = error
    assert refused is not None, f"it was accepted, where {code} was expected"
    assert refused.code == code, refused.detail
    return refused.cause


def flipped(raw: bytes, seed: int) -> bytes:
    """Return bytes with one bit flipped."""
    mutated = bytearray(raw)
    bit = seed * 2654435761 % (8 * len(raw))
    mutated[bit // 8] ^= 1 << bit % 8
    return bytes(mutated)


def dilocox(monkeypatch: "pytest.MonkeyPatch", *words: object) -> int:
    """Run the command with these words in this process, and return its exit code."""
    from dilocox.cli import main as cli

    monkeypatch.setattr(sys, "argv", ["dilocox", *map(str, words)])
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("the command did not exit")
