"""Scores in the lab's open round, and the contributions that count after it: the product's committee, samples, measurement
and rules.

A network gives voters less time than the lab, which measures everything that a committee is drawn to score.
`scoring.share` cuts nothing off here, so the bench counts its seconds.
"""

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dilocox.node.training.model.data import Dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.scores import make_candidate, measure
from dilocox.protocol.checks import bias_rules, score_rules
from dilocox.protocol.consensus import weighting
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.reputation import by_standing
from dilocox.protocol.crypto import Identity
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal

__all__ = ["Committee", "Measured", "Seconds", "Votes", "Work"]

COORDINATOR = Identity(bytes(32))
"""Identity whose signature draws committees and samples."""
SIGNS = 1
"""Signs in the voters' sketches; no attack knows them."""
Votes = Mapping[str, bool]
"""Accepted or not, by cluster, for one voter."""


@dataclass(frozen=True)
class Work:
    """Contribution of a cluster on the ballot."""

    payloads: Sequence[bytes]
    """Digests, by stage."""
    norm: int
    """Code of all of it, as announced."""
    tokens: int
    """Announced tokens."""


@dataclass(frozen=True)
class Measured:
    """One voter's score of one contribution."""

    round: int
    voter: str
    author: str
    score: score_rules.Score
    harmful: bool
    """True if this voter found harm."""


@dataclass
class Seconds:
    """Seconds of this process, over all clusters."""

    training: float = 0.0
    candidates: float = 0.0
    """Seconds for candidates, made beside training."""
    losses: float = 0.0
    """Measured between inner steps."""

    @contextmanager
    def spent(self, on: str) -> Iterator[None]:
        began = time.process_time()
        yield
        setattr(self, on, getattr(self, on) + time.process_time() - began)


@dataclass
class Committee:
    run: Manifest
    dataset: Dataset
    seconds: Seconds
    looks_for_bias: bool
    measured: list[Measured] = field(default_factory=list)
    memories: dict[str, bias_rules.Memory] = field(default_factory=dict)
    """Memory of past scores, by voter."""

    def ballot(self, round: int) -> Statement[pb.Ballot]:
        return seal(COORDINATOR, pb.KIND_BALLOT, self.run.run_id, pb.Ballot(round=round))

    def closed(self, counted: Mapping[str, int], median: int) -> None:
        """Record a commit: the norm codes of the counted clusters, and their median."""
        cut = {name: weighting.cut(self.run, code, median) for name, code in counted.items()}
        self.memories = {voter: bias_rules.closed(memory, cut) for voter, memory in self.memories.items()}

    def refused(
        self,
        head: Head,
        trainers: Mapping[str, Trainer],
        works: Mapping[str, Work],
        well_made: Container[str],
        read: Callable[[bytes], memoryview],
        say: Callable[[str, Votes], Votes],
    ) -> dict[str, score_rules.Opinion]:
        """Return the contributions that too many voters find harmful. `trainers`: of the voters, with the Θ that the round
        builds on. `say`: the vote of a voter by name, from its measured vote."""
        listed, ballot = by_standing(self.run, head.standings, sorted(works)), self.ballot(head.round)
        harm: dict[str, list[str]] = {}
        for voter, trainer in trainers.items():
            due = [
                name for name in listed if voter in score_rules.committee(self.run, ballot, name, listed) and name in well_made
            ]
            positions = score_rules.positions(self.run, ballot, voter, head.ledger.leases[voter])
            scores = self._scores(head, voter, trainer, works, due, positions, read)
            harmful = score_rules.harmful(self.run, scores, {name: works[name].tokens for name in scores})
            memory = self.memories[voter] = bias_rules.after(
                self.run, self.memories.get(voter, bias_rules.Memory()), voter, scores
            )
            harmful |= bias_rules.biased(self.run, memory, voter, scores)
            self.measured += [Measured(head.round, voter, name, score, name in harmful) for name, score in scores.items()]
            found = {name: name in well_made and name not in harmful for name in listed}
            said = say(voter, found)
            harm[voter] = [name for name in listed if name in well_made and name != voter and not said[name]]
        names = list(listed)
        told = score_rules.opinions(self.run, ballot, listed, harm, lambda voter, index, _: names[index] in harm[voter])
        return {name: found for name, found in told.items() if found.refuses()}

    def _scores(
        self,
        head: Head,
        voter: str,
        trainer: Trainer,
        works: Mapping[str, Work],
        due: Sequence[str],
        positions: Sequence[int],
        read: Callable[[bytes], memoryview],
    ) -> dict[str, score_rules.Score]:
        """Return the scores as a worker measures them, one after the other."""
        _, clips = weighting.clip(self.run, {name: work.norm for name, work in works.items()}, head.standings)
        scores: dict[str, score_rules.Score] = {}
        before: float | None = None
        samples = self.dataset.batch(positions)
        for name in due:
            asked = worker_pb2.Score(
                round=head.round,
                clip=clips[name],
                payloads=works[name].payloads,
                own=works[voter].payloads,
                positions=positions,
                signs=SIGNS if self.looks_for_bias else 0,
            )
            with self.seconds.spent("candidates"):
                candidate = make_candidate(trainer, asked, head.rank_or_k, read)
            with self.seconds.spent("losses"):
                scores[name] = measure(trainer, candidate, before, samples)
            before = scores[name].before
        return scores
