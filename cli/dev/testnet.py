"""`dilocox testnet up | status | kill | start | down`: a real swarm on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    DEVICES,
    DataOption,
    JsonOption,
    beside,
    console,
    errors,
    fail,
    number,
    print_json,
    print_table,
    read_run_text,
    testnet_folder,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.options import PrivateOptions
from dilocox.cli.progress import Working, working
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.node.data.build import build_stdlib
from dilocox.node.data.finding import STDLIB
from dilocox.node.data.verify import check_corpus, check_own
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError
from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import trained_count
from dilocox.testnet.namespaces import Traffic, lacking
from dilocox.testnet.swarm import POLL_SECONDS, WAN, LinkRates, Member, Testnet, member_names
from dilocox.transport.limits.rate_limits import bits_per_second
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in, last_built, library, parse_folders, weights_library
from dilocox.transport.store.data_directory import format_identity
from dilocox.transport.store.files import NAMED_BYTES, read_at_most

__all__ = ["app"]

app = typer.Typer(help="A swarm of real daemons on this machine.", no_args_is_help=True)
FolderOption = Annotated[Path | None, typer.Option("--folder", help="Folder of the testnet (default: ~/.dilocox/testnet).")]

LATE_APPLY_SECONDS = 30.0
"""A row is printed after this time even if a node has not applied its commit: the node may be dead."""
LINE_HELP = ", in each direction, such as 100mbit: puts every host in a network namespace (root; default: all on loopback)."
COLUMNS = (
    ("round", 6),
    ("loss", 7),
    ("held-out before", 15),
    ("counted", 8),
    ("bytes", 11),
    ("applied at step", 16),
    ("state after", 14),
)


@app.command("up")
def up(
    folder: FolderOption = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 3,
    boxes: Annotated[int, typer.Option(min=1, help="Hosts of each node's cluster; each runs a daemon.")] = 1,
    devices: Annotated[
        int | None, typer.Option(**DEVICES, help="Stage workers per host (default: 2, or 1 with --private-epsilon).")
    ] = None,
    lan: Annotated[str | None, typer.Option(help=f"Bandwidth between the hosts of a cluster{LINE_HELP}")] = None,
    wan: Annotated[str | None, typer.Option(help=f"Bandwidth between each host and the rest{LINE_HELP}")] = None,
    preset: Annotated[str, typer.Option(help="Preset of the run.")] = "tiny",
    run_file: Annotated[Path | None, typer.Option("--run", help="Run file, instead of a preset.")] = None,
    upload: Annotated[str | None, typer.Option(metavar="RATE", help="Upload limit of each node, such as 20mbit.")] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="NAME@ROUND: kill that daemon with SIGKILL when the round opens.")
    ] = None,
    baseline: Annotated[
        bool, typer.Option(help="At the end, train one node alone for as many inner steps. It takes longer than the run.")
    ] = False,
    data: DataOption = None,
    private: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Corpus of one node, in a run on private data; repeat it for each node."),
    ] = None,
    private_epsilon: Annotated[float | None, typer.Option(min=0.01, help="As in `dilocox node`, for each node.")] = None,
    private_delta: Annotated[float | None, typer.Option(min=1e-12, max=0.1, help="As in `dilocox node`.")] = None,
    private_clip: Annotated[float | None, typer.Option(min=1e-6, help="As in `dilocox node`.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start and return; stop with `testnet down`.")] = False,
) -> None:
    """Start a swarm, print a table of its rounds, and stop it when the run is finished. Replaces an earlier testnet."""
    kills = [_parse_kill(text, member_names(nodes, boxes)) for text in kill or []]
    folder = folder or testnet_folder()
    with working("building the run's data"):
        run, key = _preset_run(preset, nodes) if run_file is None else _read_run(run_file)
    manifest = Manifest.from_toml(run.decode())
    folders = {manifest.data.name: library(manifest.data.name), **parse_folders(data or ())}
    place = folders[manifest.data.name]
    with working("checking the run's data"):
        store = check_corpus(manifest, place)
    if nodes < manifest.rounds.start_clusters:
        fail(
            f"the run needs {manifest.rounds.start_clusters} clusters to start, but the testnet has {several(nodes, 'node')}",
            Exit.USAGE,
            f"use --nodes {manifest.rounds.start_clusters}, or set a smaller rounds.start_clusters in {run_file}",
        )
    private = _own_data(manifest, store, nodes, private or [])
    budget = {"private_epsilon": private_epsilon, "private_delta": private_delta, "private_clip": private_clip}
    PrivateOptions(private=next(iter(private), None), **budget).settings(devices, boxes > 1)
    devices = devices or (2 if private_epsilon is None else 1)
    options = ["--threads", "1", *_as_options(devices=devices, upload=upload, **budget)]
    testnet = Testnet.create(folder, run, key, nodes, options, place, boxes, _lines(lan, wan, boxes), private)
    signal.signal(signal.SIGTERM, _interrupt)
    if detach:
        _leave_running(testnet)
        errors.print(
            f"{several(nodes, 'node')} and a coordinator run in {folder}; stop them: dilocox testnet down", highlight=False
        )
        return
    try:
        errors.print(
            f"starting a coordinator and {several(nodes, 'node')} of {several(devices, 'stage worker')} in {folder} …",
            highlight=False,
        )
        with working("starting the coordinator") as bar:
            testnet.start_all()
            watched = Watcher(testnet, kills, bar).follow()
    finally:
        testnet.stop()
    _final(testnet, manifest, watched, place if baseline else None, private)


def _leave_running(testnet: Testnet) -> None:
    """Start all daemons or none: daemons started here outlive this process."""
    try:
        with working("starting the coordinator"):
            testnet.start_all(attached=False)
    except BaseException:
        testnet.stop()
        raise


def _as_options(**options: Any) -> list[str]:
    """Return options of `dilocox node`, without those that are None."""
    found = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None)
    return [word for pair in found for word in pair]


def _own_data(manifest: Manifest, store: BlobStore, nodes: int, private: list[Path]) -> list[Path]:
    """A folder for each node of a run on private data; none else. `store`: of the run's corpus."""
    if manifest.data.private and len(private) != nodes:
        fail(
            f"{several(nodes, 'node')} must train on private data, but {len(private)} corpora were passed",
            Exit.USAGE,
            "pass --private DIR once for each node",
        )
    if private and not manifest.data.private:
        fail(
            "--private needs a run on private data",
            Exit.USAGE,
            "remove it, or set data.private = true in the run file",
        )
    shared = corpus_in(store, bytes.fromhex(manifest.data.digest))
    assert shared is not None, "it was verified"
    for folder in private:
        check_own(manifest, shared, folder, last_built(folder))
    return [folder.absolute() for folder in private]


def _lines(lan: str | None, wan: str | None, boxes: int) -> LinkRates | None:
    """Return the bandwidth limits. None: loopback, because no limit was requested or this machine cannot set one."""
    if lan is not None and boxes == 1:
        fail(
            "--lan limits the network between the hosts of a cluster, but each cluster has one host",
            Exit.USAGE,
            "pass --boxes 2, or use --wan",
        )
    lan_speed = bits_per_second(lan, "--lan") if lan is not None else None
    wan_speed = bits_per_second(wan, "--wan") if wan is not None else None
    if lan_speed is None and wan_speed is None:
        return None
    if why := lacking():
        errors.print(f"{why}: all daemons use loopback without a limit", highlight=False, soft_wrap=True)
        return None
    return LinkRates(lan_speed, wan_speed)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _preset_run(preset: str, nodes: int) -> tuple[bytes, bytes]:
    """Return a run file that begins with so many nodes, and its owner's key."""
    if preset not in preset_names():
        fail(f"no preset {preset}", Exit.USAGE, f"use one of: {', '.join(preset_names())}")
    secret = os.urandom(32)
    digest, _ = build_stdlib(library(STDLIB))
    text = render_preset(preset, f"testnet-{preset}", Identity(secret).key.hex(), data=STDLIB, digest=digest, machines=nodes)
    return text.encode(), format_identity(secret)


def _read_run(run_file: Path) -> tuple[bytes, bytes]:
    text = read_run_text(run_file)
    try:
        return text.encode(), read_at_most(beside(run_file, ".key"), NAMED_BYTES)
    except OSError as error:
        fail(
            f"cannot read the run's key: {error}",
            Exit.USAGE,
            f"put it beside the run file, or run: dilocox init {run_file}",
        )


def _parse_kill(text: str, names: Sequence[str]) -> tuple[str, int]:
    name, _, round = text.partition("@")
    if not round.isdecimal():
        fail(f"cannot read --kill {text}: use NAME@ROUND, such as node-2@5", Exit.USAGE)
    if name not in names:
        fail(f"--kill {text}: the testnet has no {name}", Exit.USAGE, f"use one of: {', '.join(names)}")
    return name, int(round)


class StatesTold:
    """State roots before each round, as nodes reported them: there must be exactly one for each round."""

    def __init__(self) -> None:
        self._roots: dict[int, set[str]] = defaultdict(set)

    def hear(self, roots: Mapping[str, str]) -> None:
        """Add the roots of a node's status, by round."""
        for round, root in roots.items():
            self._roots[int(round)].add(root)

    def before(self, round: int) -> set[str]:
        return self._roots.get(round, set())

    @property
    def fault(self) -> str | None:
        """Return why the roots differ; None: every node had one state after every round."""
        made = {round: roots for round, roots in self._roots.items() if round > 1}  # not the initial state
        if not made:
            return "no node reported the state after a round"
        differ = [str(round - 1) for round, roots in sorted(made.items()) if len(roots) > 1]
        return f"nodes have different states after round {', '.join(differ)}" if differ else None


class Watcher:
    """Follows a testnet through its members' HTTP APIs and prints a row per round."""

    def __init__(self, testnet: Testnet, kills: list[tuple[str, int]], bar: Working) -> None:
        self._testnet, self._kills, self._bar = testnet, kills, bar
        self.rows: list[dict[str, Any]] = []
        """Rows of the coordinator's /v1/rounds."""
        self._shown = 0
        self._seen_at: dict[int, float] = {}
        self.states = StatesTold()
        self.phase_steps: dict[str, dict[str, int]] = {}
        self._traffic: list[tuple[int, dict[str, Traffic]]] = []
        """Traffic in network namespaces, at the open of some rounds and of the last."""

    def follow(self) -> "Watcher":
        """Follow the run until the closing commit. Raises LocalError when a member fails."""
        while True:
            for member in self._testnet.failed():
                raise LocalError(f"{member.name} failed:\n{self._testnet.last_words(member)}")
            self.rows = rows = self._testnet.coordinator.get("/v1/rounds") or self.rows
            statuses = {m.name: s for m in self._testnet.nodes if (s := m.get("/v1/status")) and s["role"] == "node"}
            for name, status in statuses.items():
                self.phase_steps[name] = status["phase_steps"]
                self.states.hear(status["state_roots"])
            self._scripted_kills(len(rows))
            self._count_traffic(rows)
            self._show(rows, statuses)
            self._bar.say(waits_for(self._testnet.coordinator.get("/v1/status"), statuses))
            if rows and rows[-1]["closing"] and self._shown >= len(rows) - 1:
                return self
            time.sleep(POLL_SECONDS)

    def _scripted_kills(self, open_round: int) -> None:
        for item in [item for item in self._kills if item[1] <= open_round]:
            self._kills.remove(item)
            errors.print(f"kill -9 {item[0]}", highlight=False)
            self._testnet.kill(self._testnet.member(item[0]))

    def _count_traffic(self, rows: list[dict[str, Any]]) -> None:
        """When a round opens; the first is left out, in which some still fetch what they begin with."""
        open_round = len(rows)
        if self._testnet.network is None or open_round < 2 or rows[-1]["closing"]:
            return
        if not self._traffic or self._traffic[-1][0] < open_round:
            self._traffic = [*self._traffic[:1], (open_round, self._testnet.network.traffic(WAN))]

    def traffic(self) -> tuple[range, dict[str, Traffic]]:
        """Return the range of rounds, which may be empty, and every member's WAN traffic in them."""
        if not self._traffic:
            return range(0), {}
        (first, before), (last, after) = self._traffic[0], self._traffic[-1]
        return range(first, last), {name: after[name].since(before[name]) for name in after}

    def _show(self, rows: list[dict[str, Any]], statuses: dict[str, dict[str, Any]]) -> None:
        if rows and not self._shown:
            console.print("  ".join(f"{name:>{width}}" for name, width in COLUMNS), style="bold", soft_wrap=True)
            self._shown = 1  # the genesis commit has no row
        for row in rows[self._shown :]:
            round = row["round"]
            if row["closing"]:
                return
            seen = self._seen_at.setdefault(round, time.monotonic())
            leads = {name: s for name, s in statuses.items() if s["cluster"] == s["peer"]}
            applied = {name: s["applied_at_step"].get(str(round)) for name, s in leads.items()}
            if (not applied or None in applied.values()) and time.monotonic() - seen < LATE_APPLY_SECONDS:
                return
            # The held-out loss of the state that this round made is measured after it, and recorded in the next commit.
            following = rows[round + 1] if round + 1 < len(rows) else None
            if following is None:
                return
            self._print(row, following, applied, self.states.before(round + 1))
            self._shown = round + 1

    def _print(
        self,
        row: dict[str, Any],
        following: dict[str, Any],
        applied: dict[str, int | None],
        roots: set[str],
    ) -> None:
        cells = [
            str(row["round"]),
            number(row["loss"]),
            number(row["evaluation_loss"]),
            f"{row['counted']}/{row['roster']}",
            f"{row['payload_bytes']:,}",
            " ".join("–" if step is None else str(step) for step in applied.values()),
            min(roots)[:12] if len(roots) == 1 else f"{len(roots)} DIFFER" if roots else "–",
        ]
        line = "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
        console.print(line, highlight=False, soft_wrap=True)

    @property
    def final_loss(self) -> float | None:
        """Held-out loss of the last committed model."""
        value: float | None = self.rows[-1]["evaluation_loss"]
        return value

    @property
    def inner_steps(self) -> int:
        """Inner steps of the cluster that took the most."""
        return max(sum(steps.values()) for steps in self.phase_steps.values())


def waits_for(coordinator: dict[str, Any] | None, nodes: dict[str, dict[str, Any]]) -> str:
    """Why there is no row yet, in a line."""
    if coordinator is None:
        return "the coordinator does not answer"
    before = [f"{name} {status['state']}, {status['why']}" for name, status in nodes.items() if not status["on_roster"]]
    return f"round {coordinator['round']}: {'; '.join([coordinator['why'], *before])}"


def _final(testnet: Testnet, manifest: Manifest, watched: Watcher, baseline: Path | None, private: list[Path]) -> None:
    """Print the results. `baseline`: folder of the corpus for one node alone; None: no baseline. `private`: private corpus
    of each node."""
    if fault := watched.states.fault:
        fail(fault)
    rows = [row for row in watched.rows if row["counted"]]
    payload = sum(row["payload_bytes"] / row["counted"] for row in rows) / max(1, len(rows))
    parameters = trained_count(manifest.model)
    console.print(
        f"\nheld-out loss of the committed model after {watched.inner_steps} inner steps: "
        f"{number(watched.final_loss)} nats per token",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"one payload is {payload:,.0f} bytes, {4 * parameters / payload:.1f} times smaller than the fp32 pseudo-gradient",
        highlight=False,
        soft_wrap=True,
    )
    _print_traffic(testnet, watched)
    if baseline is not None:
        sites: list[Path | None] = [*private] or [None]
        for folder in sites:
            with working(f"training one node alone for {watched.inner_steps} inner steps"):
                alone = _train_alone(testnet, watched.inner_steps, baseline, folder)
            who = f"{folder} alone" if folder is not None else "one node alone"
            console.print(
                f"held-out loss of {who} after {watched.inner_steps} inner steps: {number(alone)}",
                highlight=False,
                soft_wrap=True,
            )
    console.print("every node has the same state hash after every round", highlight=False)
    home = next(each.home for each in testnet.nodes)
    errors.print(f'next: dilocox generate --home {home} --prompt "def "', highlight=False, soft_wrap=True)
    errors.print(f"      dilocox export MODEL --home {home}", highlight=False, soft_wrap=True)


def _print_traffic(testnet: Testnet, watched: Watcher) -> None:
    """Print a row per host with a WAN link."""
    rounds, traffic = watched.traffic()
    counted = sum(watched.rows[number]["counted"] > 0 for number in rounds)
    if not counted:
        return
    console.print(
        f"\nWAN bytes of each host per counted round, in rounds {rounds[0]} to {rounds[-1]}, counted at its interface",
        highlight=False,
        soft_wrap=True,
    )
    columns = ["host", "sent", "received", "of its cluster's"]
    rows = []
    for member in testnet.nodes:
        box, cluster = traffic[member.name], [traffic[other.name] for other in testnet.nodes if other.lead == member.lead]
        sent, received = sum(each.sent for each in cluster), sum(each.received for each in cluster)
        share = f"{box.sent / sent:.0%} sent, {box.received / received:.0%} received"
        rows.append([member.name, f"{box.sent / counted:,.0f}", f"{box.received / counted:,.0f}", share])
    print_table(columns, rows)
    console.print()


def _train_alone(testnet: Testnet, steps: int, data: Path, private: Path | None) -> float:
    command = [
        sys.executable,
        "-P",
        "-m",
        "dilocox.node.training.worker.solo_baseline",
        str(testnet.folder / "run.toml"),
        str(steps),
        str(data),
        str(weights_library()),
        *(["--private", str(private)] if private is not None else []),
    ]
    told: dict[str, Any] = {}
    with (
        working("a node alone", steps) as bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            told = json.loads(line)
            bar.at(told["step"])
    if child.returncode or "evaluation_loss" not in told:
        raise LocalError("the baseline of one node did not finish; the error is above")
    loss: float = told["evaluation_loss"]
    return loss


@app.command("status")
def status(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Show which daemons run, and in which round."""
    testnet = Testnet.load(folder or testnet_folder())
    rows = [_member_status(member) for member in testnet.members]
    columns = ["member", "pid", "state", "round", "api", "home"]
    if testnet.network is not None and testnet.network.laid:
        columns += ["wan_sent", "wan_received"]
        for row, line in zip(rows, testnet.network.traffic(WAN).values(), strict=True):
            row.update({"wan_sent": line.sent, "wan_received": line.received})
    if as_json:
        print_json(rows)
        return
    print_table(columns, [["–" if row[column] is None else str(row[column]) for column in columns] for row in rows])


def _member_status(member: Member) -> dict[str, Any]:
    facts = member.facts() or {}
    value = member.get("/v1/status") or {}
    return {
        "member": member.name,
        "pid": facts.get("pid"),
        "state": value.get("state") or value.get("phase") or ("starting" if facts else "not running"),
        "round": value.get("round"),
        "api": facts.get("api"),
        "home": str(member.home),
    }


@app.command("kill")
def kill(
    name: Annotated[str, typer.Argument(help="coordinator, node-1, node-2, …")],
    folder: FolderOption = None,
    term: Annotated[bool, typer.Option("--term", help="Send SIGTERM instead of SIGKILL.")] = False,
) -> None:
    """Kill a member's daemon with SIGKILL."""
    testnet = Testnet.load(folder or testnet_folder())
    testnet.kill(testnet.member(name), signal.SIGTERM if term else signal.SIGKILL)


@app.command("start")
def start(name: Annotated[str, typer.Argument(help="A member that does not run.")], folder: FolderOption = None) -> None:
    """Restart a killed member on its folder, detached."""
    testnet = Testnet.load(folder or testnet_folder())
    member = testnet.member(name)
    if member.facts() is not None:
        fail(f"{name} already runs", Exit.USAGE)
    testnet.start(member, attached=False)


@app.command("down")
def down(folder: FolderOption = None) -> None:
    """Stop every member."""
    Testnet.load(folder or testnet_folder()).stop()
