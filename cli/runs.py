"""`dilocox runs`: the runs that look for machines, and whether this one fits."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dilocox.cli.common import DataOption, HomeOption, HostOption, JsonOption, console, print_json, print_table, set_up_logging
from dilocox.cli.market import PATIENCE, MarketOption, PatienceOption, listed, opened_board
from dilocox.cli.progress import working
from dilocox.node.check import Here, of_machine
from dilocox.node.check_link import Seen, see_run
from dilocox.protocol.crypto import Identity
from dilocox.protocol.findings import Finding, Level
from dilocox.protocol.ids import JoinLink, printable, short
from dilocox.protocol.limits import INVITED
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.corpora import parse_folders
from dilocox.transport.health import base_folder

__all__ = ["announced", "runs"]

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 8


@dataclass(frozen=True)
class Seat:
    """A run that looks for machines, and whether this one fits."""

    link: str
    seen: Seen
    findings: tuple[Finding, ...]

    @property
    def why(self) -> str:
        """Why it does not fit; empty: it does."""
        wrong = [finding for finding in self.findings if finding.level is Level.WRONG]
        return printable(f"{wrong[0].about}: {wrong[0].says}") if wrong else ""


def runs(
    market: MarketOption = None,
    home: HomeOption = None,
    host: HostOption = "127.0.0.1",
    devices: Annotated[int | None, typer.Option(min=1, help="Stage workers (default: one per GPU, or 1).")] = None,
    data: DataOption = None,
    seconds: PatienceOption = PATIENCE,
    as_json: JsonOption = False,
) -> None:
    """List the runs that look for machines, and whether this one fits, as `dilocox check LINK` says it."""
    set_up_logging(verbose=False)
    here = Here(home or base_folder() / "node", host, 0, devices, parse_folders(data or ()), None)
    with working("looking for the market"):
        found = asyncio.run(_seats(market or (), here, seconds))
    if as_json:
        print_json([_told(seat) for seat in found])
        return
    rows = [_row(seat) for seat in sorted(found, key=lambda seat: bool(seat.why))]
    print_table(["run", "model", "rounds", "admits", "pays", "fits"], rows)
    fitting = [seat for seat in found if not seat.why]
    for seat in fitting:
        console.print(f"dilocox node --join '{seat.link}'", highlight=False, soft_wrap=True)
    if not found:
        console.print(f"no run was found in {seconds:g} s", highlight=False)


async def _seats(market: Sequence[str], here: Here, patience: float) -> list[Seat]:
    async with opened_board(market) as board:
        jobs = await listed(board, pb.KIND_JOB, patience)
    turn = asyncio.Semaphore(ASKED_AT_ONCE)

    async def seat(job: Statement[pb.Job]) -> Seat:
        async with turn:
            seen = await see_run(JoinLink.parse(job.body.link), here)
            rest = list(of_machine(seen.manifest, here)) if seen.manifest is not None else []
            return Seat(job.body.link, seen, (*seen.findings, *rest))

    return list(await asyncio.gather(*map(seat, jobs)))


def _row(seat: Seat) -> list[str]:
    manifest = seat.seen.manifest
    if manifest is None:
        return [short(JoinLink.parse(seat.link).run_id.hex()), "", "", "", "", seat.why]
    kinds = f", {' or '.join(manifest.attestation.kinds)}" if manifest.attestation.kinds else ""
    model = manifest.model
    return [
        printable(manifest.run.name),
        f"{model.family} {model.layers}×{model.hidden_size}",
        f"{seat.seen.trained:,} of {manifest.rounds.count:,}",
        f"{manifest.admission.policy}{kinds}",
        "on a chain" if manifest.settlement is not None else "",
        seat.why or "yes",
    ]


def _told(seat: Seat) -> dict[str, Any]:
    manifest = seat.seen.manifest
    findings = [{"level": each.level.value, "about": each.about, "says": each.says, "do": each.do} for each in seat.findings]
    return {
        "link": seat.link,
        "run": manifest.run.name if manifest is not None else None,
        "trained": seat.seen.trained,
        "fits": not seat.why,
        "findings": findings,
    }


async def announced(
    market: Sequence[str], port: int, host: str, identity: Identity, link: "asyncio.Future[JoinLink]", allow: Iterable[str]
) -> None:
    """Say for ever that a run looks for machines, once its link is there. `identity`: its coordinator's; `allow`: whom it admits by
    name."""
    said, invited = str(await link), list(allow)[:INVITED]
    async with opened_board(market, host, identity, port) as board:
        log.info("this run is announced in the market; others begin at %s", board.address)
        await board.announce_forever(identity, pb.KIND_JOB, lambda until: pb.Job(link=said, expires_at=until, invited=invited))
