"""Prometheus metrics of a run, for nodes and coordinators, computed from the JSON views.

Counters start with the daemon, as Prometheus expects. No label grows with the swarm: none contains a peer.
"""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from dilocox.protocol.events import Event
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog

__all__ = ["PHASES", "Healthy", "RunMetrics"]

PHASES = {"collect": "collect_seconds", "vote": "vote_seconds", "whole": "seconds"}
"""Parts of a round, with the field of their seconds in a row."""
LOOK_BACK = 16
"""Rounds before this start that are searched for `me`."""


def outcome(row: Mapping[str, Any]) -> str:
    """Return the outcome of a round, from its row."""
    if row["closing"]:
        return "closing"
    if not row["counted"]:
        return "roster-only"
    return "complete" if row["counted"] == row["roster"] else "short"


class Healthy(Collector):
    """Metric of `health` (health.py); absent while it is unknown."""

    def __init__(self) -> None:
        self.well: bool | None = None

    def collect(self) -> Iterable[Metric]:
        if self.well is not None:
            yield GaugeMetricFamily("dilocox_well", "1 if the daemon is healthy, as in /readyz", value=self.well)


class RunMetrics(Collector):
    """The commits that were appended since the start are added up before each scrape (`refresh`, in a thread)."""

    def __init__(
        self,
        role: str,
        chain: ChainFile,
        events: EventLog,
        peers: Callable[[], Mapping[str, int]],
        traffic: Traffic,
        me: str = "",
    ) -> None:
        """Collect metrics. `peers`: number of peers by state. `me`: the cluster whose counted rounds are reported."""
        self._role, self._chain, self._events, self._peers, self._traffic, self._me = role, chain, events, peers, traffic, me
        self._refreshing = threading.Lock()
        self._next = chain.length
        self._rounds: Counter[str] = Counter()
        self._contributions: Counter[tuple[str, str]] = Counter()
        self._phases: dict[str, tuple[int, float]] = dict.fromkeys(PHASES, (0, 0.0))
        self._missed: int | None = None
        """Commits in a row that counted others and not `me`; None: none of either kind was seen."""
        self._losses: dict[str, float | None] = {"loss": None, "evaluation_loss": None}
        for number in range(max(0, self._next - LOOK_BACK), self._next):
            self._detail(number)

    def refresh(self) -> None:
        """Blocking: reads what was appended."""
        with self._refreshing:
            self._next = min(self._next, self._chain.length)  # the owner may have given up commits
            while (detail := self._detail(self._next)) is not None:
                self._count(detail)
                self._next += 1

    def _detail(self, number: int) -> dict[str, Any] | None:
        text = self._chain.detail(number)
        if text is None:
            return None
        detail: dict[str, Any] = json.loads(text)
        for key in self._losses:
            self._losses[key] = detail[key] if detail[key] is not None else self._losses[key]
        if detail["counted"] and self._me:
            mine = any(item["cluster"] == self._me for item in detail["clusters"])
            self._missed = 0 if mine else (self._missed or 0) + 1
        return detail

    def _count(self, detail: Mapping[str, Any]) -> None:
        self._rounds[outcome(detail)] += 1
        self._contributions["counted", ""] += detail["counted"]
        for item in detail["excluded"]:
            self._contributions["excluded", item["reason"]] += 1
        for phase, key in PHASES.items():
            if detail[key]:
                count, total = self._phases[phase]
                self._phases[phase] = count + 1, total + detail[key]

    def collect(self) -> Iterable[Metric]:
        head = self._chain.head
        build = {"role": self._role, "version": metadata.version("dilocox")}
        yield InfoMetricFamily("dilocox_build", "Role and version of this daemon", value=build)
        yield GaugeMetricFamily("dilocox_round_current", "Number of the open round", value=head.round)
        yield GaugeMetricFamily("dilocox_rounds_wanted", "Rounds of the run", value=self._chain.manifest.rounds.count)
        yield GaugeMetricFamily("dilocox_run_finished", "1 if the run has closed its last round", value=head.finished)
        if head.round and not head.finished:
            since = max(0.0, time.time() - head.closed_at_ms / 1000)
            yield GaugeMetricFamily("dilocox_round_open_seconds", "Seconds since the open round was opened", value=since)
        yield GaugeMetricFamily("dilocox_roster_clusters", "Clusters on the open round's roster", value=len(head.roster))
        yield from self._event_metrics()
        yield from self._of_rounds()
        yield from self._of_machine()

    def _event_metrics(self) -> Iterable[Metric]:
        happened = CounterMetricFamily("dilocox_events", "Events, by kind", labels=["kind"])
        for kind in sorted(each.kind for each in Event.__subclasses__()):
            happened.add_metric([kind], self._events.kinds[kind])
        peers = GaugeMetricFamily("dilocox_peers", "Peers, by state", labels=["state"])
        for state, count in sorted(self._peers().items()):
            peers.add_metric([state], count)
        return [happened, peers]

    def _of_rounds(self) -> Iterable[Metric]:
        rounds = CounterMetricFamily("dilocox_rounds", "Rounds closed, by outcome", labels=["outcome"])
        for name in ("complete", "short", "roster-only", "closing"):
            rounds.add_metric([name], self._rounds[name])
        votes = CounterMetricFamily("dilocox_contributions", "Clusters of rosters, by verdict", labels=["verdict", "reason"])
        for (verdict, reason), count in sorted(self._contributions.items()):
            votes.add_metric([verdict, reason], count)
        phases = SummaryMetricFamily("dilocox_round_phase_seconds", "Duration of rounds, by phase", labels=["phase"])
        for phase, (count, total) in self._phases.items():
            phases.add_metric([phase], count, total)
        yield from (rounds, votes, phases)
        for name, key, what in (
            ("dilocox_round_loss", "loss", "Training loss of the last round that counted a cluster, nats per token"),
            ("dilocox_held_out_loss", "evaluation_loss", "Held-out loss of the newest measured state, nats per token"),
        ):
            if (value := self._losses[key]) is not None:
                yield GaugeMetricFamily(name, what, value=value)
        if self._missed is not None:
            yield GaugeMetricFamily(
                "dilocox_counted", "1 if the last counting commit counted this node", value=self._missed == 0
            )
            yield GaugeMetricFamily("dilocox_rounds_missed", "Counting commits in a row without this node", value=self._missed)

    def _of_machine(self) -> Iterable[Metric]:
        moved = CounterMetricFamily("dilocox_network_bytes", "Bytes of messages, by kind", labels=["direction", "kind"])
        for (direction, kind), count in sorted(self._traffic.bytes.items()):
            moved.add_metric([direction, kind], count)
        allowed = GaugeMetricFamily("dilocox_network_limit_bytes_per_second", "Current limit of traffic", labels=["direction"])
        for direction, limit in (("sent", self._traffic.upload), ("received", self._traffic.download)):
            if (rate := limit.bytes_per_second) is not None:
                allowed.add_metric([direction], rate)
        yield from (moved, allowed)
        disk = shutil.disk_usage(self._chain.path.parent)
        yield GaugeMetricFamily("dilocox_disk_free_bytes", "Free space on the disk of the run's folder", value=disk.free)
        yield GaugeMetricFamily("dilocox_disk_size_bytes", "Size of that disk", value=disk.total)
