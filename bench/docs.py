"""`python -m bench.docs`: docs/results.md and docs/results/ from what the benches wrote into bench/results/."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import adaptive as bench_adaptive
from bench.arms import Settings
from bench.attacks import ATTACKS
from bench.methods import TUNED
from bench.pages import markdown, render
from bench.poison import cells as of_poison
from bench.poison.design import BIAS, FULL, SCORES
from bench.poison.report import scored
from bench.report import RESULTS
from bench.study import report as of_study
from bench.study import trial as of_study_runs
from dilocox.node.planning.plan import PUBLISHED, paper_rows

__all__ = ["FOLDER", "PAGE", "POISONED", "POISONING", "main", "page", "told"]

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "results"
PLAN = "`dilocox plan --paper`: three rows make the constants that were not published, the last one is foretold.\n\n"
REPRODUCED = "\n![loss over time on the line](results/reproduce.png)\n"
POISONING = DOCS / "poisoning.md"
PAGE, TEXT = DOCS / "results.md", DOCS / "results-notes.md"
"""Generated page, and the handwritten text in front of its tables."""

Results = Mapping[str, dict[str, Any]]
"""Results by bench."""


def told(*folders: Path) -> Results:
    """Return the results of each bench of the page, from the first of these folders that has them."""
    found = {name: next((path for at in folders if (path := at / f"{name}.json").exists()), None) for _, name, _ in SECTIONS}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path is not None}


def machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    return f"{facts['cores']} cores, {facts['device']}, torch {facts['torch']}"


def choice_text(choice: Settings) -> str:
    return " ".join(f"{name}.{key}={value:g}" for name, section in choice.items() for key, value in section.items())


def adaptive(result: dict[str, Any]) -> str:
    values = result["results"]
    facts = f"{values['steps']} inner steps, {values['seeds']} seeds, synchronous, AdamW"
    shown = markdown(bench_adaptive.COLUMNS, [bench_adaptive.cells(row) for row in values["rows"]])
    return f"`python -m bench.adaptive` ({machine(result)}; {facts})\n\n{shown}\n"


def study(result: dict[str, Any]) -> str:
    values = result["results"]
    sets = ", ".join(f"{name} {digest[:16]}…" for name, digest in values["sets"].items())
    budget = f"{values['budget']['trials']} draws for each arm, {values['budget']['seeds']} seeds"
    words = (
        "clock: in steps of AllReduce; edge: a rate of the best choice, inner or outer, is the least or the most that was tried"
    )
    text = f"`python -m bench.study` ({machine(result)}; text {values['text']['name']}; {budget}; {sets}; {words})\n"
    text += (
        "\nThe arm with rounds that ended lowest in each cell; of: so many that were run; one cluster alone: above the lowest\n"
    )
    text += f"\n{markdown(of_study.LOWEST, of_study.lowest(values['cells']))}\n"
    for cell in values["cells"]:
        if cell["rows"]:
            text += f"\n**{cell['name']}**\n\n{markdown(of_study.COLUMNS, [of_study.cells(row) for row in cell['rows']])}\n"
    return text


def tabled(result: dict[str, Any], command: str) -> str:
    """Return the table of a bench that formats its own."""
    values = result["results"]
    shown = markdown(values["table"]["columns"], values["table"]["cells"])
    return f"`{command}` ({machine(result)})\n\n{shown}\n\n" + "\n".join(f"- {note}" for note in values["notes"]) + "\n"


def settings(result: dict[str, Any]) -> str:
    """Return the training settings of the rows in the paper's table."""
    rows = [
        [name, choice_text(row["chosen"]), ", ".join(f"{trial['loss']:.3f}" for trial in row["tried"])]
        for name, row in result["results"]["rows"].items()
    ]
    told = "losses at the run's end of the arithmetic alone, of another seed and other held-out text than the table's"
    command = "`make reproduce` takes the best of each: `python -m bench.reproduce --tune`"
    return f"{command} ({told})\n\n{markdown(['row', 'chosen', 'losses: what won before, draws, further ones'], rows)}\n"


def plan() -> str:
    rows = [
        [row.method.name, f"{published:,.1f}", f"{row.tokens_per_second:,.1f}", f"{row.tokens_per_second / published - 1:+.1%}"]
        for row, published in zip(paper_rows(), PUBLISHED.values(), strict=True)
    ]
    return PLAN + markdown(["107B, 1 Gbps", "published tokens/s", "modelled", "difference"], rows) + "\n"


def keep_runs(before: Mapping[str, Any], folder: Path, path: Path) -> None:
    """Store every run of a bench beside its tables, so that a later call continues from them. `before`: runs stored
    already."""
    known = {**before, **{path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}}
    if known:
        path.write_text(
            json.dumps(dict(sorted(known.items())), indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n"
        )


def poisoning(defence: str) -> str:
    """Return the finished part of the registered settings."""
    return markdown(*scored(FULL, [attack.name for attack in ATTACKS], defence))


POISONED = {"scored": partial(poisoning, SCORES.name), "scored-bias": partial(poisoning, BIAS.name)}
"""The blocks of that page."""


SECTIONS: Sequence[tuple[str, str, Callable[[dict[str, Any]], str]]] = (
    ("The registered comparison", "study", study),
    ("The paper's table, measured", "reproduce", lambda r: tabled(r, "make reproduce") + REPRODUCED),
    ("How its rows were tuned", TUNED, settings),
    ("The clock beside real swarms", "clock", lambda r: tabled(r, "python -m bench.clock")),
    ("One exchange", "exchange", lambda r: tabled(r, "python -m bench.exchange")),
    ("Adaptive compression", "adaptive", adaptive),
)
"""Sections of the page; each is made of the results of a bench."""


def page(results: Results) -> str:
    parts = [TEXT.read_text().rstrip() + "\n"]
    parts += [f"## {title}\n\n{described(results[name])}" for title, name, described in SECTIONS if name in results]
    parts.append(f"## The cost model against the published rows\n\n{plan()}")
    return "\n".join(parts)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    results = told(RESULTS, FOLDER)
    for name, result in results.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    keep_runs(of_study_runs.kept(), of_study_runs.RUNS, of_study_runs.KEPT)
    keep_runs(of_poison.kept(), of_poison.CELLS, of_poison.KEPT)
    POISONING.write_text(render(POISONING.read_text(), POISONED))
    if (made := RESULTS / "reproduce.png").exists():
        shutil.copy(made, FOLDER / made.name)
    PAGE.write_text(page(results))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
