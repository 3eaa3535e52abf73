"""`dilocox attest PEER | verify`: challenge a peer through the running daemon; verify any evidence on disk."""

import base64
import binascii
import json
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from dilocox.cli.common import (
    AskOption,
    JsonOption,
    api_call,
    console,
    fail,
    print_json,
    print_labelled,
    read_run,
)
from dilocox.cli.exit_codes import Exit
from dilocox.node.attest import simulated as simulated_kind
from dilocox.node.attest.attesters import choose_attester
from dilocox.node.attest.kinds import MachineKind, Terms, find_kind, kind_names, missing
from dilocox.node.attest.verify import verify_alone
from dilocox.protocol.wire.attestation import (
    REPORT_DATA_BYTES,
    SIMULATED,
    AttestationError,
    Claims,
    Code,
    Evidence,
    GpuClaims,
    Policy,
    Verdict,
    deny_unexpected,
)
from dilocox.transport.store.files import NAMED_BYTES, read_at_most

__all__ = ["app"]

PEER, SELF = "peer", "self"


class _PeerByDefault(TyperGroup):
    """`attest PEER` is `attest peer PEER`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = [PEER, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_PeerByDefault,
    no_args_is_help=True,
    help="Show the hardware evidence of a peer, or of this machine: `attest PEER`, `attest self`; `attest verify` for a file.",
)


@app.command(PEER)
def peer(
    peer: Annotated[str, typer.Argument(help="Peer id, as `dilocox peers` shows it; `self`: this machine.")],
    home: AskOption = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="With self: evidence of the simulated kind, on any hardware.")
    ] = False,
    simulated_measurement: Annotated[Path | None, typer.Option(help="With self: as in `dilocox node`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Challenge a peer, and print what its evidence proves to this node. With `self`: print the kind and measurement of this
    machine for a run's policy, unverified."""
    if peer == SELF:
        value = _of_this_machine(simulated, simulated_measurement)
    elif simulated or simulated_measurement is not None:
        fail("use --simulated and --simulated-measurement only with `attest self`", Exit.USAGE, "remove them")
    else:
        value = api_call(home, f"/v1/attest/{peer}", method="POST")
    if as_json:
        print_json(value)
    else:
        _print_facts(value)
    if not value["ok"]:
        raise typer.Exit(Exit.UNEXPECTED)


def _of_this_machine(simulated: bool, simulated_measurement: Path | None) -> dict[str, Any]:
    """Return what this machine would show. It needs no certificates."""
    kinds = (SIMULATED,) if simulated else tuple(name for name in kind_names() if isinstance(find_kind(name), MachineKind))
    try:
        kind, attester = choose_attester(kinds, metadata.version("dilocox"), simulated_measurement, None)
        evidence = attester(bytes(REPORT_DATA_BYTES))
        measured = measurement_of(evidence)
    except AttestationError as error:
        fail(f"{error.code}: {error.cause}")
    return {"ok": True, "kind": kind, "measurement": ":".join(measured), "gpus": len(evidence.gpu)}


@deny_unexpected
def measurement_of(evidence: Evidence) -> tuple[str, ...]:
    """Read off the evidence without checking it."""
    kind = find_kind(evidence.kind)
    return kind.measurement(evidence) if isinstance(kind, MachineKind) else simulated_kind.verify(evidence, 0).measurement


@app.command("verify")
def verify(
    kind: Annotated[str, typer.Option(help="simulated, or a kind of a plugin: dilocox-tee has tdx, sev-snp and nvidia.")],
    blob: Annotated[Path, typer.Option(help="Quote or report: raw, hexadecimal or base64.")],
    certs: Annotated[list[Path] | None, typer.Option(help="PEM or DER certificates, any order.")] = None,
    collateral: Annotated[Path | None, typer.Option(help="TDX: the collateral's JSON.")] = None,
    nonce: Annotated[str | None, typer.Option(help="NVIDIA: the nonce that the report must contain, hexadecimal.")] = None,
    now: Annotated[int | None, typer.Option(help="Verify as of this Unix time (default: now).")] = None,
    policy: Annotated[Path | None, typer.Option(help="Also appraise with the [attestation] of this run file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify evidence on disk, offline: claims and exit 0, or the reject code and exit 1."""
    moment = int(time.time()) if now is None else now
    settings = read_run(policy).attestation if policy else None
    if lacking := missing([kind]):
        fail(f"--kind {kind}", Exit.USAGE, lacking)
    facts: dict[str, Any]
    try:
        parts = tuple(_read(path) for path in certs or ())
        evidence = Evidence(kind, decode_blob(_read(blob)), parts, _read(collateral) if collateral else b"")
        statuses = settings.tcb_statuses if settings else ("UpToDate",)
        claims = verify_alone(evidence, moment, Terms(statuses, _hexadecimal(nonce) if nonce else None))
        facts = {"ok": True, "code": Code.OK, "kind": kind, **_plain(claims)}
        if settings is not None:
            facts.update(_appraise(settings, claims, moment))
    except AttestationError as error:
        facts = {"ok": False, "kind": kind, "code": error.code, "reason": error.cause}
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)
    if not facts["ok"]:
        raise typer.Exit(Exit.UNEXPECTED)


def _appraise(settings: Any, claims: Claims | GpuClaims, now: int) -> dict[str, Any]:
    """By the policy; the report data is taken as it is: a file on disk answers nobody's challenge."""
    if isinstance(claims, GpuClaims):
        return asdict(Verdict(False, Code.KIND, "GPU evidence alone never admits: pass evidence of the CPU too", 0))
    return asdict(Policy(settings).appraise(claims, claims.report_data, now))


def _read(path: Path) -> bytes:
    try:
        return read_at_most(path, NAMED_BYTES)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}", Exit.USAGE)


def _hexadecimal(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        fail(f"--nonce {text}", Exit.USAGE, "pass 64 hexadecimal digits")


def decode_blob(raw: bytes) -> bytes:
    """Raw, hexadecimal or base64; quotes and reports are never plain text, so the three cannot be confused."""
    try:
        text = b"".join(raw.split()).decode("ascii")
    except UnicodeDecodeError:
        return raw
    try:
        return bytes.fromhex(text)
    except ValueError:
        pass
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return raw


def _plain(claims: Claims | GpuClaims) -> dict[str, Any]:
    """Claims as JSON values: bytes in hexadecimal."""
    return json.loads(json.dumps(asdict(claims), default=lambda value: value.hex()))


def _print_facts(facts: dict[str, Any]) -> None:
    if not facts["ok"]:
        console.print(Text.assemble(("REJECT", "bold red"), f" {facts['code']}: {facts['reason']}"), soft_wrap=True)
    for key, value in facts.items():
        if value in ("", [], {}, None) or key in ("ok", "code", "reason"):
            continue
        if key == "valid_until":
            value = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(value, 253402300799)))
        elif isinstance(value, dict):
            value = "  ".join(f"{name}={item}" for name, item in list(value.items())[:8])
        elif isinstance(value, list):
            value = "\n".join(f"{'':15}{item}" for item in value).strip()
        if facts.get("kind") == "simulated" and key == "kind":
            value = Text.assemble(("simulated", "bold yellow"), ": anybody can make this evidence")
        print_labelled(key, value if isinstance(value, Text) else str(value), 15)
