"""Output of the study, and its missed bars."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.report import table
from bench.study.analysis import Row, winner
from bench.study.design import ARMS, CELLS, CENTRE, INNERS, Cell
from dilocox.node.planning.advice import ALIKE, gaps_of

__all__ = [
    "COLUMNS",
    "DENSE",
    "DENSE_LONG",
    "LOWEST",
    "SPARSE",
    "cells",
    "default",
    "lowest",
    "missed",
    "row_facts",
    "show",
]

GAP_BAR = 0.03
"""Largest gap between the presets' arm and its reference, in the centre."""
DENSE, DENSE_LONG, SPARSE = (
    "muon 0.9 | int2 | rebase, whole lead",
    "muon, slow | int2 | rebase, whole lead",
    "muon | top 540 | rebase",
)
"""Arms of the presets, chosen from these results (docs/results.md)."""
BY_MOMENTUM = {INNERS[ARMS[arm].inner]["muon_momentum"]: arm for arm in (DENSE, DENSE_LONG)}
"""Dense arms by Muon's momentum."""


def default(cell: Cell) -> str:
    """Return the arm of a preset with equally long runs, on a link with as many bits: the choice of `dilocox plan`, if
    dense payloads make the longer rounds."""
    gaps = gaps_of(cell.steps)
    dense = gaps.gap("int2", cell.bits)
    if dense > ALIKE + min(gaps.gap(each, cell.bits) for each in gaps.by_codec):
        return SPARSE
    return BY_MOMENTUM[gaps.nearest("int2", cell.bits).muon_momentum]


COLUMNS = [
    "arm",
    "known as",
    "test loss",
    "± 95%",
    "gap",
    "± 95%",
    "over the lowest",
    "of which",
    "H",
    "arrives at",
    "steps",
    "bit",
    "clock",
    "tuned",
    "on",
]


def show(found: Sequence[Row]) -> None:
    table(COLUMNS, [cells(row_facts(row)) for row in found])


def cells(facts: Mapping[str, Any]) -> list[str]:
    """Return a row as printed and as on the page."""
    one, tuned = facts["runs"][0], facts["tuned"]
    choice = tuned["choice"]
    outer = f", outer {choice['steady_rate']:.2f} at momentum {choice['momentum']:g}" if one["inner_steps"] else ""
    return [
        facts["arm"],
        facts["published"] or "–",
        f"{facts['loss']:.4f}",
        f"{facts['half_width']:.4f}",
        "–" if facts["gap"] is None else f"{facts['gap']:+.1%}",
        "–" if not facts["gap"] else f"{facts['gap_half_width']:.1%}",
        "–" if not facts["behind"] else f"{facts['behind']:+.1%} ± {facts['behind_half_width']:.1%}",
        ", ".join(f"{part or 'late'} {share:+.1%}" for part, share in facts.get("parts", {}).items()) or "–",
        str(one["inner_steps"] or "–"),
        str(one["arrival_step"]) if one["inner_steps"] else "–",
        f"{one['steps']:,}",
        f"{one['bits']:.4f}",
        f"{one['seconds']:,.0f}",
        f"{choice['learning_rate']:.4f} / {choice['muon_learning_rate']:.3f}{outer}{' (edge)' * tuned['at_edge']}",
        " ".join(sorted({run.get("device", "cpu") for run in facts["runs"]})),
    ]


LOWEST = ["cell", "lowest", "gap", "next", "over the lowest", "of", "one cluster alone", "presets"]


def lowest(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the arm with the lowest loss in each cell with a finished arm with rounds; `found`: stored cells, rows by
    loss."""
    told = []
    for cell in found:
        rows = [row for row in cell["rows"] if ARMS[row["arm"]].has_rounds]
        if not rows:
            continue
        first, *others = rows
        alone = next((row for row in cell["rows"] if ARMS[row["arm"]].is_alone), None)
        told.append(
            [
                cell["name"],
                first["arm"],
                "–" if first["gap"] is None else f"{first['gap']:+.1%} ± {first['gap_half_width']:.1%}",
                others[0]["arm"] if others else "–",
                f"{others[0]['behind']:+.1%} ± {others[0]['behind_half_width']:.1%}" if others else "–",
                str(len(rows)),
                "–" if alone is None else f"{alone['loss'] / first['loss'] - 1:+.1%}",
                "take it" if default(Cell(**cell["cell"])) == first["arm"] else "do not",
            ]
        )
    return told


def row_facts(row: Row) -> dict[str, Any]:
    """Return the stored values of a row."""
    return {
        "arm": row.arm,
        "published": ARMS[row.arm].published,
        "loss": row.loss,
        "half_width": row.half_width,
        "gap": row.gap,
        "gap_half_width": row.gap_half_width,
        "behind": row.behind,
        "behind_half_width": row.behind_half_width,
        "parts": dict(row.parts),
        "tuned": asdict(row.tuned),
        "runs": [asdict(run) for run in row.runs],
    }


def missed(by_cell: Mapping[Cell, Sequence[Row]]) -> list[str]:
    """Return the missed or unknown bars of the study: all arms of a cell have to be finished."""
    sentences = []
    arm = default(CENTRE)
    centre = next((row for row in by_cell.get(CENTRE, ()) if row.arm == arm), None)
    if centre is None or centre.gap is None:
        sentences.append(f"{CENTRE.name}: the gap of {arm} is not known yet")
    elif centre.gap > GAP_BAR:
        sentences.append(f"{CENTRE.name}: {arm} is {centre.gap:.2%} over its reference, more than {GAP_BAR:.0%}")
    whole = {cell: found for cell, found in by_cell.items() if len(found) == len(ARMS)}
    won = sum((first := winner(found)) is not None and first.arm == default(cell) for cell, found in whole.items())
    if 2 * won <= len(CELLS):
        of_cells = f"{won} of {len(CELLS)} cells, of which {len(whole)} are finished"
        sentences.append(f"what presets take is first in {of_cells}: not in most")
    return sentences
