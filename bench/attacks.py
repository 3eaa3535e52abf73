"""Attacks of hostile clusters: each makes their announcements of a round from the honest payloads of all clusters.

Hostile clusters know each other and see all honest work before they announce. They follow every rule that a voter can
check, and train as honest ones do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.committee import Votes
from bench.lab import Lab, Sent, announcement
from dilocox.node.outer.state import EncodedStage, StageState
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ATTACKS", "Adversary", "Attack", "Seen"]

LOUD = 10.0
"""Times an honest payload's norm: above every bound, so that each bound cuts it to what it allows."""


@dataclass(frozen=True)
class Seen:
    """Data that one hostile cluster has when it announces: flat pseudo-gradients, all stages in sequence."""

    honest: Tensor
    """(clusters, parameters)."""
    own: Tensor
    """Pseudo-gradient that it would have sent."""
    victim: Tensor
    """One of the honest ones."""
    tensors: Mapping[str, slice]
    random: torch.Generator

    @property
    def norm(self) -> float:
        """Return the norm of the median honest pseudo-gradient."""
        return float(self.honest.norm(dim=1).median())

    @property
    def mean(self) -> Tensor:
        return self.honest.mean(0)


@dataclass(frozen=True)
class Attack:
    name: str
    describe: str
    make: Callable[[Seen], Tensor] = lambda seen: seen.own
    most_tokens: bool = False
    """True: it announces the most tokens that the rules allow."""
    flips_labels: bool = False
    after: float = 0.0
    """Share of the run at which it begins."""
    takes: str = ""
    """Copy of another cluster's payload: unchanged ("as it is"), or under its own name ("renamed")."""
    colludes: bool = False
    """True: it rejects every honest contribution and accepts its friends'."""


def _one_tensor(seen: Seen) -> Tensor:
    """Return a pseudo-gradient of an honest norm, nonzero only in the last norm's weights, all of which it lowers."""
    said = torch.zeros_like(seen.own)
    part = seen.tensors["model.norm.weight"]
    said[part] = seen.norm / math.sqrt(part.stop - part.start)
    return said


def _noise(seen: Seen) -> Tensor:
    drawn = torch.randn(seen.own.shape, generator=seen.random)
    return drawn * (LOUD * seen.norm / float(drawn.norm()))


def _drift(share: float) -> Callable[[Seen], Tensor]:
    """Return an attack that mixes a share of its own work with one direction, the same each round and for each attacker.
    In size it does not differ from honest work."""

    def drift(seen: Seen) -> Tensor:
        direction = torch.randn(seen.own.shape, generator=torch.Generator().manual_seed(0))
        return share * seen.own + direction * (seen.norm / float(direction.norm()))

    return drift


FLIPPED = "the signs of another's payload turned"
ATTACKS = [
    Attack("nobody", "no hostile cluster"),
    Attack("flip", FLIPPED, lambda seen: -seen.victim),
    Attack("flip, loud", f"{FLIPPED}, ten times as large: to whatever bound there is", lambda seen: -LOUD * seen.victim),
    Attack("tokens", f"{FLIPPED}, the most tokens allowed", lambda seen: -seen.victim, most_tokens=True),
    Attack("live", f"{FLIPPED}, to every bound, the most tokens allowed", lambda seen: -LOUD * seen.victim, most_tokens=True),
    Attack("late", "honest for half of the run, then as live", lambda seen: -LOUD * seen.victim, most_tokens=True, after=0.5),
    Attack("one tensor", "the whole norm in the weights of the last norm", _one_tensor),
    Attack("zeros", "nothing at all", lambda seen: torch.zeros_like(seen.own)),
    Attack("copy", "another's payload, as it is", takes="as it is"),
    Attack(
        "renamed copy", "another's payload under one's own name, the most tokens allowed", most_tokens=True, takes="renamed"
    ),
    Attack("noise", "random, to every bound", _noise),
    Attack("drift", "half its work, and one direction that is the same in each round", _drift(0.5)),
    Attack(
        "quiet drift",
        "as drift, with three quarters of its work: it points the way of the others as far as it must",
        _drift(0.75),
    ),
    Attack("ALIE", "the mean less 1.5 standard deviations in each coordinate", lambda s: s.mean - 1.5 * s.honest.std(0)),
    Attack(
        "wary ALIE",
        "its own work less half a standard deviation in each coordinate: chance hides that it is the same in each round",
        lambda seen: seen.own - 0.5 * seen.honest.std(0),
    ),
    Attack("IPM", "the mean turned and doubled", lambda seen: -2 * seen.mean),
    Attack("labels", "its own work on wrong labels", flips_labels=True),
    Attack(
        "colluding votes",
        "live, and they refuse every honest contribution and accept each other's",
        lambda seen: -LOUD * seen.victim,
        most_tokens=True,
        colludes=True,
    ),
]


@dataclass
class Adversary:
    """`bench.lab.Hostile`: the last clusters of a lab."""

    clusters: range
    attack: Attack
    seed: int

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    def begun(self, lab: Lab) -> bool:
        return lab.head.round > self.attack.after * lab.run.rounds.count

    def targets(self, lab: Lab, targets: Tensor) -> Tensor:
        return lab.run.model.config.vocab_size - 1 - targets if self.attack.flips_labels and self.begun(lab) else targets

    def vote(self, lab: Lab, voter: str, found: Votes) -> Votes:
        """Return the votes of a hostile voter: measured as honest voters measure, by the announced payloads."""
        if not self.attack.colludes:
            return found
        friends = self.names(lab)
        return {name: name in friends for name in found}

    def names(self, lab: Lab) -> list[str]:
        return [lab.members[number].state.cluster for number in self.clusters]

    def announce(self, lab: Lab, sent: Mapping[str, Sent]) -> Mapping[str, Sent]:
        hostile = self.names(lab)
        if not self.begun(lab):
            return {name: sent[name] for name in hostile}
        honest = {name: each for name, each in sent.items() if name not in hostile}
        said = {name: self._say(lab, name, sent[name], honest) for name in hostile}
        if not self.attack.most_tokens:
            return said
        most = lab.run.rounds.max_inner_steps * lab.run.tokens_per_step
        return {name: _with_tokens(each, most) for name, each in said.items()}

    def _say(self, lab: Lab, name: str, own: Sent, honest: Mapping[str, Sent]) -> Sent:
        victim = honest[sorted(honest)[0]]
        if self.attack.takes == "as it is":
            return victim
        said = self.attack.make(
            Seen(
                torch.stack([decoded(lab, each) for each in honest.values()]),
                decoded(lab, own),
                decoded(lab, victim),
                places(lab),
                self._random,
            )
        )
        if self.attack.takes == "renamed":
            said = decoded(lab, victim)
        stages = encoded(lab, name, said)
        for stage in stages:
            lab.put(stage.raw)
        return announcement(stages, int(own.contribution.tokens))


def _with_tokens(sent: Sent, tokens: int) -> Sent:
    contribution = pb.Contribution.FromString(sent.contribution.SerializeToString())
    contribution.tokens = tokens
    return replace(sent, contribution=contribution)


def _stages(lab: Lab) -> list[StageState]:
    return [StageState(lab.run, stage) for stage in range(lab.run.model.stages)]


def decoded(lab: Lab, sent: Sent) -> Tensor:
    """Return the pseudo-gradient that the payloads decode to."""
    states = _stages(lab)
    for state, digest in zip(states, sent.payloads, strict=True):
        state.return_to_feedback(lab.payload(digest), lab.head.rank_or_k)
    return torch.cat([state.feedback for state in states])


def encoded(lab: Lab, cluster: str, said: Tensor) -> Sequence[EncodedStage]:
    """Encode a pseudo-gradient with the product's codec in one payload, without earlier error feedback."""
    states = _stages(lab)
    for state, part in zip(states, said.split([state.size for state in states]), strict=True):
        state.feedback.copy_(part)
    owners = [owner_of(lab.run.run_id, cluster, lab.head.round, state.stage) for state in states]
    return [state.encode(lab.head.rank_or_k, owner) for state, owner in zip(states, owners, strict=True)]


def places(lab: Lab) -> dict[str, slice]:
    """Return the slice of each tensor."""
    found, start = {}, 0
    for state in _stages(lab):
        for spec in state.specs:
            found[spec.name] = slice(start, start + spec.elements)
            start += spec.elements
    return found
