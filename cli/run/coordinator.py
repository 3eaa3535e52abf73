"""`dilocox coordinator RUN.toml`: serve a run."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import COORDINATOR_PORTS, DataOption, beside, check_place, read_run
from dilocox.cli.options import DaemonOptions, StoreOptions, grouped
from dilocox.cli.run.seed_state import compute_state
from dilocox.cli.signals import live
from dilocox.coordinator.daemon import CoordinatorSettings, run_coordinator
from dilocox.node.attest.kinds import require_kinds
from dilocox.node.attest.verify import appraise
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.run.corpus import check_fits
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Level, of_run
from dilocox.protocol.run.tensors import imported_bytes
from dilocox.transport.store.appointment_bundle import read_handover
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import (
    Folders,
    corpus_in,
    library,
    named_store,
    parse_folders,
    weights_library,
)
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.files import write_atomically

__all__ = ["coordinator", "data_to_serve", "show_link", "weights_to_serve"]

log = logging.getLogger(__name__)


@grouped
def coordinator(
    run_file: Annotated[
        Path, typer.Argument(help="The run file that `dilocox init` made, or RUN.chain of `dilocox owner appoint`.")
    ],
    daemon: DaemonOptions,
    shared: StoreOptions,
    data: DataOption = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with the imported weights that the run names (default: ~/.dilocox/weights)."),
    ] = None,
    link_file: Annotated[Path | None, typer.Option(help="Also write the join link to this file.")] = None,
) -> None:
    """Serve a run: admit peers, close rounds, sign commits. Prints the join link."""
    daemon.begin()
    if link_file is not None:
        check_place(link_file, "--link-file ")
    store = shared.place()
    key = beside(run_file, ".key")
    if run_file.suffix == ".chain" and run_file.is_file():
        handover: Path | None = run_file
        manifest, signer = read_handover(run_file)
    else:
        handover, manifest = None, read_run(run_file)
        signer = manifest.coordinator

    _look_at(manifest)
    require_kinds(manifest.attestation)

    settings = CoordinatorSettings(
        manifest=manifest,
        owner=load_identity(key) if key.is_file() else None,
        key=key,
        handover=handover,
        signer=signer,
        home=daemon.folder("coordinator"),
        name=daemon.name,
        listen=daemon.listen(COORDINATOR_PORTS),
        api=daemon.api_at(COORDINATOR_PORTS),
        data=data_to_serve(manifest, parse_folders(data or ())),
        weights=weights_to_serve(manifest, weights),
        upload=daemon.upload_rates(),
        notice=daemon.notice(),
        store=store,
    )
    live(run_coordinator(settings, partial(show_link, link_file), appraise, compute_state))


def show_link(file: Path | None, link: JoinLink) -> None:
    """Print the link to standard output, and write it to a file."""
    sys.stdout.write(f"{link}\n")
    sys.stdout.flush()
    if link.is_local:
        log.warning("this link works on this machine only: pass --host ADDRESS, by which other machines reach this one")
    if file is not None:
        write_atomically(file, f"{link}\n".encode())


def _look_at(manifest: Manifest) -> None:
    """Log unusual settings of the run. Raises ConfigError if it cannot continue."""
    found = of_run(manifest)
    for finding in found:
        log.log(logging.WARNING if finding.level is Level.ODD else logging.ERROR, "%s: %s", finding.about, finding.says)
    wrong = [f"  {finding.about}: {finding.says}. Help: {finding.do}" for finding in found if finding.level is Level.WRONG]
    if wrong:
        raise ConfigError("\n".join(["the run could not continue:", *wrong]))


def data_to_serve(manifest: Manifest, folders: Folders) -> BlobStore | None:
    """Return the store with the run's corpus, from `--data` or the library; None: no copy here. Raises ConfigError if the
    named folder contains another corpus, or one that does not fit the model."""
    built, digest = library(manifest.data.name), bytes.fromhex(manifest.data.digest)
    store = named_store(manifest.data, folders) or (BlobStore(built) if built.is_dir() else None)
    corpus = corpus_in(store, digest) if store is not None else None
    if corpus is None:
        return None
    check_fits(manifest, corpus)
    return store


def weights_to_serve(manifest: Manifest, named: Path | None) -> BlobStore | None:
    """Return the store with the run's imported weights, from `--weights` or the folder of `dilocox init --from`. None: no
    copy here, or the run has none. Raises ConfigError if the named folder does not contain them, or they do not fit the
    model."""
    model, folder = manifest.model, named or weights_library()
    root = model.imported
    if not root:
        if named is not None:
            raise ConfigError(f"remove --weights {named}: the run begins with its seed, and has no imported weights")
        return None
    store = BlobStore(folder, ours=named is None)
    stages = store.stage_digests(root)
    if not stages:
        lacking = f"the run's imported weights {root.hex()} are not in {folder}"
        if named is not None:
            raise ConfigError(f"{lacking}: pass the folder that `dilocox init --from` filled, or a copy of it")
        log.warning("%s: nodes start when a peer serves them; --weights DIR names a copy", lacking)
        return None
    sizes = [store.size(digest) if digest in store else 0 for digest in stages]
    if len(sizes) != model.stages or any(size not in imported_bytes(model, stage) for stage, size in enumerate(sizes)):
        raise ConfigError(
            f"the imported weights {root.hex()} in {folder} are damaged, or do not match this model in "
            f"{model.stages} stages. Restore the shapes that `dilocox init --from` wrote, or import again."
        )
    return store
