"""`python -m bench.docs`: the tables of docs/results, from what the benches wrote into bench/results."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

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
from dilocox.cli.main import app
from dilocox.node.planning.plan import PUBLISHED, paper_rows

__all__ = ["FOLDER", "contents", "main", "stale"]

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "results"
PLAN = "`dilocox plan --paper`: three rows fit the constants that were not published, the last one is predicted.\n\n"
REPRODUCED = "\n![loss over time](reproduce.png)\n"
ADVISED = [(preset, line) for preset in ("llama-10m", "llama-125m", "llama-1b") for line in ("50mbit", "200mbit", "1gbit")]
"""Presets and bandwidths of the table of advice, on the machines that each preset is made for."""

Results = Mapping[str, dict[str, Any]]
"""Results of benches, by name."""


def recorded(*folders: Path) -> Results:
    """Return the results of each bench, from the first of these folders that has them."""
    found = {name: next((path for at in folders if (path := at / f"{name}.json").exists()), None) for name, _, _ in TABLES}
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
    words = "clock: in steps of AllReduce; edge: a rate of the best choice is the smallest or the largest that was tried"
    text = f"`python -m bench.study` ({machine(result)}; text {values['text']['name']}; {budget}; {sets}; {words})\n"
    text += "\nLowest arm with rounds in each cell; of: number of arms that were run; one cluster alone: above the lowest\n"
    text += f"\n{markdown(of_study.LOWEST, of_study.lowest(values['cells']))}\n"
    for cell in values["cells"]:
        if cell["rows"]:
            text += f"\n## {cell['name']}\n\n{markdown(of_study.COLUMNS, [of_study.cells(row) for row in cell['rows']])}\n"
    return text


def tabled(command: str, more: str, result: dict[str, Any]) -> str:
    """Return the table and notes of a bench that keeps its own table."""
    values = result["results"]
    shown = markdown(values["table"]["columns"], values["table"]["cells"])
    return f"`{command}` ({machine(result)})\n\n{shown}\n\n" + "\n".join(f"- {note}" for note in values["notes"]) + f"\n{more}"


def settings(result: dict[str, Any]) -> str:
    """Return the settings with which the rows of the paper's table are trained."""
    rows = [
        [name, choice_text(row["chosen"]), ", ".join(f"{trial['loss']:.3f}" for trial in row["tried"])]
        for name, row in result["results"]["rows"].items()
    ]
    facts = "losses at the end of the arithmetic alone, with another seed and other held-out text than the table's"
    command = "`make reproduce` takes the best of each: `python -m bench.reproduce --tune`"
    return f"{command} ({facts})\n\n{markdown(['row', 'chosen', 'losses: first choice, draws, further ones'], rows)}\n"


def plan() -> str:
    rows = [
        [row.method.name, f"{published:,.1f}", f"{row.tokens_per_second:,.1f}", f"{row.tokens_per_second / published - 1:+.1%}"]
        for row, published in zip(paper_rows(), PUBLISHED.values(), strict=True)
    ]
    return PLAN + markdown(["107B, 1 Gbps", "published tokens/s", "modelled", "difference"], rows) + "\n"


def advice() -> str:
    """Return the advice of `dilocox plan` for some presets and bandwidths."""
    rows = []
    for preset, line in ADVISED:
        run = CliRunner().invoke(app, ["plan", "--preset", preset, "--bandwidth", line, "--json"], catch_exceptions=False)
        found = json.loads(run.stdout)["advice"]
        kept = found["settings"]["compression"]
        codec = kept["codec"] + (f", k = {kept['k']}" if kept.get("k") else "")
        gap = "–" if found["gap"] is None else f"{found['gap']:.1%}"
        rows.append([preset, line, codec, f"{found['inner_steps']:,}", found["overlap"], f"{found['bits']:.3f}", gap])
    return markdown(["preset", "bandwidth", "codec", "H", "overlap", "bits a parameter and step", "gap"], rows)


def poisoning(defence: str) -> str:
    """Return the finished cells of the registered settings."""
    return markdown(*scored(FULL, [attack.name for attack in ATTACKS], defence))


TABLES: Sequence[tuple[str, str, Callable[[dict[str, Any]], str]]] = (
    ("study", "The registered comparison", study),
    ("reproduce", "The paper's table, measured", partial(tabled, "make reproduce", REPRODUCED)),
    (TUNED, "Settings of the paper's table", settings),
    ("clock", "The time model and real swarms", partial(tabled, "python -m bench.clock", "")),
    ("exchange", "One exchange", partial(tabled, "python -m bench.exchange", "")),
    ("adaptive", "Adaptive compression", adaptive),
)
"""Generated pages of docs/results: name of the bench's results, title, contents."""

BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    DOCS / "results.md": {"advice": advice},
    FOLDER / "poisoning.md": {"scored": partial(poisoning, SCORES.name), "scored-bias": partial(poisoning, BIAS.name)},
}
"""Blocks of hand-written pages."""


def contents(results: Results) -> Iterator[tuple[Path, str]]:
    """Yield every page that is generated, or has blocks, as it should be."""
    mark = "generated by python -m bench.docs"
    pages = [(name, title, described(results[name])) for name, title, described in TABLES if name in results]
    for name, title, body in [*pages, ("plan", "The time model and the published rows", plan())]:
        yield FOLDER / f"{name}.md", f"# {title}\n\n<!-- {mark} -->\n\n{body}\n<!-- /{mark} -->\n"
    for path, blocks in BLOCKS.items():
        yield path, render(path.read_text(), blocks)


def stale() -> list[Path]:
    """Return the pages that differ from the results that are kept."""
    return [path for path, text in contents(recorded(FOLDER)) if not path.exists() or path.read_text() != text]


def keep_runs(before: Mapping[str, Any], folder: Path, path: Path) -> None:
    """Write every run of a bench to a file, from which the next call continues. `before`: runs that are in it already."""
    known = {**before, **{path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}}
    if known:
        path.write_text(
            json.dumps(dict(sorted(known.items())), indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n"
        )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    results = recorded(RESULTS, FOLDER)
    for name, result in results.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    keep_runs(of_study_runs.kept(), of_study_runs.RUNS, of_study_runs.KEPT)
    keep_runs(of_poison.kept(), of_poison.CELLS, of_poison.KEPT)
    if (made := RESULTS / "reproduce.png").exists():
        shutil.copy(made, FOLDER / made.name)
    for path, text in contents(results):
        path.write_text(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
