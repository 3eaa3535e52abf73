"""`dilocox node --join LINK`: take part in a run."""

from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    NODE_PORTS,
    ArchiveKeyOption,
    ArchiveOption,
    DataOption,
    MaybeJoinOption,
    archive_place,
    read_link,
)
from dilocox.cli.config import validated
from dilocox.cli.options import ClusterOptions, MachineOptions, PeerOptions, PrivateOptions, grouped
from dilocox.cli.signals import live
from dilocox.node.context.settings import NodeSettings
from dilocox.node.daemon import run_node
from dilocox.node.hosts.cluster_link import ClusterLink, address_on
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import parse_account
from dilocox.transport.store.corpus_store import parse_folders
from dilocox.transport.store.files import read_named

__all__ = ["node"]


def read_cluster_link(path: Path) -> ClusterLink:
    """Raises ConfigError."""
    try:
        return ClusterLink.parse(read_named(path, piped=True))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster link: {error}") from error


def _check_cluster(link: ClusterLink | None, of: ClusterOptions, upload_copies: int | None, hours: str | None) -> None:
    """Raise ConfigError or LocalError if options contradict each other, or do not fit this machine."""
    several = of.cluster_boxes > 1 or link is not None
    if of.cluster_boxes > 1 and link is not None:
        raise ConfigError("use --cluster-boxes only on the lead host")
    if hours is not None and link is not None:
        raise ConfigError("use --hours only on the lead host: its hosts follow it")
    if several and upload_copies is not None:
        raise ConfigError("remove --upload-copies: a cluster of several hosts cannot store payloads at other peers yet")
    if not several and of.cluster_interface is not None:
        raise ConfigError("--cluster-interface needs a cluster of several hosts: pass --cluster-boxes N, or --cluster FILE")
    if several and of.cluster_interface is None:
        raise ConfigError(
            "the hosts of a cluster exchange tensors unencrypted: pass the interface of a trusted network with "
            "--cluster-interface"
        )
    if of.cluster_interface is not None:
        address_on(of.cluster_interface)


@grouped
def node(
    peer: PeerOptions,
    machine: MachineOptions,
    boxes: ClusterOptions,
    own: PrivateOptions,
    join: MaybeJoinOption = None,
    upload_copies: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.HOLDERS,
            help="Most copies of a payload to send to peers that serve it: 1 for a slow uplink.",
        ),
    ] = None,
    simulated_measurement: Annotated[
        Path | None,
        typer.Option(help="File with simulated evidence, for testnets."),
    ] = None,
    collateral: Annotated[Path | None, typer.Option(help="File with this machine's TDX collateral.")] = None,
    account: Annotated[
        str | None,
        typer.Option(
            metavar="0x…",
            callback=validated(parse_account),
            help="EVM account that is paid, in a run with settlement.",
        ),
    ] = None,
    data: DataOption = None,
    archive: ArchiveOption = None,
    archive_key: ArchiveKeyOption = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Copy of the Hugging Face folder that the run begins with (default: fetch it).",
        ),
    ] = None,
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="End when the run ends, instead of serving its state.")
    ] = False,
) -> None:
    """Join a run, train, and exchange; leave the roster on Ctrl-C or SIGTERM."""
    peer.begin()
    link = read_cluster_link(boxes.cluster) if boxes.cluster is not None else None
    if (join is None) == (link is None):
        raise ConfigError("pass either --join LINK, or --cluster FILE for a host of another cluster")
    if account is not None and link is not None:
        raise ConfigError("use --account only on the lead host: it is paid for the whole cluster")
    _check_cluster(link, boxes, upload_copies, machine.hours)
    settings = NodeSettings(
        **peer.settings("node", announced=upload_copies is None, first=NODE_PORTS),
        **machine.settings(),
        **own.settings(machine.devices, boxes.cluster_boxes > 1 or link is not None),
        join=link.join if link is not None else read_link(join or ""),
        simulated_measurement=simulated_measurement,
        collateral=collateral,
        upload_copies=upload_copies,
        account=parse_account(account) if account is not None else b"",
        data=parse_folders(data or ()),
        archive=archive_place(archive, archive_key),
        begin=begin,
        boxes=boxes.cluster_boxes,
        cluster=link,
        interface=boxes.cluster_interface,
        exit_when_finished=exit_when_finished,
        box_patience=boxes.cluster_patience_seconds,
    )
    live(run_node(settings))
