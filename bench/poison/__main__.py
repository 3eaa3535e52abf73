"""Effect of hostile clusters on a model, by attack and defence: `python -m bench.poison [--quick] [--check]`.

Real trainers and codecs run in the lab, with the product's counting and apply. Hostile payloads (bench/attacks.py) pass
the voters' checks, or are rejected. A defence is a set of manifest choices; each adds one to the previous defence
(design.py). The bench stores finished cells here, and `python -m bench.docs` writes them to
docs/results/poison-runs.json. A later call continues from both. `--minutes` limits one call. docs/results/poisoning.md quotes
the results.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.poison.cells import run_all
from bench.poison.design import CODECS, DEFENCES, FULL, QUICK, SCORED, Setting
from bench.poison.report import complete, judged, losses, missed, missed_by_scores, say
from bench.report import bench_parser, judge, write

__all__ = ["main"]


@dataclass(frozen=True)
class Plan:
    """Cells of one call."""

    settings: Sequence[Setting]
    attacks: Sequence[str]
    """Attacks, with the case of no attack."""
    defences: Sequence[str]
    whole: bool
    """True if it covers all attacks and defences."""

    def run(self, processes: int, until: float) -> None:
        rows = {(a, d) for a in self.attacks for d in self.defences}
        rows |= {("nobody", SCORED[d]) for d in self.defences if d in SCORED}
        cells = (cell for setting in self.settings for row in sorted(rows) for cell in setting.cells(*row))
        run_all(cells, processes, until)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    quick = replace(
        QUICK, clusters=options.clusters, hostile=options.hostile, codec=options.codec, steps=options.steps, seeds=options.seeds
    )
    settings = [quick] if options.quick else FULL
    from bench.attacks import ATTACKS

    attacks = [attack.name for attack in ATTACKS if not options.attacks or attack.name in ("nobody", *options.attacks)]
    defences = options.defences or [defence.name for defence in DEFENCES]
    plan = Plan(settings, attacks, defences, not options.attacks and not options.defences)
    plan.run(options.processes, time.monotonic() + 60 * options.minutes)
    found = [report(plan, setting) for setting in settings]
    short = f"poison-{quick.hostile}-of-{quick.clusters}-{quick.codec.replace(' ', '-')}"
    results = [result for result, _ in found]
    write(short if options.quick else "poison", json.loads(json.dumps(results, default=asdict)), options.quick)
    judge([sentence for _, sentences in found for sentence in sentences], options.check)


def parser() -> argparse.ArgumentParser:
    parser = bench_parser("bench.poison", __doc__, "one setting, one seed, short runs")
    parser.add_argument("--clusters", type=int, default=QUICK.clusters, help="of the quick setting")
    parser.add_argument("--hostile", type=int, default=QUICK.hostile, help="of the quick setting")
    parser.add_argument("--codec", choices=CODECS, default=QUICK.codec, help="of the quick setting")
    parser.add_argument("--steps", type=int, default=QUICK.steps, help="inner steps of each cluster, of the quick setting")
    parser.add_argument("--seeds", type=int, default=QUICK.seeds, help="of the quick setting")
    parser.add_argument("--defences", nargs="+", choices=[each.name for each in DEFENCES], help="only these columns")
    parser.add_argument("--attacks", nargs="+", help="only these rows, and nobody's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    return parser


def report(plan: Plan, setting: Setting) -> tuple[dict[str, Any], list[str]]:
    """Return the finished part of a setting as a report, and the missed or unknown bars, as sentences."""
    known = [d for d in plan.defences if all(complete(setting, "nobody", each) for each in (d, SCORED.get(d, d)))]
    attacks = [attack for attack in plan.attacks if all(complete(setting, attack, d) for d in known)]
    sentences = [f"{setting.title}: {name} is not known yet" for name in plan.defences if name not in known]
    sentences += [f"{setting.title}: {name} is not known yet" for name in plan.attacks if name not in attacks]
    if not known:
        return {"setting": asdict(setting), "losses": {}, "votes": {}}, sentences
    found = losses(setting, attacks, known)
    votes = {attack: {d: judged(setting.cells(attack, d)) for d in known if d in SCORED} for attack in attacks}
    say(setting, found, votes)
    if plan.whole and not sentences:
        sentences += missed(setting, found)
    unscored = losses(setting, ["nobody"], [SCORED[d] for d in known if d in SCORED])["nobody"]
    sentences += missed_by_scores(setting, found, votes, {d: unscored[SCORED[d]] for d in votes["nobody"]})
    return {"setting": asdict(setting), "losses": found, "votes": votes}, sentences


if __name__ == "__main__":
    main()
