"""`dilocox market runs`: the runs that look for machines, and whether this one fits."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    DEVICES,
    DataOption,
    HomeOption,
    HostOption,
    JsonOption,
    console,
    print_json,
    print_table,
    set_up_logging,
)
from dilocox.cli.progress import working
from dilocox.node.preflight.machine import Here, of_machine, of_part
from dilocox.protocol.ids import printable
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.corpus_store import parse_folders
from dilocox_market.listings import manifest_of
from dilocox_market.options import PATIENCE, MarketOption, PatienceOption, listed, opened_board

__all__ = ["runs"]


@dataclass(frozen=True)
class Seat:
    """A run that looks for machines, and whether this one fits."""

    link: str
    manifest: Manifest
    findings: tuple[Finding, ...]

    @property
    def why(self) -> str:
        """Return why it does not fit; empty: it does."""
        wrong = [finding for finding in self.findings if finding.level is Level.WRONG]
        return printable(f"{wrong[0].about}: {wrong[0].says}") if wrong else ""


def runs(
    market: MarketOption = None,
    home: HomeOption = None,
    host: HostOption = "127.0.0.1",
    devices: Annotated[int | None, typer.Option(**DEVICES, help="Stage workers (default: one per GPU, or 1).")] = None,
    data: DataOption = None,
    seconds: PatienceOption = PATIENCE,
    as_json: JsonOption = False,
) -> None:
    """List the runs that need machines, and whether this one fits, by their signed manifests. This command opens no connection
    to a run: `dilocox check LINK` also asks a run's coordinator."""
    set_up_logging(verbose=False)
    here = Here(home or base_folder() / "node", host, 0, devices, parse_folders(data or ()), None)
    with working("searching for the market") as bar:
        jobs = asyncio.run(_jobs(market or (), seconds))
        found = [_seat(job, here) for job in bar.each("checking this machine", jobs, len(jobs))]
    if as_json:
        print_json([_seat_view(seat) for seat in found])
        return
    rows = [_row(seat) for seat in sorted(found, key=lambda seat: bool(seat.why))]
    print_table(["run", "model", "rounds", "admits", "pays", "fits"], rows)
    for seat in found:
        if not seat.why:
            console.print(f"dilocox node --join '{seat.link}'", highlight=False, soft_wrap=True)
    if not found:
        console.print(f"no run found in {seconds:g} s", highlight=False)


async def _jobs(market: Sequence[str], patience: float) -> list[Statement[pb.Job]]:
    async with opened_board(market) as board:
        return await listed(board, pb.KIND_JOB, patience)


def _seat(job: Statement[pb.Job], here: Here) -> Seat:
    manifest = manifest_of(job.body, job.peer)
    return Seat(job.body.link, manifest, (*of_part(manifest, here), *of_machine(manifest, here)))


def _row(seat: Seat) -> list[str]:
    manifest, model = seat.manifest, seat.manifest.model
    kinds = f", {' or '.join(manifest.attestation.kinds)}" if manifest.attestation.kinds else ""
    return [
        printable(manifest.run.name),
        f"{model.config.model_type} {model.config.num_hidden_layers}×{model.config.hidden_size}",
        f"{manifest.rounds.count:,}",
        f"{manifest.admission.policy}{kinds}",
        "on a chain" if manifest.settlement is not None else "",
        seat.why or "yes",
    ]


def _seat_view(seat: Seat) -> dict[str, Any]:
    findings = [{"level": each.level.value, "about": each.about, "says": each.says, "do": each.do} for each in seat.findings]
    return {"link": seat.link, "run": seat.manifest.run.name, "fits": not seat.why, "findings": findings}
