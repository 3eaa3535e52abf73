"""What the study prints and writes, and which of its bars are missed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.report import table
from bench.study.analysis import Row, winner
from bench.study.design import ARMS, CELLS, CENTRE, Cell

__all__ = ["COLUMNS", "DEFAULT", "cells", "missed", "row_facts", "show"]

GAP_BAR = 0.03
"""Of the default to its reference, in the centre."""
DEFAULT = "muon 0.9 | int2 | rebase, whole lead"
"""What most presets take: docs/results.md says which take what else, and why."""


COLUMNS = ["arm", "known as", "test loss", "± 95%", "gap", "of which", "H", "arrives at", "steps", "bit", "clock", "tuned"]


def show(found: Sequence[Row]) -> None:
    table(COLUMNS, [cells(row_facts(row)) for row in found])


def cells(facts: Mapping[str, Any]) -> list[str]:
    """A row as it is printed and as the page has it."""
    one, tuned = facts["runs"][0], facts["tuned"]
    choice = tuned["choice"]
    outer = f", outer {choice['steady_rate']:.2f} at momentum {choice['momentum']:g}" if one["inner_steps"] else ""
    return [
        facts["arm"],
        facts["published"] or "–",
        f"{facts['loss']:.4f}",
        f"{facts['half_width']:.4f}",
        "–" if facts["gap"] is None else f"{facts['gap']:+.1%}",
        ", ".join(f"{part or 'late'} {share:+.1%}" for part, share in facts.get("parts", {}).items()) or "–",
        str(one["inner_steps"] or "–"),
        str(one["arrival_step"]) if one["inner_steps"] else "–",
        f"{one['steps']:,}",
        f"{one['bits']:.4f}",
        f"{one['seconds']:,.0f}",
        f"{choice['learning_rate']:.4f} / {choice['muon_learning_rate']:.3f}{outer}{' (edge)' * tuned['at_edge']}",
    ]


def row_facts(row: Row) -> dict[str, Any]:
    """What is kept of a row."""
    return {
        "arm": row.arm,
        "published": ARMS[row.arm].published,
        "loss": row.loss,
        "half_width": row.half_width,
        "gap": row.gap,
        "parts": dict(row.parts),
        "tuned": asdict(row.tuned),
        "runs": [asdict(run) for run in row.runs],
    }


def missed(by_cell: Mapping[Cell, Sequence[Row]]) -> list[str]:
    """Bars of the study that do not hold, or are not known: all arms of a cell have to be finished."""
    sentences = []
    centre = next((row for row in by_cell.get(CENTRE, ()) if row.arm == DEFAULT), None)
    if centre is None or centre.gap is None:
        sentences.append(f"{CENTRE.name}: the gap of {DEFAULT} is not known yet")
    elif centre.gap > GAP_BAR:
        sentences.append(f"{CENTRE.name}: {DEFAULT} is {centre.gap:.2%} over its reference, more than {GAP_BAR:.0%}")
    whole = [found for found in by_cell.values() if len(found) == len(ARMS)]
    won = sum(first is not None and first.arm == DEFAULT for first in map(winner, whole))
    if 2 * won <= len(CELLS):
        sentences.append(f"{DEFAULT} is first in {won} of {len(CELLS)} cells, of which {len(whole)} are finished: not in most")
    return sentences
