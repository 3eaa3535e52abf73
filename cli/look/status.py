"""`dilocox status | peers | rounds`: print what the running daemon knows, or its folder where none runs."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    AskOption,
    JsonOption,
    api_call,
    console,
    fail,
    has_ended,
    number,
    print_json,
    print_labelled,
    print_table,
    telling_daemon,
)
from dilocox.cli.exit_codes import Exit
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import is_meant, several, short
from dilocox.views.error_codes import do_about
from dilocox.views.health import uncounted

__all__ = ["PEER_COLUMNS", "ROUND_COLUMNS", "peer_row", "peers", "round_row", "rounds", "status", "status_rows"]

LABEL_WIDTH = 9


def status(
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 6 if the daemon is not healthy, with 4 if that is not known yet."),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show status, rounds and peers live, until Ctrl-C.")] = False,
    every: Annotated[
        float | None, typer.Option(min=0.5, max=3600, help="Seconds between two updates of --watch (default: 2).")
    ] = None,
    home: AskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show on one screen whether a daemon is reachable, in sync, in this round, and counted."""
    if watch:
        if check or as_json:
            raise ConfigError("--watch prints a screen: remove --check and --json")
        from dilocox.cli.look.watch import watch as show_live  # loads slowly

        show_live(home, every or 2.0)
        return
    if every is not None:
        raise ConfigError("--every sets the interval of --watch: pass both")
    ended = has_ended(home)
    value = _stored().status(home) if ended else api_call(home, "/v1/status")
    if as_json:
        print_json(value)
    else:
        for label, text in status_rows(value):
            print_labelled(label, text, LABEL_WIDTH)
    if ended:
        raise typer.Exit(Exit.NOT_RUNNING)
    if check and (code := verdict(value)):
        raise typer.Exit(code)


def _listed(stages: Iterable[int]) -> str:
    from dilocox.node.workers.placement import listed  # loads slowly, and `status` of a node alone needs none

    return listed(stages)


def _stored() -> Any:
    """Return what reads a folder where no daemon runs. It loads slowly: a running daemon is asked without it."""
    from dilocox.cli import offline

    return offline


def verdict(value: dict[str, Any]) -> int:
    """The exit code of `--check`."""
    return {True: 0, False: Exit.DEGRADED, None: Exit.UNKNOWN}[value["health"]["well"]]


def status_rows(value: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and lines, of any role."""
    lines = {
        "node": _node_lines,
        "coordinator": _coordinator_lines,
        "relay": _relay_lines,
        "archive": _archive_lines,
        "waiting": _waiting_lines,
        "stopped": _stopped_lines,
    }
    return [*lines[value["role"]](value), _well(value["health"])]


def _well(health: dict[str, Any]) -> tuple[str, str]:
    word = {True: "yes", False: "no", None: "not known yet"}[health["well"]]
    return "healthy", word if health["well"] else f"{word}: {health['why']}"


def _waiting_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    return [("state", value["why"]), *([("help", value["advice"])] if value["advice"] else [])]


def _stopped_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    run, counted = value["run"], value["counted"]
    who = f"   node {short(value['peer'])}" if value["peer"] else ""
    is_open = f"round {value['round']} was open; {value['trained']} of {run['rounds']} rounds counted a cluster"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value["closed_at"]))
    return [
        ("run", f"{run['name']} ({run['run_id'][:8]}…){who}   {value['folder']}"),
        ("state", f"{value['why']}; {'the run is finished' if value['finished'] else is_open}"),
        ("last", f"the commit of round {value['round'] - 1} was made at {at}" if value["round"] else "no commit was made"),
        *([("counted", f"{sum(counted)} of the last {len(counted)} rounds")] if counted else []),
        ("help", "`dilocox rounds`, `rounds N --why`, `events`, `verify` and `export` also read this folder"),
    ]


def _node_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    run, counted = value["run"], value["counted"]
    lines = [("run", f'{run["name"]} ({run["run_id"][:8]}…)   node {short(value["peer"])} "{value["name"]}"')]
    if value["finished"]:
        lines.append(("state", value["why"]))
    else:
        phase = f"round {value['phase_round']}/{run['rounds']}, inner step {value['inner_step']}/{value['inner_steps']}"
        if value["state"] == "paused":
            phase = f"since round {value['phase_round']}/{run['rounds']}"
        phase += f", {spell(value['phase_seconds_left'])} left" if value["phase_seconds_left"] else ""
        away = "the coordinator is away"
        lines += [
            ("state", f"{value['state']}: {value['why']}   {phase}"),
            ("round", f"{value['round']} is open: {value['round_why']}" if value["coordinator_connected"] else away),
        ]
    lines += _left(value)
    if value["privacy"] is not None:
        lines.append(("privacy", value["privacy"]))
    if value["hours"] is not None:
        lines.append(("hours", f"trains at {value['hours']} by this machine's clock"))
    if len(value["boxes"]) > 1 or value["cluster"] != value["peer"]:
        hosts = "; ".join(f"{short(box['peer'])} {_listed(box['stages'])}" for box in value["boxes"])
        lines.append(("cluster", f"lead host {short(value['cluster'])}   stages by host: {hosts or 'not on the roster yet'}"))
    lines += [
        ("network", f"{value['address']}   {value['reach']}{_clock(value['clock_offset'])}"),
        ("counted", f"{sum(counted)} of the last {len(counted)} rounds" if counted else uncounted(value)),
        ("speed", f"{value['tokens_per_second']:,.0f} tok/s   loss {number(value['loss'])}{_of_round(value)}"),
        ("traffic", network_line(value["network"])),
    ]
    if not value["codec_native"]:
        lines.append(("codec", "runs its reference: install a C compiler, then dilocox again, for the fast path"))
    if (download := value["downloading"]) is not None:
        held, size = download["held"], download["size"]
        lines.append(("fetching", f"{held:,} of {size:,} B ({held / size:.0%})"))
    if (result := value["attestation"]) is not None:
        label = "SIMULATED" if result["kind"] == "simulated" else result["kind"]
        text = f"until {_until(result)}" if result["attested"] else f"refused: {result['code']}: {result['reason']}"
        lines.append(("attested", f"{label}, {text}"))
    for item in value["excluded"]:
        last = "the last round counted no cluster" if value["nobody_counted"] else "not counted"
        lines += [("warning", f"{last}: {_reason(item)}"), *([("help", item["do"])] if item["do"] else [])]
    if value["nobody_keeps"]:
        why = "no cluster of the roster is reachable, and the run has no relay and no archive: no cluster can be counted"
        lines += [
            ("warning", why),
            ("help", "open the port of one node, or name a relay in the next run (dilocox relay, dilocox archive)"),
        ]
    lines += [("help", value["advice"])] if value["advice"] else []
    return lines


def _left(value: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the estimated time until the run ends."""
    seconds, rounds = value["seconds_left"], value["run"]["rounds"]
    if seconds is None or value["finished"]:
        return []
    ends = time.strftime("%a %d %b %H:%M", time.localtime(time.time() + seconds))
    return [("left", f"about {spell(seconds)} to round {rounds}: {ends}")]


def spell(seconds: float) -> str:
    """A duration, in the two units that matter."""
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // smaller:.0f} {below}"
    return f"{seconds:.0f} s"


def _clock(offset: float | None) -> str:
    return "" if offset is None else f"   clock {1000 * offset:+,.0f} ms"


def _of_round(value: dict[str, Any]) -> str:
    """Return the bytes sent in the last whole round, beside those of an AllReduce of every gradient."""
    last = value["network"]["last_round"]
    if last is None:
        return ""
    less = value["allreduce_bytes"] / last["sent"] if last["sent"] else 0
    return f"   sent {last['sent']:,} B in round {last['round']}" + (f", {less:,.0f}x less than AllReduce" if less >= 2 else "")


def network_line(network: dict[str, Any]) -> str:
    """Bytes since the start, and the limits in force."""
    return ", ".join(
        f"{way} {sum(network[way].values()):,} B{_limit(network[limit])}"
        for way, limit in (("sent", "upload"), ("received", "download"))
    )


def _limit(allowed: dict[str, Any]) -> str:
    rate, until = allowed["bytes_per_second"], allowed["until"]
    if rate is None and until is None:
        return ""
    ends = f" until {time.strftime('%H:%M', time.localtime(until))}" if until is not None else ""
    return f" ({'no limit' if rate is None else f'at most {8 * rate / 1e6:g} Mbit/s'}{ends})"


def _reason(item: dict[str, Any]) -> str:
    return f"{item['reason']}: {item['detail']}" if item["detail"] else str(item["reason"])


def _coordinator_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    run = value["run"]
    lines = [("run", f'{run["name"]} ({run["run_id"][:8]}…)   coordinator {short(value["peer"])} "{value["name"]}"')]
    if value["finished"]:
        return [*lines, ("state", value["why"])]
    counts = f"{value['contributions']} contributions, {value['receipts']} votes of {len(value['roster'])} clusters"
    lines += [("state", f"{value['phase']}: {value['why']}"), ("round", f"{value['round']}/{run['rounds']}: {counts}")]
    lines += [
        *_left(value),
        ("traffic", network_line(value["network"])),
        *(("absent", short(peer)) for peer in value["absent"]),
    ]
    lines += [("refused", f"{short(item['peer'])}: {_reason(item)}") for item in value["refused"]]
    roles = {True: "leads", False: "standby"}
    lines += [(roles[each["leads"]], f'"{each["name"]}" at {each["address"]}') for each in value["coordinators"]]
    return lines


def _relay_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    run = value["run"]
    return [
        ("run", f'{run["name"]} ({run["run_id"][:8]}…)   {value["role"]} {short(value["peer"])} "{value["name"]}"'),
        ("state", "the run is finished" if value["finished"] else f"round {value['round']}/{run['rounds']} is open"),
        ("network", f"{value['address']}   {value['reach']}"),
        ("stores", f"{several(value['kept_blobs'], 'blob')}, {value['kept_bytes']:,} B"),
        ("traffic", network_line(value["network"])),
        *([] if value["coordinator_connected"] else [("warning", "the coordinator is away")]),
    ]


def _archive_lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    archive = value["archive"]
    states = archive["snapshots"]
    kept = f"states of {several(len(states), 'round')}, the last {states[-1]}" if states else "no state yet"
    log = "; ".join(f"{first} … {last}" for first, last in archive["payloads"])
    return [
        *_relay_lines(value),
        ("archive", archive["url"]),
        ("contains", f"{archive['commits']} commits; {kept}; {'the data' if archive['data'] else 'not all of the data yet'}"),
        *([("payloads", f"of rounds {log}")] if log else []),
        *([("warning", archive["why"])] if archive["why"] else []),
    ]


def peers(
    peer: Annotated[
        str | None, typer.Argument(help="Only peers whose id begins with this; or an id as tables print it, 12D3…k7Qm.")
    ] = None,
    stages: Annotated[bool, typer.Option("--stages", help="List the stages instead, with the replicas of each.")] = False,
    home: AskOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the peers of the run."""
    if stages:
        if peer is not None:
            raise ConfigError("--stages lists the stages of the run: remove PEER")
        _print_stages(home, as_json)
        return
    known = _stored().peers(home) if has_ended(home) else api_call(home, "/v1/peers")
    rows = [row for row in known if peer is None or is_meant(row["peer"], peer)]
    if peer is not None and not rows:
        fail(f"no peer's id begins with {peer}", Exit.USAGE, do_about("no-such-peer"), "no-such-peer")
    if as_json:
        print_json(rows)
        return
    print_table(PEER_COLUMNS, [peer_row(row) for row in rows])


PEER_COLUMNS = [
    "peer",
    "name",
    "address",
    "cluster",
    "stages",
    "roster",
    "reputation",
    "present",
    "round",
    "step",
    "loss",
    "tok/s",
    "attested",
]


def peer_row(row: dict[str, Any]) -> list[str]:
    return [
        row["peer"],
        row["name"] or "–",
        row["address"] or "–",
        short(row["cluster"]) if row["cluster"] else "–",
        _listed(row["stages"]),
        "yes" if row["on_roster"] else "no",
        _standing(row["standing"]) if row["standing"] else "–",
        {True: "yes", False: "no", None: "–"}[row["present"]],
        "–" if row["round"] is None else str(row["round"]),
        "–" if row["step"] is None else str(row["step"]),
        number(row["loss"]),
        number(row["tokens_per_second"], 0),
        _kind(row["attestation"]) if row["attestation"] else "–",
    ]


def _standing(record: dict[str, int]) -> str:
    """Return what a cluster earned, of the most it can, and how often it was rejected."""
    told = f"{record['earned']}/{record['of']}" if record["of"] else f"{record['counted']} counted"
    return f"{told}, {record['refused']} refused" if record["refused"] else told


def _kind(attestation: dict[str, Any]) -> str:
    return "SIMULATED" if attestation["simulated"] else attestation["kind"]


def _until(attestation: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(attestation["valid_until"]))


def _print_stages(home: Path | None, as_json: bool) -> None:
    rows = api_call(home, "/v1/stages") if telling_daemon(home) else _stored().stages(home)
    if as_json:
        print_json(rows)
        return
    shown = [
        [
            str(row["stage"]),
            f"{row['first_unit']}-{row['last_unit']}",
            f"{row['parameters']:,}",
            str(row["replicas"]),
            "only one replica: without it the run stops" if row["replicas"] == 1 else "",
        ]
        for row in rows
    ]
    print_table(["stage", "units", "parameters", "replicas", "warning"], shown)


def rounds(
    round: Annotated[
        int | None, typer.Argument(metavar="[N]", min=0, max=limits.ROUNDS - 1, help="Show this round in full.")
    ] = None,
    peer: Annotated[
        str,
        typer.Argument(
            metavar="[PEER]", help="With --why: a cluster, by the beginning of its id or as tables print it, 12D3…k7Qm."
        ),
    ] = "",
    why: Annotated[
        bool, typer.Option("--why", help="Explain why round N was slow or incomplete, or did not count this node (or PEER).")
    ] = False,
    home: AskOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the rounds, or show the clusters of one: counted or not, and why."""
    if why:
        if round is None:
            raise ConfigError("--why needs a round: run `dilocox rounds N --why`")
        from dilocox.cli.look.explain import print_why

        print_why(round, peer, home, as_json)
        return
    if peer:
        raise ConfigError(f"PEER ({peer}) needs --why: run `dilocox rounds {round} {peer} --why`")
    if telling_daemon(home):
        value = api_call(home, "/v1/rounds" if round is None else f"/v1/rounds/{round}")
    else:
        value = _stored().rounds(home, round)
    if as_json:
        print_json(value)
    elif round is None:
        print_table(ROUND_COLUMNS, [round_row(row) for row in value])
    else:
        _print_round(value)


ROUND_COLUMNS = ["round", "loss", "counted", "bytes", "seconds", "state before", "held-out before"]


def round_row(row: dict[str, Any]) -> list[str]:
    return [
        str(row["round"]) + (" closing" if row["closing"] else ""),
        number(row["loss"]),
        f"{row['counted']}/{row['roster']}",
        f"{row['payload_bytes']:,}",
        number(row["seconds"], 1),
        row["state"][:12] or "–",
        number(row["evaluation_loss"]),
    ]


def _print_round(value: dict[str, Any]) -> None:
    print_table(ROUND_COLUMNS, [round_row(value)])
    rows = [
        [
            item["cluster"],
            f"{item['tokens']:,}",
            f"{item['weight']:,}",
            f"{item['bytes']:,}",
            f"{item['norm']:.3f}",
            f"{item['clipped']:.2f}",
            number(item["effective_rank"] or None, 1),
            item["leaves"][:12],
        ]
        for item in value["clusters"]
    ]
    if rows:
        console.print()
        print_table(["counted", "tokens", "weight", "bytes", "norm", "clipped to", "effective rank", "index"], rows)
    attested = [
        [
            item["peer"],
            _kind(item),
            item["measurement"][:32],
            item["tcb_status"] or "–",
            str(item["gpus"]),
            _until(item),
            "yes" if item["bound"] else "no",
        ]
        for cluster in value["clusters"]
        for item in cluster["attestations"]
    ]
    if attested:
        console.print()
        print_table(["attested", "kind", "measurement", "TCB status", "GPUs", "valid until", "bound"], attested)
    if value["audits"]:
        console.print()
        found = [
            [audit["cluster"], str(audit["round"]), ", ".join(f"{short(e['cluster'])} {e['found']}" for e in audit["auditors"])]
            for audit in value["audits"]
        ]
        print_table(["audited", "its round", "found by"], found)
    refused = [item for item in value["refused"] if item not in value["excluded"]]  # an absent cluster is in both lists
    for title, items in (("excluded", value["excluded"]), ("refused", refused)):
        if items:
            console.print()
            print_table([title, "reason", "detail"], [[i["peer"], i["reason"], i["detail"]] for i in items])
