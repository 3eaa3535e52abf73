"""Command `dilocox market offer`: this machine is for hire, until Ctrl-C."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilocox.cli.common import (
    THIS_MACHINE,
    HomeOption,
    HostOption,
    NameOption,
    console,
    set_up_logging,
)
from dilocox.cli.config import validated
from dilocox.node.attest.attesters import choose_attester
from dilocox.node.attest.kinds import kind_names
from dilocox.node.workers.devices import this_machine
from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError
from dilocox.protocol.ids import parse_account
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.attestation import SIMULATED, AttestationError, report_data
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.limits.rate_limits import bits_per_second
from dilocox.transport.limits.schedule import Hours
from dilocox.transport.process.health import base_folder
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.data_directory import load_identity
from dilocox_market.listings import MARKET, manifest_of, nonce_of
from dilocox_market.options import MarketOption, MarketPortOption, listed, opened_board

if TYPE_CHECKING:
    from dilocox_market.board import Board

__all__ = ["invitations", "offer", "offered", "prover"]

log = logging.getLogger(__name__)

INVITED_SECONDS = 60.0
"""Seconds between two checks for a run that asks for this machine by name."""
MEASURED_SECONDS, UNMEASURED_SECONDS = 8 * 3600.0, 300.0
"""Seconds between two measurements of its bandwidth; the second after one without a peer."""
MOST = (1 << 64) - 1
"""Largest number that the wire allows."""
UP_SECONDS = 1.0
"""Seconds between two checks for our node while it starts."""

Made = Callable[[int, Sequence[pb.Envelope]], pb.Offer]
"""An offer until that Unix second, with the bandwidth that others measured."""


def offer(
    market: MarketOption = None,
    market_port: MarketPortOption = None,
    home: HomeOption = None,
    name: NameOption = THIS_MACHINE,
    host: HostOption = "127.0.0.1",
    devices: Annotated[
        int | None, typer.Option(min=1, max=limits.HOSTS, help="Stage workers (default: one per GPU, or 1).")
    ] = None,
    upload: Annotated[
        str | None, typer.Option(metavar="RATE", help="Upload bandwidth of this machine, such as 100mbit.")
    ] = None,
    download: Annotated[str | None, typer.Option(metavar="RATE", help="Download bandwidth of this machine.")] = None,
    hours: Annotated[
        str | None,
        typer.Option(metavar="HOURS", callback=validated(Hours.parse), help="As in `dilocox node` (default: always)."),
    ] = None,
    price: Annotated[
        int, typer.Option(min=0, max=MOST, help="Price of a million merit, in the smallest unit of the run's chain.")
    ] = 0,
    account: Annotated[
        str | None, typer.Option(metavar="0x…", callback=validated(parse_account), help="EVM account to be paid.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Let up to three other peers measure this machine's bandwidth, three times a day; each sends and "
            "receives at most 11 MiB."
        ),
    ] = True,
    attest: Annotated[bool, typer.Option("--attest", help="With evidence of this machine's hardware.")] = False,
    simulated_measurement: Annotated[Path | None, typer.Option(help="As in `dilocox node` (testnets).")] = None,
) -> None:
    """Offer this machine until Ctrl-C, and report when a run requests it."""
    set_up_logging(verbose=False)
    folder = home or base_folder() / "node"
    identity, machine = load_identity(folder / "identity.key"), this_machine(devices)
    proves = prover(identity, simulated_measurement) if attest else None

    def made(until: int, lines: Sequence[pb.Envelope]) -> pb.Offer:
        said = pb.Offer(
            name=name,
            expires_at=until,
            devices=machine.devices,
            cuda=machine.cuda,
            device_bytes=machine.device_bytes,
            host_bytes=machine.host_bytes,
            upload_bits=int(bits_per_second(upload, "--upload")) if upload is not None else 0,
            download_bits=int(bits_per_second(download, "--download")) if download is not None else 0,
            hours=hours or "",
            price=price,
            account=parse_account(account) if account is not None else b"",
            lines=lines,
        )
        if proves is not None:
            said.evidence.CopyFrom(proves(nonce_of(until)))
        return said

    made(0, ())  # report its faults before it is offered
    console.print(f"{identity.peer} is offered until Ctrl-C", highlight=False)
    asyncio.run(offered(market or (), market_port or 0, host, identity, folder, made, measure))


def prover(identity: Identity, simulated: Path | None) -> Callable[[bytes], pb.BoundEvidence]:
    """Return a function that makes evidence. Raises LocalError if this machine cannot attest."""
    kinds = tuple(kind for kind in kind_names() if kind != SIMULATED or simulated is not None)
    try:
        kind, attester = choose_attester(kinds, "", simulated, None)
    except AttestationError as error:
        raise LocalError(f"--attest: {error.cause}") from error

    def prove(nonce: bytes) -> pb.BoundEvidence:
        try:
            evidence = attester(report_data(kind, identity.key, MARKET, nonce))
        except AttestationError as error:
            raise LocalError(f"--attest: {error.cause}") from error
        return pb.BoundEvidence(key=identity.key, run=MARKET, nonce=nonce, evidence=evidence.message())

    return prove


async def offered(
    market: Sequence[str], port: int, host: str, identity: Identity, home: Path, made: Made, measure: bool
) -> None:
    """Offer the machine for ever. `home`: folder of the identity; `measure`: whether others are to measure its bandwidth."""
    lines: list[pb.Envelope] = []
    measured = asyncio.Event()

    def now(until: int) -> pb.Offer:
        return made(until, lines)

    async with opened_board(market, host, identity, port, home) as board:
        log.info("this machine is offered in the market; other peers can join it at %s", board.address)
        tasks = Tasks()
        tasks.start(board.announce_forever(identity, pb.KIND_OFFER, now, measured), "announce")
        if measure:
            tasks.start(_keep_measured(board, lines, measured), "measure")
        tasks.start(_say_invitations(board, identity.peer), "invitations")
        try:
            await tasks.wait()
        finally:
            await tasks.close()


async def _keep_measured(board: "Board", lines: list[pb.Envelope], measured: asyncio.Event) -> None:
    """Measure repeatedly. `lines`: the announced measurements; `measured`: set when they changed. A measurement stays
    until the next one."""
    while True:
        try:
            found = await board.measured()
        except LocalError as error:  # our node is not up yet
            log.debug("%s", error)
            await asyncio.sleep(UP_SECONDS)
            continue
        if found:
            log.info("%d peers measured this machine's bandwidth", len(found))
            lines[:] = found
            measured.set()
        await asyncio.sleep(MEASURED_SECONDS if found else UNMEASURED_SECONDS)


async def _say_invitations(board: "Board", me: str) -> None:
    told = set[str]()
    while True:
        for link in invitations(await listed(board, pb.KIND_JOB, INVITED_SECONDS), me) - told:
            told.add(link)
            console.print(f"a run requests this machine: dilocox check '{link}'", highlight=False, soft_wrap=True)
        await asyncio.sleep(INVITED_SECONDS)


def invitations(jobs: Iterable[Statement[pb.Job]], me: str) -> set[str]:
    """Return the links of the runs that ask for a peer by name."""
    admissions = ((job.body.link, manifest_of(job.body, job.peer).admission) for job in jobs)
    return {link for link, admission in admissions if admission.policy == "allow-list" and me in admission.allow}
