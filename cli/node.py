"""`dilocox node --join LINK`: take part in a run."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    THIS_MACHINE,
    ApiOption,
    ArchiveKeyOption,
    ArchiveOption,
    DataOption,
    DhtOption,
    DhtPortOption,
    HomeOption,
    HostOption,
    MaybeJoinOption,
    NameOption,
    PortOption,
    UploadLimitOption,
    archive_place,
    bytes_per_second,
    read_link,
    set_up_logging,
)
from dilocox.node.boxes.link import ClusterLink, address_on
from dilocox.node.daemon import NodeSettings, run_node
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.transport.corpora import parse_folders
from dilocox.transport.health import base_folder
from dilocox.transport.network import Listen
from dilocox.transport.parent_pipe import exit_with_parent

__all__ = ["node"]


def read_cluster_link(path: Path) -> ClusterLink:
    """Raises ConfigError."""
    try:
        return ClusterLink.parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cluster link cannot be read: {error}") from error


def _check_cluster(link: ClusterLink | None, boxes: int, interface: str | None, upload_copies: int | None) -> None:
    """Raises ConfigError or LocalError where options do not fit each other, or this machine."""
    several = boxes > 1 or link is not None
    if boxes > 1 and link is not None:
        raise ConfigError("--cluster-boxes is said on the cluster's lead alone")
    if several and upload_copies is not None:
        raise ConfigError("--upload-copies leaves payloads with others, which a cluster of several boxes cannot do yet")
    if not several and interface is not None:
        raise ConfigError("--cluster-interface is for a cluster of several boxes: say --cluster-boxes N, or --cluster FILE")
    if several and interface is None:
        raise ConfigError(
            "the boxes of a cluster exchange tensors unencrypted: name the interface of a trusted network (--cluster-interface)"
        )
    if interface is not None:
        address_on(interface)


def node(
    join: MaybeJoinOption = None,
    home: HomeOption = None,
    name: NameOption = THIS_MACHINE,
    host: HostOption = "127.0.0.1",
    port: PortOption = 0,
    dht_port: DhtPortOption = 0,
    dht: DhtOption = True,
    api: ApiOption = "127.0.0.1:0",
    devices: Annotated[
        int | None,
        typer.Option(min=1, envvar="DILOCOX_NODE__DEVICES", help="Stage workers (default: one per GPU, or 1)."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per stage worker.")] = None,
    upload_limit: UploadLimitOption = None,
    upload_copies: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.HOLDERS,
            help="Send each payload so many times at most, to peers that keep it for the others: for a thin uplink, 1.",
        ),
    ] = None,
    simulated_measurement: Annotated[
        Path | None,
        typer.Option(
            envvar="DILOCOX_SIMULATED_MEASUREMENT", help="File with the measurement of simulated evidence (testnets)."
        ),
    ] = None,
    collateral: Annotated[
        Path | None, typer.Option(help="File with this machine's TDX collateral, kept fresh by the operator.")
    ] = None,
    data: DataOption = None,
    archive: ArchiveOption = None,
    archive_key: ArchiveKeyOption = None,
    private: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            metavar="DIR",
            help="Train on your own corpus, which `dilocox data build` put there: where the run's data are private.",
        ),
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Take what the run begins with from this copy of that Hugging Face folder (default: fetch it).",
        ),
    ] = None,
    cluster_boxes: Annotated[
        int,
        typer.Option(min=1, max=limits.HOSTS, help="Lead a cluster of so many boxes: the log says how the others join it."),
    ] = 1,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Be a box of the cluster whose link lies in this file (instead of --join). Keep it secret."),
    ] = None,
    cluster_interface: Annotated[
        str | None,
        typer.Option(help="Network interface of a trusted LAN or WireGuard, on which the boxes of a cluster exchange tensors."),
    ] = None,
    cluster_patience_seconds: Annotated[
        float,
        typer.Option(min=0, help="On the lead: how long a box that is gone is waited for, before the others take its stages."),
    ] = 60.0,
    codec_cpus: Annotated[str, typer.Option(help="CPUs for encoding and applying, such as 1,3 (default: any).")] = "",
    step_seconds: Annotated[
        float, typer.Option(min=0, help="A step takes at least this long: leaves the machine to others (default: no pause).")
    ] = 0.0,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=1,
            help="Write the inner optimizer's moments and the live parameters every so many rounds: a restart in between goes on "
            "from the committed model and the moments last written.",
        ),
    ] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Join a run, train, exchange; leave cleanly on Ctrl-C or SIGTERM."""
    exit_with_parent()
    set_up_logging(verbose)
    link = read_cluster_link(cluster) if cluster is not None else None
    if (join is None) == (link is None):
        raise ConfigError("say either --join LINK, or --cluster FILE for a box of somebody's cluster")
    _check_cluster(link, cluster_boxes, cluster_interface, upload_copies)
    if private is not None and (cluster_boxes > 1 or link is not None):
        raise ConfigError("--private is for a cluster of one box: several cannot be held to one corpus yet")
    try:
        cpus = tuple(int(cpu) for cpu in codec_cpus.split(",") if cpu)
    except ValueError as error:
        raise ConfigError(f"--codec-cpus {codec_cpus}: {error}") from error
    settings = NodeSettings(
        join=link.join if link is not None else read_link(join or ""),
        home=home or base_folder() / "node",
        name=name,
        listen=Listen(host, port, dht_port, dht, announced=upload_copies is None),
        api=api,
        devices=devices,
        threads=threads,
        codec_cpus=cpus,
        simulated_measurement=simulated_measurement,
        collateral=collateral,
        upload_bytes_per_second=bytes_per_second(upload_limit),
        upload_copies=upload_copies,
        data=parse_folders(data or ()),
        archive=archive_place(archive, archive_key),
        begin=begin,
        private=private,
        step_seconds=step_seconds,
        checkpoint_every=checkpoint_every,
        boxes=cluster_boxes,
        cluster=link,
        interface=cluster_interface,
        box_patience=cluster_patience_seconds,
    )
    asyncio.run(run_node(settings))
