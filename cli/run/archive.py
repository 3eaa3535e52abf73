"""`dilocox archive --join LINK --archive URL`: store what a run needs to start again after the loss of all peers."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import DataOption, JoinOption, archive_place, read_link
from dilocox.cli.options import PeerOptions, grouped
from dilocox.cli.signals import live
from dilocox.node.archive.archiver import ArchiveSettings
from dilocox.node.relay_daemon import HolderSettings, run_holder
from dilocox.protocol.errors import ConfigError
from dilocox.transport.archive.sealing import make_key
from dilocox.transport.store.corpus_store import parse_folders

__all__ = ["archive"]

log = logging.getLogger(__name__)


@grouped
def archive(
    join: JoinOption,
    peer: PeerOptions,
    url: Annotated[
        str, typer.Option("--archive", metavar="URL", help="The archive: a new or existing folder, or s3://BUCKET/PREFIX.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(
            "--archive-key", metavar="FILE", help="Encrypt the archive with the key in FILE, which is created if missing."
        ),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--archive-plain", help="Do not encrypt it, although the run is not public: the storage's operator can read it."
        ),
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Store a state every N rounds (default: the run's rounds.snapshot_every)."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Store only the newest N states, and payloads since (default: all).")
    ] = None,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Also store every counted payload: any round can be replayed.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Archive a run: its chain, states, data, and optionally payloads. An archive does not train, and needs no GPU. If the run
    names this peer in `run.relays`, it also stores uploads of unreachable peers, as `dilocox relay` does."""
    peer.begin()
    if key is not None and plain:
        raise ConfigError("--archive-key encrypts the archive and --archive-plain does not: pass only one")
    if key is not None and not key.exists():
        make_key(key)
        log.warning("made the archive key %s: copy it to another machine, the archive cannot be read without it", key)
    place = archive_place(url, key)
    assert place is not None, "it has a URL"
    settings = HolderSettings(
        **peer.settings("archive"),
        join=read_link(join),
        archive=ArchiveSettings(place, plain, every, keep, payloads, parse_folders(data or ())),
    )
    live(run_holder(settings))
