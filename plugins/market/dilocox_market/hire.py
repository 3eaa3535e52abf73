"""`dilocox market hire RUN.toml [PEER]…`: the available machines for a run, and the admission of chosen ones to it."""

import asyncio
import re
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    JsonOption,
    console,
    print_json,
    print_table,
    read_run_text,
    set_up_logging,
)
from dilocox.cli.progress import working
from dilocox.node.attest.verify import verify_evidence
from dilocox.node.planning.layouts import choose
from dilocox.node.workers.devices import Devices
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import key_of_peer, printable, several
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.attestation import AttestationError, Evidence, check_binding, report_data
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.files import write_atomically
from dilocox_market.listings import MARKET, lines_of, middle_line, nonce_of
from dilocox_market.options import PATIENCE, MarketOption, PatienceOption, listed, opened_board

__all__ = ["Offered", "attested", "hire", "line_of", "with_allowed"]


@dataclass(frozen=True)
class Offered:
    """Offer with its verified parts."""

    peer: str
    body: pb.Offer
    lines: Sequence[Statement[pb.Line]]
    """Bandwidth that others measured."""
    attested: str
    """Kind of its evidence, if valid."""
    lacks: str
    """Reason why the run cannot use the machine; empty: it can."""


def hire(
    run_file: Annotated[
        Path, typer.Argument(help="The run file: it sets the requirements, and lists the peers that are hired.")
    ],
    peers: Annotated[
        list[str] | None, typer.Argument(metavar="[PEER]…", help="Peer ids to hire; none: list the offers.")
    ] = None,
    market: MarketOption = None,
    seconds: PatienceOption = PATIENCE,
    as_json: JsonOption = False,
) -> None:
    """List the machines that are offered to a run. With PEERs, add them to its allow-list, before the run begins. They are paid
    from the pool of its contract: `dilocox settlement contract fund`."""
    text = read_run_text(run_file)
    manifest = Manifest.from_toml(text)
    if peers:
        _admit(run_file, text, peers)
        return
    set_up_logging(verbose=False)
    with working("searching for the market"):
        found = asyncio.run(_offers(market or (), manifest, seconds))
    if as_json:
        print_json([_told_of(each) for each in found])
        return
    rows = [_offer_row(each) for each in sorted(found, key=lambda each: (bool(each.lacks), each.body.price))]
    print_table(["peer", "name", "devices", "memory", "Mbit/s", "hours", "price", "attested", "fits"], rows)
    if not found:
        console.print(f"no offer found in {seconds:g} s", highlight=False)


async def _offers(market: Sequence[str], manifest: Manifest, patience: float) -> list[Offered]:
    async with opened_board(market) as board:
        found = await listed(board, pb.KIND_OFFER, patience)
    return [await asyncio.to_thread(_looked_at, listing, manifest) for listing in found]


def _looked_at(listing: Statement[pb.Offer], manifest: Manifest) -> Offered:
    """Verify an offer's evidence and bandwidth. Blocking."""
    body = listing.body
    machine = Devices(body.devices, body.cuda, body.device_bytes, body.host_bytes)
    return Offered(listing.peer, body, lines_of(listing, time.time()), attested(listing), _lacking(manifest, machine))


def attested(listing: Statement[pb.Offer]) -> str:
    """Return the kind of an offer's evidence, if it is valid for its signer and this offer; otherwise an empty text."""
    body = listing.body
    if not body.HasField("evidence"):
        return ""
    key, nonce = key_of_peer(listing.peer), nonce_of(body.expires_at)
    try:
        check_binding(body.evidence, key, MARKET, nonce)
        evidence = Evidence.from_message(body.evidence.evidence)
        claims = verify_evidence(evidence, int(time.time()))
        bound = claims.report_data == report_data(claims.kind, key, MARKET, nonce)
    except AttestationError:
        return ""
    gpus = f" with {several(len(claims.gpus), 'GPU')}" if claims.gpus else ""
    return f"{claims.kind}{gpus}" if bound else ""


def _lacking(manifest: Manifest, machine: Devices) -> str:
    """Return why a machine alone cannot be a cluster of the run; empty if it can."""
    return next((lack.sentence("it") for lack in choose(manifest, [machine]).lacking), "")


def _offer_row(each: Offered) -> list[str]:
    body = each.body
    memory = body.device_bytes or body.host_bytes
    return [
        each.peer,
        printable(body.name),
        several(body.devices, "GPU" if body.cuda else "CPU worker"),
        f"{memory / 1e9:,.0f} GB" if memory else "",
        line_of(each),
        printable(body.hours) or "always",
        f"{body.price:,}" if body.price else "nothing",
        each.attested,
        each.lacks or "yes",
    ]


def line_of(each: Offered) -> str:
    """Return the bandwidth in Mbit/s, as others measured it, or else as it claims."""
    if each.lines:
        upload, download = middle_line(each.lines)
        return f"{upload / 1e6:,.0f} up, {download / 1e6:,.0f} down, measured by {len(each.lines)}"
    said = [(each.body.upload_bits, "up"), (each.body.download_bits, "down")]
    rates = ", ".join(f"{bits / 1e6:,.0f} {way}" for bits, way in said if bits)
    return f"{rates}, not measured" if rates else ""


def _told_of(each: Offered) -> dict[str, Any]:
    body = each.body
    apart = ("account", "evidence", "lines")
    plain = {field.name: getattr(body, field.name) for field in body.DESCRIPTOR.fields if field.name not in apart}
    upload, download = middle_line(each.lines) if each.lines else (0, 0)
    return {
        "peer": each.peer,
        **plain,
        "measured_upload_bits": upload,
        "measured_download_bits": download,
        "measured_by": [line.peer for line in each.lines],
        "account": body.account.hex(),
        "attested": each.attested,
        "fits": not each.lacks,
        "lacks": each.lacks,
    }


def _admit(run_file: Path, text: str, peers: Sequence[str]) -> None:
    changed, place = with_allowed(text, peers), run_file.resolve()
    manifest = Manifest.from_toml(changed)
    write_atomically(place, changed.encode(), mode=S_IMODE(place.stat().st_mode))
    console.print(
        f"{len(manifest.admission.allow)} peers may take part in {printable(manifest.run.name)}; its id is now "
        f"{manifest.run_id.hex()}",
        highlight=False,
        soft_wrap=True,
    )


def with_allowed(text: str, peers: Iterable[str]) -> str:
    """Return a run file with these peers added to the manifest's allow-list. Raises ConfigError for an invalid peer id, or
    for a file that only a person can edit."""
    for peer in peers:
        try:
            key_of_peer(peer)
        except ValueError as error:
            raise ConfigError(f"{peer} is not a peer id: run `dilocox market hire RUN.toml` to list the offers") from error
    said = tomllib.loads(text)
    admission = said.get("admission", {})
    allow = list(dict.fromkeys([*admission.get("allow", ()), *peers]))
    changed = _with_admission(text, allow)
    try:
        holds = tomllib.loads(changed) == {**said, "admission": {**admission, "policy": "allow-list", "allow": allow}}
    except tomllib.TOMLDecodeError:
        holds = False
    if not holds:
        lines = "".join(f'\n  "{peer}",' for peer in allow)
        raise ConfigError(
            f'cannot edit the admission of this run file: set policy = "allow-list" and allow = [{lines}\n] in it'
        )
    return changed


def _with_admission(text: str, allow: Iterable[str]) -> str:
    """Return a run file's text with the admission added, for the usual format; check the result for any other format."""
    text = text if text.endswith("\n") else f"{text}\n"
    lines = 'policy = "allow-list"\nallow = [\n' + "".join(f'  "{peer}",\n' for peer in allow) + "]\n"
    section = re.search(r"^\[admission\][^\n]*\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
    if section is None:
        return f"{text.rstrip()}\n\n[admission]\n{lines}"
    rest = re.sub(r"^(policy\s*=[^\n]*|allow\s*=\s*\[.*?\][^\n]*)\n", "", section[1], flags=re.M | re.S)
    return text[: section.start(1)] + lines + rest + text[section.end(1) :]
