"""Prometheus metrics of a node, in addition to those of its run (views/metrics.py)."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dilocox.node.member.participant import Participant
from dilocox.protocol.consensus.reputation import Record
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.reachability import Reachability
from dilocox.views.metrics import RunMetrics

__all__ = ["NodeMetrics", "node_metrics", "state_agreed"]


def node_metrics(
    registry: CollectorRegistry, participant: Participant, traffic: Traffic, reach: Reachability, connected: Callable[[], bool]
) -> RunMetrics:
    """Registers everything; what it returns is refreshed before each scrape."""

    def peers() -> Mapping[str, int]:
        return {"roster": len(participant.chain.head.cluster_by_peer)}

    run = RunMetrics("node", participant.chain, participant.machine.events, peers, traffic, participant.machine.cluster)
    registry.register(run)
    registry.register(NodeMetrics(participant, reach, connected))
    return run


def state_agreed(participant: Participant) -> bool | None:
    """Whether the newest of our states that the run agreed on is the run's; None: it agreed on none of those that we remember."""
    for number, root in sorted(participant.progress.roots.items(), reverse=True):
        if state := participant.chain.state_before(number):
            return state == root
    return None


class NodeMetrics(Collector):
    def __init__(self, participant: Participant, reach: Reachability, connected: Callable[[], bool]) -> None:
        self._participant, self._reach, self._connected = participant, reach, connected

    def collect(self) -> Iterable[Metric]:
        yield from self._work()
        yield from self._place()
        yield from self._attestations()

    def _work(self) -> Iterable[Metric]:
        progress = self._participant.progress
        yield GaugeMetricFamily("dilocox_train_loss", "Training loss, nats per token", value=progress.loss)
        yield GaugeMetricFamily("dilocox_step_seconds", "Wall time of an inner step", value=progress.step_seconds)
        yield CounterMetricFamily("dilocox_tokens", "Tokens in announced phases", value=progress.tokens)
        yield GaugeMetricFamily("dilocox_inner_steps", "Inner steps since the workers started", value=progress.total_steps)
        yield GaugeMetricFamily("dilocox_phase_round", "The round that this node trains for", value=progress.round)
        if (agreed := state_agreed(self._participant)) is not None:
            what = "1 if this node's newest agreed state is the run's"
            yield GaugeMetricFamily("dilocox_state_digest_agreed", what, value=agreed)

    def _place(self) -> Iterable[Metric]:
        node, head = self._participant, self._participant.chain.head
        state = GaugeMetricFamily("dilocox_node_state", "1 for the current state of the node", labels=["state"])
        state.add_metric([node.machine.status.name], 1)
        yield state
        yield GaugeMetricFamily(
            "dilocox_on_roster", "1 if on the open round's roster", value=node.machine.cluster in head.roster
        )
        yield GaugeMetricFamily("dilocox_coordinator_connected", "1 if the coordinator is live", value=self._connected())
        if self._reach.reachable is not None:
            yield GaugeMetricFamily("dilocox_reachable", "1 if other peers can reach this node", value=self._reach.reachable)
        earned = head.standings.get(node.machine.cluster, Record(0)).earned
        yield GaugeMetricFamily("dilocox_standing_earned_rounds", "Reputation of this node's cluster", value=earned)
        wanted = node.manifest.standing.rounds
        yield GaugeMetricFamily("dilocox_standing_full_rounds", "Full reputation; 0: all clusters are equal", value=wanted)

    def _attestations(self) -> Iterable[Metric]:
        """Yield attestations by kind: the labels of a metric must not grow with the swarm."""
        held = self._participant.chain.head.attestations.values()
        peers = GaugeMetricFamily("dilocox_peers_attested", "Peers with a valid verdict on their evidence", labels=["kind"])
        until = GaugeMetricFamily(
            "dilocox_attestation_valid_until", "Unix time at which the first of their verdicts expires", labels=["kind"]
        )
        for kind in sorted({item.kind for item in held}):
            ends = [item.valid_until_ms / 1000 for item in held if item.kind == kind]
            peers.add_metric([kind], len(ends))
            until.add_metric([kind], min(ends))
        return [peers, until] if until.samples else []
