"""`dilocox check [RUN.toml|LINK]`: what would go wrong, before minutes are lost on it."""

import asyncio
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dilocox.cli.common import (
    DEVICES,
    NODE_PORTS,
    DataOption,
    HomeOption,
    HostOption,
    JsonOption,
    PortOption,
    beside,
    console,
    print_json,
    read_link,
    read_run_text,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.options import PrivateOptions, grouped
from dilocox.cli.progress import Working, working
from dilocox.cli.run.coordinator import data_to_serve, weights_to_serve
from dilocox.cli.run.seed_state import compute_with_bar
from dilocox.node.preflight.machine import Here, Role, of_machine, of_own_data, of_part
from dilocox.node.preflight.network import see_run
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import printable
from dilocox.protocol.run.manifest import Manifest, RunFileError
from dilocox.protocol.run.run_lint import Finding, Level, beginning, initial_state, of_run
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in, parse_folders
from dilocox.transport.store.data_directory import load_identity

__all__ = ["check"]

MARKS = {Level.FINE: ("ok", "green"), Level.ODD: ("odd", "yellow"), Level.WRONG: ("wrong", "bold red")}
FOLDERS = {Role.NODE: "node", Role.RELAY: "relay", Role.ARCHIVE: "archive"}
"""Default folder by role, without --home."""
SAID = ("COMMANDLINE", "ENVIRONMENT")
"""Sources of an option that a person set, as click names them."""
EXAMPLES = "llama-10m"
"""Preset that supplies the example beside a wrong value."""


@grouped
def check(
    context: typer.Context,
    own: PrivateOptions,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN.toml|LINK]", help="A run file, a join link, or @FILE with one.")
    ] = None,
    role: Annotated[
        Role, typer.Option("--as", help="Role of this machine: check what `dilocox node`, `relay` or `archive` needs.")
    ] = Role.NODE,
    home: HomeOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    devices: Annotated[int | None, typer.Option(**DEVICES, help="Stage workers (default: one per GPU, or 1).")] = None,
    data: DataOption = None,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="As in `dilocox coordinator`.")] = None,
    cluster_interface: Annotated[str | None, typer.Option(help="As in `dilocox node`.")] = None,
    accept_wear: Annotated[
        bool, typer.Option("--accept-wear", help="Confirm that this disk may wear out within months.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run and this machine before a start: all findings, then the verdict. Exits with 5 after an error."""
    here = replace(_here(role, own, home, host, port, devices, data, cluster_interface), accepts_wear=accept_wear)
    found = [_versions()]
    if run is None:
        say(found, as_json, "pass a run file or a join link to check whether this machine is enough for a run")
    elif run.startswith(("dilocox://", "@")):
        with working("asking the coordinator, and whether it can reach this machine") as bar:
            seen = asyncio.run(see_run(read_link(run), here))
            found += seen.findings
            if seen.manifest is not None:
                bar.begin("checking this machine and its data")
                found += [beginning(seen.manifest), *of_run(seen.manifest), *of_machine(seen.manifest, here)]
                found += of_own_data(seen.manifest, here, seen.trained) if role is Role.NODE else ()
        say(found, as_json, f"join with: {_command(context, role, f'--join {shlex.quote(run)}')}")
    else:
        path = Path(run)
        with working("checking the run, this machine and its data") as bar:
            found += _of_file(path, here, weights, bar)
        if role is Role.NODE:
            say(found, as_json, f"serve it with: {_command(context, 'coordinator', shlex.quote(str(path)))}")
        else:
            say(found, as_json, f"once a coordinator serves it: {_command(context, role, '--join LINK')}")


def _command(context: typer.Context, verb: str, words: str) -> str:
    """Return a command with the options of this one that it also knows. A coordinator has its own folder and port."""
    root: Any = context.find_root().command
    takes = {flag for option in root.commands[verb].params for flag in option.opts}
    takes -= {"--home", "--port"} if verb == "coordinator" else set()
    told = []
    for option in context.command.params:
        name = option.name or ""
        if option.opts[0] in takes and (source := context.get_parameter_source(name)) is not None and source.name in SAID:
            said = context.params[name]
            told += [
                f"{option.opts[0]} {shlex.quote(str(each))}" for each in (said if isinstance(said, list | tuple) else [said])
            ]
    where = ["--archive URL"] if verb == Role.ARCHIVE else []
    where += ["--cluster-boxes N"] if any(each.startswith("--cluster-interface ") for each in told) else []
    return " ".join([f"dilocox {verb} {words}", *told, *where])


def _here(
    role: Role,
    own: PrivateOptions,
    home: Path | None,
    host: str,
    port: int | None,
    devices: int | None,
    data: list[str] | None,
    interface: str | None,
) -> Here:
    """Raises ConfigError where the verb itself would."""
    private = own.settings(devices, several_boxes=interface is not None)
    if role is not Role.NODE and (devices is not None or interface is not None or private["private"] is not None):
        raise ConfigError(f"--devices, --cluster-interface and --private are for a node: --as {role} does not train")
    devices = 1 if private.get("budget") is not None else devices
    folder = home or base_folder() / FOLDERS[role]
    usual = NODE_PORTS.grpc if port is None and role is Role.NODE else 0
    return Here(folder, host, port or 0, devices, parse_folders(data or ()), interface, **private, role=role, usual_port=usual)


def say(found: Sequence[Finding], as_json: bool, next: str) -> None:
    """All findings, then the verdict; exits with 5 where something is wrong."""
    found = [replace(one, about=printable(one.about), says=printable(one.says), do=printable(one.do)) for one in found]
    wrong = [finding for finding in found if finding.level is Level.WRONG]
    if as_json:
        print_json({"findings": [{**asdict(one), "level": one.level.value} for one in found], "fine": not wrong})
    else:
        for finding in found:
            mark, style = MARKS[finding.level]
            console.print(Text.assemble((f"{mark:<6}", style), (finding.about, "bold"), f"  {finding.says}"), soft_wrap=True)
            if finding.do:
                console.print(f"        help  {finding.do}", highlight=False, soft_wrap=True)
        odd = sum(finding.level is Level.ODD for finding in found)
        verdict = f"{len(wrong)} errors, {odd} warnings" if wrong or odd else "no errors"
        console.print(f"{verdict}; {'correct the errors first' if wrong else next}", highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(Exit.FAILED)


def _versions() -> Finding:
    parts = [f"{name} {metadata.version(name)}" for name in ("dilocox", "torch", "grpcio", "hivemind")]
    return Finding(Level.FINE, "versions", f"{', '.join(parts)}, Python {sys.version.split()[0]}")


def _of_file(path: Path, here: Here, weights: Path | None, bar: Working) -> Iterator[Finding]:
    """Yield the findings of a run file, on the machine that would serve it."""
    text = read_run_text(path)
    try:
        manifest = Manifest.from_toml(text)
    except RunFileError as error:
        yield from (_fault(text, *fault) for fault in error.faults)
        return
    yield Finding(Level.FINE, str(path), f"run {manifest.run.name}, id {manifest.run_id.hex()}")
    yield beginning(manifest)
    yield from of_run(manifest)
    yield from _served(manifest, path, here, weights) if here.role is Role.NODE else of_part(manifest, here)
    of_here = list(of_machine(manifest, here))
    yield from of_here
    if manifest.model.seed_state is not None:
        if any(finding.level is Level.WRONG for finding in of_here):
            says = "is not compared: this machine has too little memory for the model"
            yield Finding(Level.ODD, "model.seed_state", says, "check the run file on a machine with more memory")
        else:
            yield initial_state(manifest.model, compute_with_bar(manifest.model, bar).hex())
            bar.begin("checking this machine and its data")
    if here.private is not None:
        yield from of_own_data(manifest, here)


def _fault(text: str, path: str, why: str) -> Finding:
    """Return a finding with its line, and an example of a right value."""
    line = _line(text, path)
    example = _example(path)
    return Finding(
        Level.WRONG,
        path or "the file",
        why + (f" (line {line})" if line else ""),
        f"such as {path.rpartition('.')[2]} = {example}" if example else "",
    )


def _line(text: str, path: str) -> int | None:
    """Return the 1-based line of a key; if it is absent, that of the nearest key or table that contains it."""
    table, found, nearest = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].strip()
        if words.startswith("["):
            table = here = words.strip("[] ")
        else:
            here = f"{table}.{words.partition('=')[0].strip().strip(chr(34))}".lstrip(".")
        if len(here) > nearest and f"{path}.".startswith(f"{here}."):
            found, nearest = number, len(here)
    return found


def _example(path: str) -> str:
    """Return an example of the key from a preset; empty if it has none."""
    value = tomllib.loads((files("dilocox.node.presets") / f"{EXAMPLES}.toml").read_text())
    for part in path.split("."):
        value = value.get(part, {}) if isinstance(value, dict) else {}
    if isinstance(value, dict):
        return ""
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"


def _lie(manifest: Manifest, store: BlobStore) -> str:
    """Return where the run's data are, and the disk space they need at a node."""
    corpus = corpus_in(store, bytes.fromhex(manifest.data.digest))
    size = sum(size for _, size in corpus.blobs) if corpus is not None else 0
    return f"are in {store.folder}: {size / 1e6:,.1f} MB, which a node without a copy fetches as it reads them"


def _served(manifest: Manifest, path: Path, here: Here, weights: Path | None) -> Iterator[Finding]:
    """Yield findings about what a coordinator serves: signature, data, imported weights."""
    key = beside(path, ".key")
    signs = key.is_file() and load_identity(key).peer
    if signs == manifest.owner:
        yield Finding(Level.FINE, str(key), "is the owner's")
    elif signs:
        yield Finding(
            Level.WRONG, str(key), "is not the key of run.owner: the run cannot be signed", "pass the owner's public key"
        )
    else:
        says = "is missing: a coordinator signs the run with it when it serves the run for the first time"
        yield Finding(Level.ODD, str(key), says, "run this where the owner's key is")
    try:
        imported = weights_to_serve(manifest, weights)
        if imported is not None:
            yield Finding(Level.FINE, "imported weights", f"are in {imported.folder}")
    except ConfigError as error:
        yield Finding(Level.WRONG, "imported weights", str(error))
    try:
        store = data_to_serve(manifest, here.data)
        served = "are missing: nodes start when a peer serves them" if store is None else _lie(manifest, store)
        level = Level.ODD if store is None else Level.FINE
        help = f"build them (`dilocox data build`), or pass a copy: --data {manifest.data.name}=DIR" if store is None else ""
        yield Finding(level, f"data {manifest.data.name}", served, help)
    except ConfigError as error:
        yield Finding(Level.WRONG, f"data {manifest.data.name}", str(error))
