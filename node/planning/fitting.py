"""Fit of a run to machines: the settings that `dilocox init --like` writes. Arithmetic only."""

import math
from dataclasses import dataclass
from typing import Any

from dilocox.node.planning.advice import Advice, advise, offers_of, settings_of
from dilocox.node.planning.layouts import choose
from dilocox.node.planning.plan import FIXED_SECONDS, Inside, Setting, exchanging, inside, step_of
from dilocox.node.planning.step_model import Kind
from dilocox.node.planning.time_model import Line, Method, Site
from dilocox.node.workers.devices import Devices
from dilocox.protocol.run.manifest import Compression, Manifest
from dilocox.protocol.run.tensors import trained_count

__all__ = ["Fit", "fit"]

ALIKE = 1.02
"""Steps whose estimates differ by no more are alike: of them, fewer stages are taken."""
SLOWER = 1.5
"""Rounds in which a cluster may end its phase, over the estimate: slower machines still count."""


@dataclass(frozen=True)
class Fit:
    """A run on machines, with the advice for it."""

    cluster: Inside
    advice: Advice
    settings: dict[str, dict[str, Any]]
    """Values of the run file by section; [compression] is whole."""


def fit(manifest: Manifest, machines: Setting, kind: Kind, line: float) -> Fit:
    """Return the settings of a run on clusters of such machines, with `line` bits per second between them: stages, codec,
    inner steps and deadlines. The rest of the run stays."""
    run = _with_stages(manifest, machines, kind)
    cluster = inside(run, [machines.devices] * machines.boxes, kind)
    site = Site(
        trained_count(run.model),
        step_of(run, cluster, kind, line, None),
        machines.clusters * run.tokens_per_step,
        machines.clusters,
        Line.both_ways(line),
        machines.boxes,
        FIXED_SECONDS,
    )

    def taking(name: str, compression: Compression) -> Method:
        return exchanging(run, cluster, name, compression)

    advice = advise(site, offers_of(run, taking), run)
    settings = settings_of(advice, run)
    settings["model"] = {"stages": run.model.stages}
    settings["rounds"] |= _deadlines(run, advice)
    return Fit(cluster, advice, settings)


def _with_stages(manifest: Manifest, machines: Setting, kind: Kind) -> Manifest:
    """Return the run with the number of stages whose placement is the fastest: one if the model fits on a device
    of a single host. Of equal ones, the fewest."""
    hosts = [Devices(machines.devices, cuda=True, device_bytes=int(kind.memory))] * machines.boxes
    units = manifest.model.config.num_hidden_layers + (2 if manifest.model.lora is None else 0)
    found = []
    for stages in range(1, min(units, machines.devices * machines.boxes) + 1):
        run = manifest.model_copy(update={"model": manifest.model.model_copy(update={"stages": stages})})
        choice = choose(run, hosts, kind)
        is_cut = not choice.best.is_uncut or bool(choice.idle)
        found.append(((bool(choice.lacking), is_cut, choice.best.seconds), run))
    (lacking, is_cut, seconds), _ = min(found, key=lambda each: each[0])
    return next(run for rank, run in found if rank[:2] == (lacking, is_cut) and rank[2] <= ALIKE * seconds)


def _deadlines(run: Manifest, advice: Advice) -> dict[str, int]:
    """Return the deadlines in whole minutes: the run's, or longer ones for its longest rounds."""
    rounds, found = run.rounds, advice.estimate
    minutes = 60 * math.ceil(SLOWER * max(found.round.seconds, found.exchange_seconds) / 60)
    votes = 60 * math.ceil(SLOWER * found.exchange_seconds / 60)
    return {
        "deadline_seconds": max(math.ceil(rounds.deadline_seconds), minutes),
        "vote_seconds": max(math.ceil(rounds.vote_seconds), votes),
    }
