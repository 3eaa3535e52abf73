"""What hostile clusters do to a model, by attack and defence: `python -m bench.poison [--quick] [--own-data] [--check]`.

Real trainers and codecs in the lab, whose counting and apply are the product's; hostile payloads (bench/attacks.py) pass what
voters check, or are refused. A defence is what a manifest chooses, each one more than the one before. Finished cells are kept in
bench/results/poison, so an interrupted bench goes on where it was; `--afresh` forgets them. docs/poisoning.md quotes it.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.arms import ARMS, Settings
from bench.report import RESULTS, judge, load_preset, table, write
from bench.texts import Text, stdlib
from dilocox.cli.init import preset_names
from dilocox.protocol.crypto import sha256
from dilocox.protocol.manifest import Manifest, Scoring
from dilocox.transport.files import write_atomically

__all__ = ["DEFENCES", "Cell", "main", "train"]

CELLS = RESULTS / "poison"
HORIZON = 5
ARRIVAL = 2
"""Inner step at which a commit arrives."""
CODECS = {"sparse": "ours", "low rank": "DiLoCoX"}
SMALL: Settings = {
    "model": {"hidden_size": 64, "intermediate_size": 128, "sequence_length": 32},
    "data": {"evaluation_sequences": 128},
    "training": {"warmup_steps": 5},
}
"""On top of the toy of bench/arms.py."""


@dataclass(frozen=True)
class Defence:
    name: str
    describe: str
    settings: Mapping[str, Mapping[str, Any]]


def _more(before: Defence, name: str, describe: str, **settings: Mapping[str, Any]) -> Defence:
    merged = {section: dict(values) for section, values in before.settings.items()}
    for section, values in settings.items():
        merged.setdefault(section, {}).update(values)
    return Defence(name, describe, merged)


OFF = {"weight_cap": 0, "clip_ratio": 1024.0, "tensor_clip_ratio": 0, "largest_rms": 1e6}
NONE = Defence("none", "the mean by announced tokens", {"rounds": OFF})
CAP = _more(NONE, "cap", "weights at most the median", rounds={"weight_cap": None})
TOTAL = _more(CAP, "+ clip", "payloads at most two medians, and largest_rms", rounds={"clip_ratio": 2.0, "largest_rms": None})
TENSORS = _more(
    TOTAL, "+ tensors", "each tensor at most 1.25 medians: the defaults of an open run", rounds={"tensor_clip_ratio": None}
)
CENTERED = _more(TENSORS, "centered-clip", "outer.aggregate", outer={"aggregate": "centered-clip"})
SCORING = {"voters": 32}
SCORES = _more(TENSORS, "scores", "the defaults, and a committee of 32 that scores", scoring=SCORING)
SCORES_CENTERED = _more(CENTERED, "scores + centered-clip", "both", scoring=SCORING)
AWAY = _more(TENSORS, "scores, agreement 0", "as it was first: harm points away", scoring={**SCORING, "agreement": 0.0})
AWAY_CENTERED = _more(CENTERED, "scores, agreement 0 + centered-clip", "both", scoring={**SCORING, "agreement": 0.0})
DEFENCES = [
    NONE,
    CAP,
    TOTAL,
    TENSORS,
    _more(TENSORS, "trimmed", "outer.aggregate", outer={"aggregate": "trimmed"}),
    CENTERED,
    SCORES,
    SCORES_CENTERED,
]
"""A defence that is to come is one more."""
BY_NAME = [*DEFENCES, AWAY, AWAY_CENTERED]
"""With those that no table has unless it is asked for."""
SCORED = {defence.name: TENSORS.name for defence in (SCORES, AWAY)} | {
    d.name: CENTERED.name for d in (SCORES_CENTERED, AWAY_CENTERED)
}
"""Those that score, and what each is without."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    attack: str
    defence: str
    clusters: int
    hostile: int
    codec: str
    layers: int
    steps: int
    seed: int
    text: Text

    def manifest(self) -> Manifest:
        arm = replace(next(arm for arm in ARMS if arm.name == CODECS[self.codec]), horizon=HORIZON)
        defence = next(defence for defence in BY_NAME if defence.name == self.defence)
        choice: dict[str, dict[str, Any]] = {}
        for settings in (arm.settings, arm.choices[0], SMALL, {"model": {"layers": self.layers}}, defence.settings):
            for section, values in settings.items():
                choice.setdefault(section, {}).update(values)
        choice.setdefault("outer", {}).update({"learning_rate": 1.0, "momentum": 0.0})
        return arm.manifest(choice, self.steps, self.seed, self.text)

    @property
    def said(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text.settings}

    @property
    def key(self) -> str:
        return sha256(json.dumps(self.said).encode(), self.manifest().canonical_bytes()).hex()[:24]

    def result(self) -> dict[str, Any] | None:
        path = CELLS / f"{self.key}.json"
        return json.loads(path.read_text()) if path.exists() else None


def train(cell: Cell) -> dict[str, Any]:
    """Held-out losses round by round, and what voters refused and measured."""
    from bench.attacks import ATTACKS, Adversary
    from bench.lab import Lab, process_group_of_one

    process_group_of_one()
    attack = next(attack for attack in ATTACKS if attack.name == cell.attack)
    hostile = Adversary(range(cell.clusters - cell.hostile, cell.clusters), attack, cell.seed)
    run = cell.manifest()
    lab = Lab(
        run, cell.clusters, ARRIVAL, evaluate_every=max(1, run.rounds.count // 4), data=cell.text.folder, hostile=hostile
    ).rounds()
    losses = [loss if math.isfinite(loss) else math.inf for loss in lab.losses]
    bad = set(hostile.names(lab))
    return {
        "cell": cell.said,
        "losses": losses,
        "refused": lab.refused,
        "judged": {"hostile": _of(lab.judged, bad), "honest": len(lab.judged) - _of(lab.judged, bad)},
        "harmful": {"hostile": _of(lab.harmful, bad), "honest": len(lab.harmful) - _of(lab.harmful, bad)},
        "measured": [
            [
                each.round,
                each.voter in bad,
                each.author in bad,
                round(each.score.gain, 6),
                round(each.score.cosine, 6),
                each.harmful,
            ]
            for each in lab.committee.measured
        ],
        "seconds": asdict(lab.seconds),
    }


def _of(round_and_author: Iterable[tuple[int, str]], clusters: Container[str]) -> int:
    return sum(author in clusters for _, author in round_and_author)


def _keep(cell: Cell) -> Cell:
    CELLS.mkdir(parents=True, exist_ok=True)
    write_atomically(CELLS / f"{cell.key}.json", json.dumps(train(cell)).encode())
    return cell


def run_all(cells: Iterable[Cell], processes: int) -> None:
    waiting = [cell for cell in cells if cell.result() is None]
    if not waiting:
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, cell in enumerate(pool.imap_unordered(_keep, waiting), 1):
            hostile = f"{cell.hostile} of {cell.clusters}, {cell.codec}, seed {cell.seed}"
            print(f"{done}/{len(waiting)}  {loss_of(cell):8.3f}  {cell.attack} against {cell.defence}: {hostile}", flush=True)


def loss_of(cell: Cell) -> float:
    """At the end of the run."""
    result = cell.result()
    assert result is not None
    return float(result["losses"][-1])


@dataclass(frozen=True)
class Judged:
    """What committees did with well-made contributions, over the runs of some seeds."""

    hostile: int
    caught: int
    honest: int
    refused: int
    voices: int
    """Scores of honest contributions by honest voters."""
    against: int
    """Of those, who found harm."""
    worse: int
    """Of those, who found a larger loss."""
    cosine: float
    """The smallest of those."""
    training: float
    """Process seconds."""
    candidates: float
    losses: float

    def __str__(self) -> str:
        return f"{self.caught} of {self.hostile}; {self.refused} of {self.honest}"


def judged(cells: Iterable[Cell]) -> Judged:
    results = [result for cell in cells if (result := cell.result()) is not None]
    fair = [
        (gain, cosine, harm) for result in results for _, by, of, gain, cosine, harm in result["measured"] if not by and not of
    ]

    def total(kind: str, name: str) -> Any:
        return sum(result[kind][name] for result in results)

    return Judged(
        total("judged", "hostile"),
        total("harmful", "hostile"),
        total("judged", "honest"),
        total("harmful", "honest"),
        len(fair),
        sum(harm for _, _, harm in fair),
        sum(gain < 0 for gain, _, _ in fair),
        min(cosine for _, cosine, _ in fair),
        *(total("seconds", name) for name in ("training", "candidates", "losses")),
    )


@dataclass(frozen=True)
class Setting:
    """One table: attacks down, defences across."""

    clusters: int
    hostile: int
    codec: str
    layers: int
    steps: int
    seeds: int

    def cells(self, attack: str, defence: str) -> list[Cell]:
        hostile = self.hostile if attack != "nobody" else 0
        cell = Cell(attack, defence, self.clusters, hostile, self.codec, self.layers, self.steps, 0, stdlib())
        return [replace(cell, seed=seed) for seed in range(self.seeds)]

    @property
    def inner_steps(self) -> int:
        """Of all clusters, over the runs of all seeds."""
        return self.clusters * self.steps * self.seeds

    def steps_a_score(self, each: Judged) -> float:
        """In inner steps of one cluster."""
        return each.losses / each.voices / (each.training / self.inner_steps)

    @property
    def title(self) -> str:
        parts = f"{self.hostile} of {self.clusters} hostile, {self.codec} payloads"
        rounds = f"{self.steps // HORIZON} rounds of {HORIZON} inner steps"
        return f"{parts}, {self.layers} layer{'s' * (self.layers > 1)}, {rounds}, {self.seeds} seed{'s' * (self.seeds > 1)}"


QUICK = Setting(4, 1, "sparse", 1, 50, 1)
FULL = [
    Setting(clusters, hostile, codec, 2, 200, 3) for codec in CODECS for clusters, hostile in ((4, 1), (8, 1), (8, 2), (16, 5))
]
HELD = ("flip", "flip, loud", "tokens", "live", "late", "one tensor", "zeros", "copy", "renamed copy")
"""What the defaults are there for."""
HARM, EXPLODES, COST = 1.25, 2.0, 1.05
"""Times the loss without hostile clusters: what held attacks may reach with the defaults, what the live one reaches without
defence, and what the defaults may cost where nobody is hostile."""


CLOSE, UNJUST, UNSCORED, SHARE = 1.01, 0.02, 1.003, 0.03
"""Where the run scores and fewer than a third are hostile: times the loss without hostile clusters, share of honest contributions
refused; and with nobody hostile: times the loss without scores, and of the time that training takes in a preset that scores."""


def preset_share(preset: str, steps_a_score: float, sequences: int, clusters: int) -> float:
    """Of the time that a round of a preset trains: what a cluster takes that scores all others, or as many as it may. 0: it does
    not score. `steps_a_score`: what one took, in inner steps of so many `sequences`; both go with the sequences that they read."""
    run = load_preset(preset)
    scores = min(run.scoring.voters, clusters - 1)
    read = run.scoring.sequences / Scoring().sequences
    return scores * steps_a_score * read * sequences / run.training.batch_size / run.rounds.inner_steps


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
    """`unscored`: the loss where nobody is hostile nor scores, by defence that scores."""
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


def shares(setting: Setting, each: Judged) -> dict[str, float]:
    """What scoring takes, by preset that scores."""
    batch = setting.cells("nobody", SCORES.name)[0].manifest().training.batch_size
    found = {name: preset_share(name, setting.steps_a_score(each), batch, setting.clusters) for name in preset_names()}
    return {name: share for name, share in found.items() if share}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one setting, one seed, short runs")
    parser.add_argument("--clusters", type=int, default=QUICK.clusters, help="of the quick setting")
    parser.add_argument("--hostile", type=int, default=QUICK.hostile, help="of the quick setting")
    parser.add_argument("--codec", choices=CODECS, default=QUICK.codec, help="of the quick setting")
    parser.add_argument("--steps", type=int, default=QUICK.steps, help="inner steps of each cluster, of the quick setting")
    parser.add_argument("--seeds", type=int, default=QUICK.seeds, help="of the quick setting")
    parser.add_argument("--defences", nargs="+", choices=[each.name for each in BY_NAME], help="only these columns")
    parser.add_argument("--attacks", nargs="+", help="only these rows, and nobody's")
    parser.add_argument("--own-data", action="store_true", help="what a contribution does on its own samples and on others")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar does not hold")
    parser.add_argument("--afresh", action="store_true", help="forget finished cells")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.afresh:
        shutil.rmtree(CELLS, ignore_errors=True)
    quick = replace(
        QUICK, clusters=options.clusters, hostile=options.hostile, codec=options.codec, steps=options.steps, seeds=options.seeds
    )
    settings = [quick] if options.quick else FULL
    if options.own_data:
        own_data(settings)
        return
    from bench.attacks import ATTACKS

    names = [attack.name for attack in ATTACKS if not options.attacks or attack.name in ("nobody", *options.attacks)]
    defences = options.defences or [defence.name for defence in DEFENCES]
    rows = {(attack, d) for attack in names for d in defences} | {("nobody", SCORED[d]) for d in defences if d in SCORED}
    run_all((cell for s in settings for row in sorted(rows) for cell in s.cells(*row)), options.processes)
    results, sentences = [], []
    for setting in settings:
        found = losses(setting, names, defences)
        votes = {attack: {d: judged(setting.cells(attack, d)) for d in defences if d in SCORED} for attack in names}
        say(setting, found, votes)
        if not options.attacks and not options.defences:
            sentences += missed(setting, found)
        unscored = losses(setting, ["nobody"], [SCORED[d] for d in defences if d in SCORED])["nobody"]
        sentences += missed_by_scores(setting, found, votes, {d: unscored[SCORED[d]] for d in votes["nobody"]})
        results.append({"setting": asdict(setting), "losses": found, "votes": votes})
    short = f"poison-quick-{quick.hostile}-of-{quick.clusters}-{quick.codec.replace(' ', '-')}"
    write(short if options.quick else "poison", json.loads(json.dumps(results, default=asdict)))
    judge(sentences, options.check)


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
            f"{setting.steps_a_score(each):.2f}",
        ]
        for defence, each in votes["nobody"].items()
    ]
    found_harm = ["scores that find harm", "that find a larger loss", "smallest cosine"]
    table(["defence", *found_harm, "losses / training", "candidates / training", "inner steps a score"], rows)
    for defence, each in votes["nobody"].items():
        of_presets = ", ".join(f"{share:.1%} in {preset}" for preset, share in shares(setting, each).items())
        print(f"{defence}: of the time that a round trains, with as many clusters: {of_presets}")


def own_data(settings: Sequence[Setting]) -> None:
    """Mean difference of gains, its standard error, and the standard deviation of one measurement."""
    from bench.own_data import differences, summary

    for setting in settings:
        cells = setting.cells("nobody", TENSORS.name)
        found = [
            each for cell in cells for each in differences(cell.manifest(), cell.clusters, ARRIVAL, cell.text.folder, cell.seed)
        ]
        print(f"\ngain on its own samples less that on others, nats per token; {setting.title}")
        rows = [
            [name, str(len(values)), *(f"{value:.5f}" for value in summary(values))]
            for name, values in (
                ("its author's", [each.own for each in found]),
                ("who copied it", [each.copied for each in found]),
            )
        ]
        table(["samples of", "measured", "mean", "standard error", "standard deviation"], rows)


if __name__ == "__main__":
    main()
