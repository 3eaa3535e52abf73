"""Checks of a run file before the run costs time. Pure; node/preflight checks machines.

WRONG: the run cannot begin, or cannot continue. ODD: it can, but the setting is probably a mistake.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel

from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import Manifest, Model

__all__ = ["Finding", "Level", "beginning", "initial_state", "of_run"]


class Level(Enum):
    FINE = "fine"
    ODD = "odd"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str
    """Key of the run file, such as rounds.count, or the checked part of the machine or network."""
    says: str
    do: str = ""
    """One thing to do."""


SCHEDULE_SLACK = 1.25
"""Largest ratio between total_steps and the rounds' steps, in both directions, before the cosine ends noticeably
elsewhere."""
LARGE_ADAMW, LARGE_MUON, LARGE_OUTER = 0.1, 0.5, 2.0
"""Learning rates above which nothing we know of trains."""


def beginning(manifest: Manifest) -> Finding:
    """Return when the run begins, and how many clusters a round needs: what every owner has to know before sharing a link."""
    least = manifest.rounds.min_clusters
    needs = f"a round counts work only if at least {several(least, 'cluster takes', 'clusters take')} part"
    return Finding(Level.FINE, "rounds.start_clusters", f"{manifest.begins}; {needs} (rounds.min_clusters)")


def initial_state(model: Model, made: str) -> Finding:
    """Compare the initial state that a manifest names with what its model and seed make, in hexadecimal digits."""
    if made == model.seed_state:
        return Finding(Level.FINE, "model.seed_state", "matches this model and seed")
    says = f"is {model.seed_state}, but this model and seed give {made}: [model] changed after `dilocox init`"
    return Finding(Level.WRONG, "model.seed_state", says, f'set seed_state = "{made}"')


def of_run(manifest: Manifest) -> list[Finding]:
    """Return the findings, in the order of a run file's sections."""
    return [*_admission(manifest), *_training(manifest), *_compression(manifest), *_rounds(manifest), *_attestation(manifest)]


def _admission(manifest: Manifest) -> Iterator[Finding]:
    admission, named = manifest.admission, len(set(manifest.admission.allow))
    if admission.policy == "allow-list" and named < manifest.rounds.start_clusters:
        yield Finding(
            Level.WRONG,
            "admission.allow",
            f"names {several(named, 'peer')}, but the first round waits for {manifest.rounds.start_clusters}",
            "add the peer ids that `dilocox id --home FOLDER` prints on their machines, or lower rounds.start_clusters",
        )
    if admission.policy == "open" and not manifest.model.root and not named:
        yield Finding(
            Level.ODD,
            "model.seed_state",
            "is missing in an open run: the first clusters that agree on a state start it, also unknown peers",
            "run `dilocox init` to make the run file, or name founders in admission.allow",
        )
    if admission.policy == "open" and manifest.rounds.min_clusters == 1:
        yield Finding(
            Level.ODD,
            "rounds.min_clusters",
            "is 1 in an open run: one unknown peer can continue the run alone after all others left",
            "set it to 2, or use an allow-list",
        )


def _training(manifest: Manifest) -> Iterator[Finding]:
    training, rounds, outer = manifest.training, manifest.rounds, manifest.outer
    steps = manifest.nominal_steps(rounds.count + 1)
    if not 1 / SCHEDULE_SLACK <= training.total_steps / steps <= SCHEDULE_SLACK:
        where = "long before the run does" if training.total_steps < steps else "long after the run"
        yield Finding(
            Level.ODD,
            "training.total_steps",
            f"{training.total_steps:,}: the learning rate's cosine ends {where}, which takes about {steps:,} "
            f"steps ({rounds.count:,} rounds of {rounds.inner_steps:,})",
            f"total_steps = {steps}",
        )
    if training.warmup_steps >= training.total_steps:
        yield Finding(
            Level.ODD,
            "training.warmup_steps",
            f"{training.warmup_steps:,} do not end before total_steps {training.total_steps:,}",
            f"warmup_steps = {training.total_steps // 10}",
        )
    for key, rate, most in (
        ("training.learning_rate", training.learning_rate, LARGE_ADAMW),
        ("training.muon_learning_rate", training.muon_learning_rate * (training.optimizer == "muon"), LARGE_MUON),
        ("outer.learning_rate", outer.learning_rate, LARGE_OUTER),
    ):
        if rate > most:
            yield Finding(
                Level.ODD, key, f"{rate:g} is above {most:g}, the largest rate that is known to train", f"try {most / 10:g}"
            )


def _compression(manifest: Manifest) -> Iterator[Finding]:
    compression, model = manifest.compression, manifest.model
    if compression.codec != "lowrank-int4" and compression.rank is not None:
        yield _idle("compression.rank", f"of {compression.codec}")
    if compression.codec != "topk-int2" and compression.k is not None:
        yield _idle("compression.k", f"of {compression.codec}")
    if compression.codec == "lowrank-int4" and compression.keep > (
        most := min(model.config.hidden_size, model.config.intermediate_size)
    ):
        yield Finding(
            Level.ODD,
            "compression.rank",
            f"{compression.keep} is above the model's largest rank, {most}: the factors are larger than their matrices",
            f"rank = {max(1, most // 4)}",
        )


def _rounds(manifest: Manifest) -> Iterator[Finding]:
    rounds = manifest.rounds
    if rounds.vote_seconds > rounds.deadline_seconds:
        yield Finding(
            Level.ODD,
            "rounds.vote_seconds",
            f"{rounds.vote_seconds:g}, above deadline_seconds {rounds.deadline_seconds:g}: the vote waits longer than the work",
            f"vote_seconds = {rounds.deadline_seconds / 5:g}",
        )
    if rounds.liveness_seconds >= rounds.deadline_seconds:
        yield Finding(
            Level.ODD,
            "rounds.liveness_seconds",
            f"{rounds.liveness_seconds:g} is not below deadline_seconds: an absent peer delays every round",
            "liveness_seconds = 15",
        )
    if rounds.overlap != "none" and rounds.max_inner_steps == rounds.inner_steps:
        yield Finding(
            Level.ODD,
            "rounds.max_inner_steps",
            "equals inner_steps: while a commit is late, no cluster trains",
            f"max_inner_steps = {3 * rounds.inner_steps}",
        )
    if rounds.synchronous_rounds >= rounds.count and rounds.overlap != "none":
        yield Finding(
            Level.ODD,
            "rounds.synchronous_rounds",
            f"{rounds.synchronous_rounds:,} of {rounds.count:,} rounds: no round ever overlaps",
            'set overlap = "none" if this is intended',
        )
    if rounds.overlap != "rebase" and _is_set(rounds, "lead_weight"):
        yield _idle("rounds.lead_weight", f"with overlap {rounds.overlap}")
    for key, every in (("rounds.snapshot_every", rounds.snapshot_every), ("rounds.evaluate_every", rounds.evaluate_every)):
        if every > rounds.count:
            yield Finding(
                Level.ODD,
                key,
                f"{every:,}, but the run has {rounds.count:,} rounds: it never happens",
                f"at most {rounds.count}",
            )


def _attestation(manifest: Manifest) -> Iterator[Finding]:
    attestation = manifest.attestation
    for kind in attestation.kinds:
        if not attestation.measurements.get(kind):
            yield Finding(
                Level.WRONG,
                f"attestation.measurements.{kind}",
                "is empty, and an empty list admits no peer",
                "add the measurement that `dilocox attest self` prints on a trusted machine",
            )
    if "simulated" in attestation.kinds:
        yield Finding(
            Level.ODD,
            "attestation.kinds",
            "admits simulated evidence, which proves nothing: use it for testnets only",
            "use tdx or sev-snp",
        )


def _is_set(section: BaseModel, key: str) -> bool:
    """Whether it is another value than the default: a manifest that arrived has every default written out."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _idle(key: str, when: str) -> Finding:
    return Finding(Level.ODD, key, f"has no effect {when}", "remove it")
