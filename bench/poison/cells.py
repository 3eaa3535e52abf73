"""One training run of the comparison, in a separate process, and the store of its result."""

import json
import math
import multiprocessing
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from bench.poison.design import ARRIVAL, Cell
from bench.report import RESULTS
from dilocox.transport.store.files import write_atomically

__all__ = ["CELLS", "KEPT", "found", "kept", "loss_of", "run_all", "summary", "train"]

CELLS = RESULTS / "poison"
KEPT = Path(__file__).parents[2] / "docs" / "results" / "poison-runs.json"
"""Results of earlier runs, of other machines too, as `python -m bench.docs` writes them."""


def train(cell: Cell) -> dict[str, Any]:
    """Train; return the held-out losses round by round, and the voters' rejections and scores."""
    from bench.attacks import ATTACKS, Adversary
    from bench.lab import Lab, process_group_of_one

    process_group_of_one()
    attack = next(attack for attack in ATTACKS if attack.name == cell.attack)
    hostile = Adversary(range(cell.clusters - cell.hostile, cell.clusters), attack, cell.seed)
    run = cell.manifest()
    lab = Lab(
        run,
        cell.clusters,
        ARRIVAL,
        evaluate_every=max(1, run.rounds.count // 4),
        data=cell.text.folder,
        hostile=hostile,
        looks_for_bias=cell.defended.looks_for_bias,
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


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored part of a result: of `measured`, the honest votes on honest contributions."""
    fair = [(gain, cosine, harm) for _, by, of, gain, cosine, harm in result["measured"] if not by and not of]
    said = {
        "voices": len(fair),
        "against": sum(harm for _, _, harm in fair),
        "worse": sum(gain < 0 for gain, _, _ in fair),
        "cosine": min((cosine for _, cosine, _ in fair), default=None),
    }
    return {**{name: result[name] for name in result if name != "measured"}, "refused": len(result["refused"]), "fair": said}


def found(cell: Cell) -> dict[str, Any] | None:
    """Return the result of a cell, if it was run."""
    path = CELLS / f"{cell.key}.json"
    return json.loads(path.read_text()) if path.exists() else kept().get(cell.key)


@cache
def kept() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return known


def loss_of(cell: Cell) -> float:
    """Return the loss at the end of the run."""
    result = found(cell)
    assert result is not None
    return float(result["losses"][-1])


def run_all(cells: Iterable[Cell], processes: int, until: float = math.inf, folder: Path = CELLS) -> None:
    """Run the cells without a result; none starts after `until`, by the monotonic clock."""
    waiting = [cell for cell in cells if found(cell) is None]
    if not waiting:
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        ran = (cell for cell in pool.imap_unordered(_run, [(cell, until, folder) for cell in waiting]) if cell is not None)
        for done, cell in enumerate(ran, 1):
            hostile = f"{cell.hostile} of {cell.clusters}, {cell.codec}, seed {cell.seed}"
            print(f"{done}/{len(waiting)}  {loss_of(cell):8.3f}  {cell.attack} against {cell.defence}: {hostile}", flush=True)


def _run(job: tuple[Cell, float, Path]) -> Cell | None:
    cell, until, folder = job
    if time.monotonic() >= until:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{cell.key}.json", json.dumps(summary(train(cell))).encode())
    return cell
