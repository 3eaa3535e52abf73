"""Preflight checks of this machine for a node, relay or archive. Blocking. check_link.py checks the network."""

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.node.attest.kinds import asked_kinds, missing
from dilocox.node.cluster.factory import has_trained
from dilocox.node.data.verify import check_corpus, check_whole, must_bring_own
from dilocox.node.exchange.shards import Shards, find_shards
from dilocox.node.hosts.cluster_link import address_on, exposed
from dilocox.node.planning.disk_model import disk_bytes, held_bytes, written
from dilocox.node.planning.layouts import choose
from dilocox.node.planning.memory_model import host_bytes
from dilocox.node.workers.devices import Devices, cuda_devices, lacking_driver, this_machine
from dilocox.node.workers.environment import CHECKPOINT_SECONDS
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.transport.process.health import running_daemon
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import last_built
from dilocox.transport.store.data_directory import load_identity, run_folder

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account, Budget

__all__ = ["Here", "Role", "no_part", "of_machine", "of_own_data", "of_part", "of_room"]


ODD_TERABYTES, WRONG_TERABYTES = 1.0, 20.0
"""Disk writes a day, and of the whole run: at the second a day a consumer's disk lasts a month or two."""


class Role(StrEnum):
    """Role of a machine in a run, by its command."""

    NODE = "node"
    RELAY = "relay"
    ARCHIVE = "archive"


@dataclass(frozen=True)
class Here:
    """Options that an operator would pass to `dilocox node`, `relay` or `archive`."""

    home: Path
    host: str
    port: int
    """0: any."""
    devices: int | None
    data: dict[str, Path]
    interface: str | None
    private: Path | None = None
    budget: "Budget | None" = None
    """Privacy budget of that data."""
    gives_up_bound: bool = False
    """It may give away anything, also where a bound was promised."""
    role: Role = Role.NODE
    accepts_wear: bool = False
    """Its operator confirmed that the disk may wear out soon."""
    usual_port: int = 0
    """Default port of a daemon without an option and without an earlier port."""

    @property
    def peer(self) -> str | None:
        """Return the peer that would join; None: the folder has no identity yet."""
        path = self.home / "identity.key"
        return load_identity(path).peer if path.is_file() else None


def of_machine(manifest: Manifest, here: Here) -> Iterator[Finding]:
    """Yield findings of disk, port and data; of a node also of devices, memory, plugins, and the interface of a cluster."""
    if here.role is Role.NODE:
        shards = None
        try:
            shards = find_shards(manifest)
        except ConfigError as error:
            do = "install it before you join: this run needs it on every node"
            yield Finding(Level.WRONG, "availability", str(error), do)
        yield from of_room(manifest, here.home, here.devices, here.accepts_wear, shards)
        if lacking := missing(asked_kinds(manifest.attestation)):
            yield Finding(Level.WRONG, "attestation.kinds", lacking, "install it beside dilocox, and check again")
        if shards is not None:
            yield from shards.findings()
    else:
        what = f"states and payloads of {manifest.rounds.start_clusters} clusters take"
        yield _disk(here.home, held_bytes(manifest, manifest.rounds.start_clusters), what)
    yield _port(here)
    yield from _data(manifest, here)
    if here.interface is not None:
        yield _interface(here.interface)


def of_room(
    manifest: Manifest,
    home: Path,
    devices: int | None,
    accepts_wear: bool = False,
    shards: Shards | None = None,
) -> Iterator[Finding]:
    """Check devices, memory and disk of a machine that is a cluster by itself. `shards`: of the run, if they can be made here."""
    yield from _devices(manifest, devices)
    if (lack := lacking_driver()) is not None:
        yield Finding(Level.WRONG if lack.stops else Level.ODD, "GPU", lack.says, lack.do)
    what = f"states, checkpoints and payloads of {manifest.rounds.start_clusters} clusters take"
    yield _disk(home, disk_bytes(manifest, manifest.rounds.start_clusters), what)
    yield _wear(manifest, devices, accepts_wear, shards)


def _wear(manifest: Manifest, devices: int | None, accepted: bool, shards: Shards | None) -> Finding:
    """Judge disk writes: a consumer's disk is specified for 600 to 2,400 TB."""
    seconds = _round_seconds(manifest, devices)
    each = written(manifest, manifest.rounds.start_clusters, shards=shards).in_a_round(seconds, CHECKPOINT_SECONDS)
    a_day, in_all = each * 86_400 / seconds / 1e12, each * manifest.rounds.count / 1e12
    says = (
        f"each round writes {each / 1e9:,.1f} GB to that disk. At about {seconds:,.3g} s per round (see `dilocox "
        f"plan` for other machines) that is {a_day:,.3g} TB a day, and {in_all:,.3g} TB in the whole run"
    )
    do = "use longer rounds (rounds.inner_steps) to write less"
    if a_day < ODD_TERABYTES or in_all < ODD_TERABYTES:
        return Finding(Level.FINE, "wear", says)
    if a_day < WRONG_TERABYTES or in_all < WRONG_TERABYTES or accepted:
        return Finding(Level.ODD, "wear", says, do)
    return Finding(Level.WRONG, "wear", says, f"{do}; if this disk may wear out within months, confirm with --accept-wear")


def _round_seconds(manifest: Manifest, devices: int | None) -> float:
    """Return about how long a round takes on this machine, without measuring it."""
    if manifest.rounds.round_seconds is not None:
        return manifest.rounds.round_seconds
    try:
        machine = this_machine(devices)
    except ConfigError:
        machine = Devices(1)
    return manifest.rounds.inner_steps * choose(manifest, [machine]).best.seconds


def no_part(manifest: Manifest, me: str, role: Role) -> str:
    """Return why the run has no place for a peer as a relay or an archive; empty: it has."""
    if me in manifest.run.relays:
        return ""
    if role is Role.RELAY:
        return f"the run does not name {me} as a relay: its owner must add it to run.relays before the run begins"
    if not manifest.may_read(me):
        return (
            f"the run does not admit {me} as a reader: its owner must add it to run.relays, or to the "
            "allow-list, before the run begins"
        )
    return ""


def of_part(manifest: Manifest, here: Here) -> Iterator[Finding]:
    """Check that the run has a place for the peer."""
    me, admission = here.peer, manifest.admission
    listed = admission.policy == "allow-list"
    by_name = {Role.NODE: listed, Role.RELAY: True, Role.ARCHIVE: listed and not manifest.may_read("")}[here.role]
    if me is None and by_name:
        says = f"{here.home} has no identity yet, but the run admits peers by id"
        yield Finding(Level.ODD, "admission", says, f"send its owner the id that `dilocox id --home {here.home}` prints")
    elif here.role is not Role.NODE:
        yield _kept(manifest, me or "a new identity", here.role)
    elif listed and me not in admission.allow:
        yield Finding(
            Level.WRONG,
            "admission",
            f"{me} is not on the run's allow-list",
            "ask its owner to add that id, or use another --home",
        )
    elif manifest.attestation.kinds:
        kinds = " or ".join(manifest.attestation.kinds)
        yield Finding(
            Level.ODD,
            "admission",
            f"the run requires evidence ({kinds}): run `dilocox attest self` to see what this machine has",
        )
    else:
        yield Finding(Level.FINE, "admission", "open to any peer" if admission.policy == "open" else "on the allow-list")


def _kept(manifest: Manifest, me: str, role: Role) -> Finding:
    if why := no_part(manifest, me, role):
        return Finding(Level.WRONG, "admission", why, "use the --home whose identity the run names")
    if me in manifest.run.relays:
        return Finding(Level.FINE, "admission", "the run names this peer in run.relays: nodes store payloads at it")
    return Finding(Level.FINE, "admission", "may read the run; it is not in run.relays, so no node stores payloads at it")


def _devices(manifest: Manifest, devices: int | None) -> Iterator[Finding]:
    try:
        machine = this_machine(devices)
        choice = choose(manifest, [machine])
    except ConfigError as error:
        yield Finding(Level.WRONG, "devices", str(error))
        return
    kinds = ("CUDA device",) if machine.cuda else ("stage worker on CPUs", "stage workers on CPUs")
    used = choice.best.placement.workers
    train, stages = several(used, "trains", "train"), several(manifest.model.stages, "stage")
    says = f"{several(machine.devices, *kinds)}, of which {train} {stages}: {choice.best.name}"
    yield Finding(Level.FINE, "devices", says)
    idle = (machine.devices if devices else cuda_devices()) - used
    if machine.cuda and idle > 0:
        yield Finding(
            Level.ODD,
            "devices",
            choice.why_idle or f"{several(idle, 'GPU')} of {used + idle} would be idle",
            f"use --devices {used} and leave the others to other programs, or start another node with CUDA_VISIBLE_DEVICES",
        )
    for lack in choice.lacking:
        yield Finding(
            Level.WRONG,
            "memory",
            lack.sentence("this machine"),
            "use more hosts (--cluster-boxes), or train a smaller model",
        )
    if not choice.lacking:
        yield _memory(manifest, machine)


def _memory(manifest: Manifest, machine: Devices) -> Finding:
    needed = host_bytes(manifest, range(manifest.model.stages)) / 1e9
    if not machine.host_bytes:
        return Finding(Level.ODD, "memory", f"is unknown on this machine; outer state takes {needed:,.1f} GB")
    return Finding(Level.FINE, "memory", f"{machine.host_bytes / 1e9:,.1f} GB; outer state takes {needed:,.1f}")


def _disk(home: Path, wanted: int, what: str) -> Finding:
    """`what` takes so many bytes."""
    there = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(Level.WRONG, "disk", f"cannot write to {there}", "use another folder with --home, or change its owner")
    free = shutil.disk_usage(there).free
    says = f"{free / 1e9:,.1f} GB free at {home}; {what} {wanted / 1e9:,.1f}"
    if free < wanted:
        return Finding(Level.WRONG, "disk", says, "free space, or use another folder with --home")
    return Finding(Level.FINE, "disk", says)


def _port(here: Here) -> Finding:
    port, running = here.port or here.usual_port, running_daemon(here.home)
    if running is not None and port == running.get("port"):
        return Finding(Level.FINE, "port", f"{port} is used by the daemon of {here.home}")
    if not port:
        return Finding(Level.FINE, "port", "any free port: to be reachable, pass --port with one that your router forwards")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            return Finding(
                Level.WRONG,
                "port",
                f"cannot use {port}: {error.strerror}",
                "stop the program that uses it, or use another port with --port",
            )
    return Finding(Level.FINE, "port", f"{port} is free")


def _data(manifest: Manifest, here: Here) -> Iterator[Finding]:
    name = manifest.data.name
    for other in sorted(here.data.keys() - {name}):
        yield Finding(
            Level.ODD, f"--data {other}", f"the run's data are named {name}: {other} is not used", f"--data {name}=DIR"
        )
    if name not in here.data:
        return
    try:
        check_corpus(manifest, here.data[name])
    except (ConfigError, OSError) as error:
        yield Finding(Level.WRONG, f"--data {name}", str(error), "remove it: a node fetches the data from peers")
    else:
        yield Finding(Level.FINE, f"--data {name}", "complete, and the run's")


def of_own_data(manifest: Manifest, here: Here, trained: int = 0) -> Iterator[Finding]:
    """Check the private data of a node and their privacy budget. The coordinator checks the tokenizer at the join.
    `trained`: counted rounds of the run so far."""
    about = "--private"
    try:
        must_bring_own(manifest, here.private)
        if here.private is None:
            return
        digest = last_built(here.private)
        corpus = check_whole(BlobStore(here.private, ours=False), digest)
        yield Finding(Level.FINE, about, f"{corpus.tokens:,} tokens, built with tokenizer {corpus.tokenizer}")
        about = "--private-epsilon"
        from dilocox.node.data.privacy_budget import open_account

        account = open_account(here.home, manifest, here.private, digest, here.budget, here.gives_up_bound)
        if here.budget is not None:
            yield _budget(manifest, account, has_trained(run_folder(here.home, manifest.run_id)), trained)
    except (LocalError, OSError) as error:
        yield Finding(Level.WRONG, about, str(error))


def _budget(manifest: Manifest, account: "Account", took_part: bool, trained: int) -> Finding:
    """Return the budget's finding, for a node that takes part from now on. Raises ConfigError, LocalError."""
    from dilocox.node.data.privacy_budget import steps_left

    steps = steps_left(manifest, trained)
    noise = account.noise_for(steps, took_part)
    if not account.fits(noise, manifest.rounds.inner_steps):
        says = f"another phase would exceed the privacy budget: {account.sentence}"
        return Finding(Level.WRONG, "--private-epsilon", says, "use a larger epsilon, or another corpus")
    rounds = f"{trained + 1:,} to {manifest.rounds.count:,}"
    says = f"noise of {noise:.2f} times the clip for the {steps:,} steps of rounds {rounds}; {account.sentence}"
    return Finding(Level.FINE, "--private-epsilon", says)


def _interface(name: str) -> Finding:
    try:
        address = address_on(name)
    except LocalError as error:
        return Finding(Level.WRONG, "cluster interface", str(error))
    if warning := exposed(name, address):
        return Finding(Level.ODD, "cluster interface", warning)
    return Finding(Level.FINE, "cluster interface", f"{name} has {address}")
