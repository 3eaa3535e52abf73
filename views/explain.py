"""Why a round was slow or incomplete, or went without a cluster: from the chain, and from the events that are still stored."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dilocox.protocol.errors import LocalError
from dilocox.protocol.ids import is_meant, printable, short
from dilocox.protocol.member.node_status import Status
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import Happened
from dilocox.views.json_views import USUAL
from dilocox.views.reasons import advice

__all__ = ["NotThere", "explain", "named"]

View = dict[str, Any]
ReadEvents = Callable[[int], Sequence[Happened]]
"""Returns the events of a round, oldest first."""

SLOW, SLOW_SECONDS = 1.5, 1.0
"""A round is slow above this multiple of the usual time, and by more than this."""
WAITS_SHOWN = 3
"""Most entries of the list of longest waits."""
LOOK_BACK = 64
"""Rounds that are searched for a peer that is not on the roster."""


OPEN: View = {"verdict": "open", "seconds": None, "usual_seconds": None, "slow_above_seconds": None}


def named(view: View, names: Mapping[str, str]) -> View:
    """Return an explanation with names beside the short ids of peers. `names`: by peer id, as the peers call themselves."""
    shown = {short(peer): f"{printable(name)} ({short(peer)})" for peer, name in names.items() if name}
    if not shown:
        return view
    pattern = re.compile("|".join(map(re.escape, sorted(shown))))

    def told(text: str) -> str:
        return pattern.sub(lambda found: shown[found[0]], text)

    return {**view, "findings": [{**row, "says": told(row["says"])} for row in view["findings"]]}


class NotThere(LocalError):
    """Error: the round or peer does not exist. `code`: see error_codes.py."""

    def __init__(self, says: str, code: str) -> None:
        super().__init__(says)
        self.code = code


def explain(
    chain: ChainFile, events: ReadEvents, number: int, peer: str = "", me: str = "", stands: Status | None = None
) -> View:
    """`peer`: the beginning of the id of a cluster that is asked about; `me`: the one called this node, `stands`: where it
    stands now, if that is known. Blocking: reads the file.

    Raises NotThere where there is no such round, or no such cluster.
    """
    happened, told = events(number), chain.detail(number)
    if told is None and number != chain.length:
        raise NotThere(f"no round {number} yet: round {chain.length} is the newest", code="no-such-round")
    if told is None and chain.head.finished:
        raise NotThere(f"no round {number}: the run is finished, its last round was {number - 1}", code="no-such-round")
    name = _one(chain, number, told, peer) if peer else me
    if told is None:
        says = [*_waited(happened, None), *([_mine_now(chain, name, me, stands)] if name else [])]
        open_rows = says or [_row("open", "no commit closed it yet; the reason is not recorded")]
        return {**OPEN, "round": number, "findings": open_rows}
    detail: View = json.loads(told)
    before = [row for row in json.loads(chain.rows(max(0, number - USUAL), number)) if row["counted"]]
    usual = {key: _median(before, key) for key in ("seconds", "collect_seconds", "vote_seconds")}
    median = usual["seconds"]
    slow_above = max(SLOW * median, median + SLOW_SECONDS) if median is not None else None
    words = ["slow"] * (slow_above is not None and detail["seconds"] > slow_above) + ["incomplete"] * bool(detail["excluded"])
    verdict = " and ".join(words) or "in the usual range"
    findings = [
        *_times(detail, usual, len(before)),
        *_last(happened),
        *_waited(happened, detail["seconds"]),
        *_counting(detail, chain.manifest.rounds.min_clusters),
        *_clips(detail),
        *_audits(detail),
        *([_mine(chain, number, name, me, detail, happened)] if name and not _counts_nobody(detail) else []),
    ]
    return {
        "round": number,
        "verdict": verdict,
        "seconds": detail["seconds"],
        "usual_seconds": median,
        "slow_above_seconds": slow_above,
        "findings": findings,
    }


def _row(about: str, says: str, do: str = "") -> View:
    return {"about": about, "says": says, "do": do}


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return statistics.median(row[key] for row in rows) if rows else None


def _times(detail: View, usual: Mapping[str, float | None], rounds: int) -> Iterator[View]:
    def beside(key: str) -> str:
        return f" (median of the {rounds} before: {usual[key]:.1f} s)" if usual[key] is not None else ""

    yield _row("time", f"{detail['seconds']:.1f} s from its opening to its commit{beside('seconds')}")
    if detail["collect_seconds"]:
        yield _row(
            "collect", f"more than half had contributed after {detail['collect_seconds']:.1f} s{beside('collect_seconds')}"
        )
    if detail["vote_seconds"]:
        yield _row("vote", f"more than half had voted {detail['vote_seconds']:.1f} s after the ballot{beside('vote_seconds')}")


def _last(happened: Sequence[Happened]) -> Iterator[View]:
    """Yield the last contribution, and its distance to the one before."""
    for kind, what, about in (("ballot-opened", "contribution", "collect"), ("round-closed", "vote", "vote")):
        for event in happened:
            if event.kind != kind or not event.body["last"]:
                continue
            arrivals = event.body["last"]
            gap = f", {arrivals[-1]['seconds'] - arrivals[-2]['seconds']:.1f} s after the one before it" if arrivals[1:] else ""
            yield _row(
                about, f"the last {what} came from {short(arrivals[-1]['cluster'])} at {arrivals[-1]['seconds']:.1f} s{gap}"
            )


def _waited(happened: Sequence[Happened], seconds: float | None) -> Iterator[View]:
    """Yield the reasons for the wait, longest first; for the open round (`seconds` None) the current ones, too."""
    said = [event for event in happened if event.kind in ("round-open", "round-closed")]
    spans = [
        (later.seconds - event.seconds, event.body["why"]) for event, later in pairwise(said) if event.kind == "round-open"
    ]
    whys = sorted(((span, why) for span, why in spans if span >= max(0.5, 0.1 * (seconds or 0.0))), reverse=True)
    for span, why in whys[:WAITS_SHOWN]:
        yield _row("waited", f"{span:.1f} s: {why}")
    if said and said[-1].kind == "round-open" and seconds is None:
        yield _row("open", said[-1].body["why"])


def _counts_nobody(detail: View) -> bool:
    """Whether it is the first commit, which seats, or the last, which agrees on what the round before made."""
    return detail["round"] == 0 or detail["closing"]


def _counting(detail: View, least: int) -> Iterator[View]:
    """`least`: what the run needs for a round to count anybody."""
    if detail["round"] == 0:
        yield _row("began", f"its commit seated {len(detail['next_roster'])} clusters, with which the run began")
        return
    if detail["closing"]:
        yield _row("counted", "the round's commit agreed on the run's last state: it counts no cluster")
        return
    nobody = f"; the run needs at least {least} clusters" if detail["roster"] and not detail["counted"] else ""
    yield _row("counted", f"{detail['counted']} of {detail['roster']} clusters{nobody}")
    for item in detail["excluded"]:
        yield _excluded(item)
    for item in detail["refused"]:
        if item not in detail["excluded"]:
            said = advice(item["reason"])
            yield _row(
                "refused", f"a statement of {short(item['peer'])}: {item['reason']}: {said.means}{_detail(item)}", said.do
            )


def _excluded(item: View) -> View:
    said = advice(item["reason"])
    return _row("not counted", f"{short(item['peer'])}: {item['reason']}: {said.means}{_detail(item)}", said.do)


def _detail(item: View) -> str:
    return f" ({item['detail']})" if item["detail"] else ""


def _clips(detail: View) -> Iterator[View]:
    for item in detail["clusters"]:
        if item["clipped"] < 1:
            norms = f"{item['norm']:.3g} (the median: {detail['median_norm']:.3g})"
            yield _row(
                "clipped",
                f"{short(item['cluster'])} to {item['clipped']:.2f} of its norm {norms}",
                "the clipped part stays in the cluster's error feedback, and a later round counts it",
            )


def _audits(detail: View) -> Iterator[View]:
    """Yield results of audits of earlier rounds."""
    for audit in detail["audits"]:
        found = Counter(each["found"] for each in audit["auditors"])
        told = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        yield _row("audited", f"what {short(audit['cluster'])} trained in round {audit['round']}: of its auditors found {told}")


def _roster(detail: View) -> set[str]:
    return {item["cluster"] for item in detail["clusters"]} | {item["peer"] for item in detail["excluded"]}


def _one(chain: ChainFile, number: int, told: str | None, peer: str) -> str:
    """The cluster whose id begins so, in this round or one of those before it."""
    rounds = [told] if told else []
    known = set(chain.head.roster).union(*(_roster(json.loads(each)) for each in rounds))
    found = {name for name in known if is_meant(name, peer)}
    for earlier in range(number - 1, max(-1, number - LOOK_BACK), -1):
        if found:
            break
        found = {name for name in _roster(json.loads(chain.detail(earlier) or "{}") or _NOBODY) if is_meant(name, peer)}
    if len(found) != 1:
        which = "several clusters'" if found else "no cluster's"
        raise NotThere(f"{peer} begins {which} id around round {number}", code="no-such-peer")
    return found.pop()


_NOBODY: View = {"clusters": [], "excluded": []}


def _called(name: str, me: str) -> tuple[str, str]:
    """One cluster, and what a row about it is about."""
    return ("this node", "this node") if name == me else (short(name), "cluster")


def _mine_now(chain: ChainFile, name: str, me: str, stands: Status | None) -> View:
    """Return the state of one cluster's work in the open round. A roster alone does not show paused clusters."""
    who, about = _called(name, me)
    says = f"{who} is {'' if name in chain.head.roster else 'not '}on the roster"
    if stands is None or name != me:
        return _row(about, says)
    return _row(about, f"{says}; it is {stands.name}: {stands.why}", stands.advice)


def _mine(chain: ChainFile, number: int, name: str, me: str, detail: View, happened: Sequence[Happened]) -> View:
    """Return the result of one cluster's work in a closed round."""
    who, about = _called(name, me)
    for item in detail["clusters"]:
        if item["cluster"] == name:
            return _row(
                about, f"{who} was counted: {item['tokens']:,} tokens, weight {item['weight']:,}{_arrived(name, happened)}"
            )
    for item in detail["excluded"]:
        if item["peer"] == name:
            said = advice(item["reason"])
            arrived = _arrived(name, happened)
            return _row(about, f"{who} was not counted: {item['reason']}: {said.means}{_detail(item)}{arrived}", said.do)
    for earlier in range(number - 1, max(-1, number - LOOK_BACK), -1):
        was = json.loads(chain.detail(earlier) or "null")
        if was is not None and name in _roster(was):
            why = next((item["reason"] for item in was["excluded"] if item["peer"] == name), "counted")
            do = advice("left" if why == "counted" else why).do  # it was counted, and then left or paused
            return _row(about, f"{who} was not on the roster; it was last in round {earlier}: {why}", do)
    return _row(
        about, f"{who} was not on the roster, and not in the {LOOK_BACK} rounds before", "nothing: it claims a seat by itself"
    )


def _arrived(name: str, happened: Sequence[Happened]) -> str:
    ways = {"ballot-opened": "its contribution came", "round-closed": "its vote"}
    times = [
        f"{ways[event.kind]} at {each['seconds']:.1f} s"
        for event in happened
        if event.kind in ways
        for each in event.body["last"]
        if each["cluster"] == name
    ]
    return f"; {', '.join(times)}" if times else ""
