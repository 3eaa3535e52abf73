"""Report of the comparison: tables, and missed bars."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.poison.cells import found, loss_of
from bench.poison.design import SCORES, TENSORS, Cell, Setting
from bench.report import load_preset, table
from dilocox.cli.run.init import preset_names

__all__ = ["HARM", "Judged", "complete", "judged", "losses", "missed", "missed_by_scores", "preset_share", "say", "scored"]


@dataclass(frozen=True)
class Judged:
    """Verdicts of committees on valid contributions, over the runs of some seeds."""

    hostile: int
    caught: int
    honest: int
    refused: int
    voices: int
    """Scores of honest contributions by honest voters."""
    against: int
    """Votes that found harm."""
    worse: int
    """Votes that found a larger loss."""
    cosine: float
    """The smallest of those."""
    training: float
    """Process seconds."""
    candidates: float
    losses: float

    def __str__(self) -> str:
        return f"{self.caught} of {self.hostile}; {self.refused} of {self.honest}"


def judged(cells: Iterable[Cell]) -> Judged:
    results = [result for cell in cells if (result := found(cell)) is not None]

    def total(kind: str, name: str) -> Any:
        return sum(result[kind][name] for result in results)

    return Judged(
        hostile=total("judged", "hostile"),
        caught=total("harmful", "hostile"),
        honest=total("judged", "honest"),
        refused=total("harmful", "honest"),
        voices=total("fair", "voices"),
        against=total("fair", "against"),
        worse=total("fair", "worse"),
        cosine=min(result["fair"]["cosine"] for result in results),
        training=total("seconds", "training"),
        candidates=total("seconds", "candidates"),
        losses=total("seconds", "losses"),
    )


def complete(setting: Setting, attack: str, defence: str) -> bool:
    return all(found(cell) is not None for cell in setting.cells(attack, defence))


HELD = ("flip", "flip, loud", "tokens", "live", "late", "one tensor", "zeros", "copy", "renamed copy")
"""Attacks that the defaults must resist."""
HARM, EXPLODES, COST = 1.25, 2.0, 1.05
"""Bars as multiples of the loss without hostile clusters: the limit for resisted attacks with the defaults; the live
attack's loss without defence; the defaults' cost without attackers."""


CLOSE, UNJUST, UNSCORED, SHARE = 1.01, 0.02, 1.003, 0.03
"""Bars if the run scores and fewer than a third are hostile: multiple of the loss without hostile clusters, share of
honest contributions rejected. Bars without attackers: multiple of the loss without scores, share of training time in a
preset that scores."""


def steps_a_score(setting: Setting, each: Judged) -> float:
    """Return the cost of a score, in inner steps of one cluster."""
    return each.losses / each.voices / (each.training / setting.inner_steps)


def preset_share(preset: str, steps_a_score: float, sequences: int, clusters: int) -> float:
    """Return the scoring time as a share of a round's training in a preset; 0: it does not score. It is for a cluster that
    scores all others, or its allowed maximum. `steps_a_score`: cost of one score, in inner steps of `sequences`; both
    are proportional to the sequences that they read."""
    run = load_preset(preset)
    scores = min(run.scoring.voters, clusters - 1)
    return scores * steps_a_score * sequences / run.training.batch_size / run.rounds.inner_steps


def losses(setting: Setting, attacks: Sequence[str], defences: Sequence[str]) -> dict[str, dict[str, float]]:
    return {
        attack: {defence: statistics.fmean(loss_of(cell) for cell in setting.cells(attack, defence)) for defence in defences}
        for attack in attacks
    }


def missed(setting: Setting, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    base, defaults, sentences = found["nobody"]["none"], TENSORS.name, []
    if found["nobody"][defaults] > COST * base:
        sentences.append(
            f"{setting.title}: the defaults cost {found['nobody'][defaults] / base - 1:.1%} where nobody is hostile"
        )
    if found["live"]["none"] < EXPLODES * base:
        sentences.append(f"{setting.title}: the live attack reaches only {found['live']['none']:.3f} without defence")
    for attack in HELD if 4 * setting.hostile <= setting.clusters else ():
        if found[attack][defaults] > HARM * base:
            sentences.append(
                f"{setting.title}: {attack} reaches {found[attack][defaults]:.3f} with the defaults, {base:.3f} without it"
            )
    return sentences


def missed_by_scores(
    setting: Setting,
    found: Mapping[str, Mapping[str, float]],
    votes: Mapping[str, Mapping[str, Judged]],
    unscored: Mapping[str, float],
) -> list[str]:
    """Return the bars that scoring misses. `unscored`: the loss without attackers and scores, by defence that scores."""
    sentences = []
    for defence, plain in unscored.items() if 3 * setting.hostile < setting.clusters else ():
        clean, quiet = found["nobody"][defence], votes["nobody"][defence]
        for attack, row in found.items():
            if row[defence] > CLOSE * clean:
                sentences.append(f"{attack} reaches {row[defence]:.3f} with {defence}, {clean:.3f} with nobody hostile")
            each = votes[attack][defence]
            if each.refused > UNJUST * each.honest:
                sentences.append(f"{attack}: {defence} refuses {each.refused} of {each.honest} honest contributions")
        if clean > UNSCORED * plain:
            sentences.append(f"{defence} costs {clean / plain - 1:.1%} where nobody is hostile")
        for preset, share in shares(setting, quiet).items():
            if share > SHARE:
                sentences.append(f"{defence} would take {share:.1%} of the time that a round of {preset} trains")
    return [f"{setting.title}: {sentence}" for sentence in sentences]


def shares(setting: Setting, score: Judged) -> dict[str, float]:
    """Return the share of scoring, by preset that scores with the setting's inner optimizer: Muon's steps are longer than
    AdamW's."""
    run = setting.cells("nobody", SCORES.name)[0].manifest()
    steps, found = steps_a_score(setting, score), dict[str, float]()
    for name in preset_names():
        preset = load_preset(name)
        if preset.training.optimizer == run.training.optimizer:
            found[name] = preset_share(name, steps, run.training.batch_size, setting.clusters)
    return {name: share for name, share in found.items() if share}


def say(setting: Setting, found: Mapping[str, Mapping[str, float]], votes: Mapping[str, Mapping[str, Judged]]) -> None:
    print(f"\nheld-out loss at the end; {setting.title}")
    table(["attack", *found["nobody"]], [[attack, *(f"{loss:.3f}" for loss in row.values())] for attack, row in found.items()])
    if not votes["nobody"]:
        return
    print(f"\nhostile contributions caught of how many; honest ones refused of how many; {setting.title}")
    table(["attack", *votes["nobody"]], [[attack, *map(str, row.values())] for attack, row in votes.items()])
    print(f"\nnobody hostile: what scoring takes; {setting.title}")
    rows = [
        [
            defence,
            f"{each.against} of {each.voices}",
            str(each.worse),
            f"{each.cosine:.3f}",
            f"{each.losses / each.training:.1%}",
            f"{each.candidates / each.training:.1%}",
            f"{steps_a_score(setting, each):.2f}",
        ]
        for defence, each in votes["nobody"].items()
    ]
    found_harm = ["scores that find harm", "that find a larger loss", "smallest cosine"]
    table(["defence", *found_harm, "losses / training", "candidates / training", "inner steps a score"], rows)
    for defence, each in votes["nobody"].items():
        if of_presets := ", ".join(f"{share:.1%} in {preset}" for preset, share in shares(setting, each).items()):
            print(f"{defence}: of the time that a round trains, with as many clusters: {of_presets}")


def scored(
    settings: Sequence[Setting], attacks: Sequence[str], defence: str = SCORES.name
) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of one table over settings, from finished cells with a defence that scores. The columns: the
    loss over that without attackers; caught hostile contributions of all; rejected honest contributions of all."""
    here = [setting for setting in settings if complete(setting, "nobody", defence)]
    rows = []
    for attack in attacks:
        if attack == "nobody":
            continue
        row = [attack]
        for setting in here:
            if not complete(setting, attack, defence):
                row.append("")
                continue
            clean, loss = (losses(setting, [name], [defence])[name][defence] for name in ("nobody", attack))
            each = judged(setting.cells(attack, defence))
            row.append(f"{loss / clean - 1:+.1%}; {each.caught} of {each.hostile}; {each.refused} of {each.honest}")
        if any(row[1:]):
            rows.append(row)
    return ["attack", *(f"{each.hostile} of {each.clusters}, {each.codec}" for each in here)], rows
