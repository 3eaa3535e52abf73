"""Options that several verbs share, in groups: a verb takes a group as one argument."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from dilocox.cli.common import (
    DEVICES,
    THIS_MACHINE,
    ApiOption,
    DhtOption,
    DhtPortOption,
    FirstPorts,
    HomeOption,
    HostOption,
    NameOption,
    PortOption,
    set_up_logging,
)
from dilocox.cli.config import ConfigOption, validated
from dilocox.coordinator.kv_store import StoreFiles, StorePlace, parse_place
from dilocox.node.workers.environment import CHECKPOINT_SECONDS, OuterState
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.transport.limits.rate_limits import SLOWEST_DOWNLOAD_BITS_PER_SECOND, Rates, parse_rates
from dilocox.transport.limits.schedule import Hours
from dilocox.transport.net.network import Listen
from dilocox.transport.notify.notify import Notice, parse_notice
from dilocox.transport.process.health import base_folder
from dilocox.transport.process.parent_pipe import exit_with_parent

__all__ = [
    "ClusterOptions",
    "DaemonOptions",
    "MachineOptions",
    "PeerOptions",
    "PrivateOptions",
    "StoreOptions",
    "grouped",
]


ANY_PORTS = FirstPorts()


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb for typer, whose arguments that are option groups (dataclasses) come as one option for each of their fields."""
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    def flat() -> Iterator[inspect.Parameter]:
        for parameter in inspect.signature(verb).parameters.values():
            if (group := groups.get(parameter.name)) is None:
                yield parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            types = get_type_hints(group, include_extras=True)
            for each in fields(group):
                default = inspect.Parameter.empty if each.default is MISSING else each.default
                kind = _under(group.TITLE, types[each.name])  # type: ignore[union-attr]
                yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    @wraps(verb)
    def called(**values: Any) -> None:
        made = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})  # type: ignore[operator]
            for name, group in groups.items()
        }
        verb(**values, **made)

    parameters = list(flat())
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _under(title: str, annotation: Any) -> Any:
    """Return an option's annotation with the heading under which help shows it."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = title
    return Annotated[kind, option]


def _uploads(said: Sequence[str]) -> Rates:
    return parse_rates(said, "--upload")


def _downloads(said: Sequence[str]) -> Rates:
    return parse_rates(said, "--download", slowest_bits_per_second=SLOWEST_DOWNLOAD_BITS_PER_SECOND)


@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """Options of every daemon."""

    TITLE: ClassVar = "The daemon"

    config: ConfigOption = None
    home: HomeOption = None
    name: NameOption = THIS_MACHINE
    host: HostOption = "127.0.0.1"
    port: PortOption = None
    dht_port: DhtPortOption = None
    dht: DhtOption = True
    api: ApiOption = None
    upload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE[@HOURS]",
            callback=validated(_uploads),
            help="Upload limit, such as 20mbit, or by time of day 20mbit@08-22; repeatable (default: no limit).",
        ),
    ] = None
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="URL|COMMAND",
            callback=validated(parse_notice),
            help="POST alarms as JSON to a URL, or pipe them to a command; @FILE contains either.",
        ),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level DEBUG.")] = False

    def begin(self) -> None:
        """Apply the options that act before a daemon starts."""
        exit_with_parent()
        set_up_logging(self.verbose)

    def folder(self, name: str) -> Path:
        """`name`: where there is no --home."""
        return self.home or base_folder() / name

    def listen(self, first: FirstPorts, announced: bool = True) -> Listen:
        usual = (first.grpc if self.port is None else 0, first.dht if self.dht_port is None else 0)
        return Listen(self.host, self.port or 0, self.dht_port or 0, self.dht, announced, *usual)

    def api_at(self, first: FirstPorts) -> str:
        """Return host:port of the HTTP API."""
        return self.api or f"127.0.0.1:{first.api}"

    def upload_rates(self) -> Rates:
        """Raises ConfigError."""
        return _uploads(self.upload or ())

    def notice(self) -> Notice | None:
        """Raises ConfigError."""
        return parse_notice(self.notify) if self.notify is not None else None


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of several coordinators of one run."""

    TITLE: ClassVar = "Several coordinators"

    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            callback=validated(parse_place),
            help="Store that several coordinators share: one leads, the others are standbys. The plugin dilocox-etcd "
            "takes etcd://HOST:PORT/PREFIX (default: this daemon's folder).",
        ),
    ] = None
    store_auth: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with user and password of the store, one per line; readable by this user only."
        ),
    ] = None
    store_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate that signs the store's certificates (default: the system's)."),
    ] = None
    store_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Client certificate, if the store requires one …")] = (
        None
    )
    store_key: Annotated[Path | None, typer.Option(metavar="FILE", help="… and its key.")] = None

    def place(self) -> StorePlace | None:
        """Raises ConfigError."""
        files = StoreFiles(self.store_auth, self.store_ca, self.store_cert, self.store_key)
        if self.store is None and files != StoreFiles():
            raise ConfigError("use --store-auth, --store-ca, --store-cert and --store-key only with --store")
        return parse_place(self.store, files) if self.store is not None else None


@dataclass(frozen=True, kw_only=True)
class PeerOptions(DaemonOptions):
    """Options of every daemon except the coordinator."""

    download: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE[@HOURS]", callback=validated(_downloads), help="Download limit, as in --upload."),
    ] = None

    def settings(self, folder: str, announced: bool = True, first: FirstPorts = ANY_PORTS) -> dict[str, Any]:
        """Return arguments of `PeerSettings` without the run to join. `folder`: used without --home. Raises ConfigError."""
        return {
            "home": self.folder(folder),
            "name": self.name,
            "listen": self.listen(first, announced),
            "api": self.api_at(first),
            "upload": self.upload_rates(),
            "download": _downloads(self.download or ()),
            "notice": self.notice(),
        }


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options for the part of this machine that a node uses, and the hours."""

    TITLE: ClassVar = "This machine"

    devices: Annotated[
        int | None,
        typer.Option(**DEVICES, help="Stage workers (default: one per GPU, or 1)."),
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per stage worker.")] = None
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="HOURS",
            callback=validated(Hours.parse),
            help="Train only at these hours of this machine's clock, such as 22-06 (default: always).",
        ),
    ] = None
    codec_cpus: Annotated[str, typer.Option(help="CPUs for encoding and applying, such as 1,3 (default: any).")] = ""
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Shortest time of a step: leaves the machine to other programs.")
    ] = 0.0
    checkpoint_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between two checkpoints of all private state: what a power loss costs.",
        ),
    ] = CHECKPOINT_SECONDS
    outer_state: Annotated[
        OuterState,
        typer.Option(
            help="On a GPU machine: where outer state is stored and computed: on the host, streamed through the GPU, "
            "or on the GPU.",
        ),
    ] = OuterState.STREAM

    def settings(self) -> dict[str, Any]:
        """Return arguments of `NodeSettings`. Raises ConfigError."""
        try:
            cpus = tuple(int(cpu) for cpu in self.codec_cpus.split(",") if cpu)
        except ValueError as error:
            raise ConfigError(f"--codec-cpus {self.codec_cpus}: {error}") from error
        return {
            "devices": self.devices,
            "threads": self.threads,
            "hours": Hours.parse(self.hours) if self.hours is not None else None,
            "codec_cpus": cpus,
            "step_seconds": self.step_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
            "outer_state": self.outer_state,
        }


@dataclass(frozen=True, kw_only=True)
class PrivateOptions:
    """Options of a cluster's private data."""

    TITLE: ClassVar = "Private data"

    private: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            metavar="DIR",
            help="This node's corpus, made by `dilocox data build`, in a run on private data.",
        ),
    ] = None
    private_epsilon: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Bound of differential privacy for each sequence; the node stops once it is spent (default: none; "
            "inf: remove an earlier bound).",
        ),
    ] = None
    private_delta: Annotated[
        float | None,
        typer.Option(min=1e-12, max=0.1, help="Probability that the bound fails (default: 1 in 10 times the sequences)."),
    ] = None
    private_clip: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Largest norm of a sequence's gradient (default: 1)."),
    ] = None

    def settings(self, devices: int | None, several_boxes: bool) -> dict[str, Any]:
        """Return arguments of `NodeSettings`. `several_boxes`: the cluster has several hosts. Raises ConfigError."""
        given_up = self.private_epsilon == math.inf
        if self.private_epsilon is None or (given_up and self.private is not None):
            for option, said in (("delta", self.private_delta), ("clip", self.private_clip)):
                if said is not None:
                    raise ConfigError(f"use --private-{option} only with --private-epsilon")
            return {"private": self.private, "gives_up_bound": given_up}
        if several_boxes:
            raise ConfigError("--private-epsilon needs a cluster of one host with one worker that has the whole model")
        if self.private is None:
            raise ConfigError("--private-epsilon bounds what a private corpus reveals: pass the corpus with --private DIR")
        if (devices or 1) > 1:
            raise ConfigError("--private-epsilon needs one worker with the whole model: pass --devices 1")
        from dilocox.node.data.privacy_budget import Budget  # only for a run on private data

        clip = 1.0 if self.private_clip is None else self.private_clip
        return {"private": self.private, "budget": Budget(self.private_epsilon, self.private_delta, clip)}


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster of several hosts."""

    TITLE: ClassVar = "A cluster of several hosts"

    cluster_boxes: Annotated[
        int,
        typer.Option(
            min=1,
            max=limits.HOSTS,
            help="Number of hosts of the cluster that this lead host names; the log says how other hosts join.",
        ),
    ] = 1
    cluster: Annotated[
        Path | None,
        typer.Option(help="File with the secret link of the cluster to join as a host, instead of --join."),
    ] = None
    cluster_interface: Annotated[
        str | None,
        typer.Option(help="Interface of the trusted LAN or WireGuard for tensors between hosts."),
    ] = None
    cluster_patience_seconds: Annotated[
        float,
        typer.Option(min=0, help="On the lead host: seconds until other hosts take the stages of a lost host."),
    ] = 60.0
