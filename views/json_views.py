"""JSON views of a run. Node, coordinator, command line and tests all use them."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from dilocox.protocol.consensus.chain import CountedPayload, holders, taken
from dilocox.protocol.consensus.head import Head, resting_on
from dilocox.protocol.consensus.reputation import Record
from dilocox.protocol.errors import reason_name
from dilocox.protocol.norms import norm_of
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_tensors, stage_units, trained_count
from dilocox.protocol.wire.attestation import SIMULATED
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.limits.traffic import Traffic

__all__ = [
    "USUAL",
    "allreduce_bytes",
    "boxes",
    "network",
    "peers",
    "round_detail",
    "round_row",
    "run",
    "seconds_left",
    "stages",
]

View = dict[str, Any]
USUAL = 8
"""Rounds whose median is what is usual."""


def run(manifest: Manifest) -> View:
    return {
        "name": manifest.run.name,
        "run_id": manifest.run_id.hex(),
        "rounds": manifest.rounds.count,
        "stages": manifest.model.stages,
        "parameters": parameter_count(manifest.model),
        "overlap": manifest.rounds.overlap,
        "codec": manifest.compression.codec,
        "rank_or_k": manifest.compression.keep,
    }


def network(traffic: Traffic) -> View:
    """Return the bytes that this daemon sent and received since its start, by kind, and in the last whole round; and its
    current bandwidth limits."""
    last = traffic.last_round
    return {
        "sent": traffic.of("sent"),
        "received": traffic.of("received"),
        "last_round": last._asdict() if last is not None else None,
        "upload": traffic.upload.now()._asdict(),
        "download": traffic.download.now()._asdict(),
    }


def allreduce_bytes(manifest: Manifest, clusters: int, inner_steps: int) -> int:
    """Return the bytes that each cluster would send for these inner steps, if a ring averaged the gradients of each in two
    bytes."""
    return 2 * (clusters - 1) * 2 * trained_count(manifest.model) * inner_steps // clusters if clusters else 0


def seconds_left(manifest: Manifest, head: Head, rows: Iterable[View], stands_still: bool = False) -> float | None:
    """Return the seconds until the run's last round ends, if each takes the median of these rows. None: no row contains
    training, or the run is below its quorum."""
    taken = [row["seconds"] for row in rows if row["counted"] and row["round"]]
    return statistics.median(taken) * max(0, manifest.rounds.count - head.trained) if taken and not stands_still else None


def exclusions(items: Iterable[pb.Exclusion]) -> list[View]:
    return [{"peer": item.peer, "reason": reason_name(item.reason), "detail": item.detail} for item in items]


def describe(head: Head, commit: Statement[pb.Commit]) -> tuple[View, View]:
    """Return a commit's line in a table, and its details. They are written once, when the commit is appended."""
    return round_row(commit.body), round_detail(head, commit.body)


def round_row(commit: pb.Commit) -> View:
    """One line of `dilocox rounds`."""
    counted = taken(commit)
    return {
        "round": commit.round,
        "closing": commit.closing,
        "loss": commit.loss or None,
        "evaluation_loss": commit.evaluation_loss if commit.evaluated else None,
        "counted": len(commit.counted),
        "roster": len(commit.counted) + len({item.peer for item in commit.excluded}),
        "trained": commit.trained,
        "tokens": sum(item.contribution.tokens for item in counted),
        "payload_bytes": sum(item.contribution.size for item in counted),
        "seconds": commit.open_ms / 1000,
        "collect_seconds": commit.collect_ms / 1000,
        "vote_seconds": commit.vote_ms / 1000,
        "state": commit.state.hex(),
    }


def round_detail(head: Head, commit: pb.Commit) -> View:
    """Everything about one round: who counted, who did not and why. `head`: before the commit."""
    held = holders(commit)
    return {
        **round_row(commit),
        "previous": commit.previous.hex(),
        "clusters": [_counted(head, item, held[item.cluster]) for item in taken(commit)],
        "excluded": exclusions(commit.excluded),
        "audits": _audits(head, commit),
        "refused": exclusions(commit.refusals),
        "next_roster": [member.cluster for member in commit.roster],
        "next_rank_or_k": commit.rank_or_k,
        "next_inner_steps": commit.inner_steps,
        "median_norm": norm_of(commit.norm),
    }


def _audits(head: Head, commit: pb.Commit) -> list[View]:
    """Return what a commit's votes say of its audits. A run without audits imports no module of theirs."""
    if "audits" not in head.checks:
        return []
    from dilocox.views.audit_views import audits

    return audits(head, commit)


def attestation(item: pb.Attestation) -> View:
    """Return the evidence that admits a peer. Simulated evidence is marked as simulated everywhere."""
    return {
        "peer": item.peer,
        "kind": item.kind,
        "simulated": item.kind == SIMULATED,
        "measurement": item.measurement,
        "tcb_status": item.tcb_status,
        "gpus": item.gpus,
        "valid_until": item.valid_until_ms / 1000,
    }


def _counted(head: Head, item: CountedPayload, held: list[str]) -> View:
    cluster, body = head.roster[item.cluster], item.contribution
    bound = body.attestation == resting_on(head.attestations, cluster)
    evidence = [attestation(head.attestations[peer]) for peer in cluster.peers if peer in head.attestations]
    return {
        "cluster": item.cluster,
        "tokens": body.tokens,
        "weight": item.weight,
        "clipped": item.factor,
        "inner_steps": body.inner_steps,
        "bytes": body.size,
        "loss": body.loss or None,
        "norm": norm_of(body.norm),
        "effective_rank": body.effective_rank,
        "error": body.error,
        "leaves": body.leaves.hex(),
        "base_state": body.base_state.hex(),
        "holders": len(held),
        "kept_by": list(body.holders),
        "attestations": [{**each, "bound": bound} for each in evidence],
    }


def _standing(manifest: Manifest, record: Record) -> View:
    """Return a cluster's reputation. `of`: the most it can earn; 0: all clusters are equal."""
    return {**record._asdict(), "of": manifest.standing.rounds}


def peers(
    manifest: Manifest,
    head: Head,
    presence: services.PresenceList,
    records: Mapping[str, pb.PeerRecord],
    coordinator: str,
) -> list[View]:
    """Return every known peer: on the roster, live, or with a record in the DHT."""
    beats = {entry.peer: entry for entry in presence.peers}
    roster = {peer: cluster for cluster in head.roster.values() for peer in cluster.peers}
    rows = []
    for peer in sorted({*beats, *roster, *records} - {coordinator}):
        record, beat = records.get(peer, pb.PeerRecord()), beats.get(peer)
        cluster = roster.get(peer)
        rows.append(
            {
                "peer": peer,
                "name": record.name,
                "address": record.address,
                "version": record.version,
                "cluster": cluster.cluster if cluster else None,
                "stages": cluster.stages_of(peer) if cluster else [],
                "on_roster": cluster is not None,
                "present": beat.present if beat else None,
                "missed": cluster.missed if cluster else 0,
                "standing": _standing(manifest, head.standings[cluster.cluster]) if cluster else None,
                "attestation": attestation(head.attestations[peer]) if peer in head.attestations else None,
                "round": beat.round if beat else None,
                "step": beat.step if beat else None,
                "loss": beat.loss if beat and beat.loss else None,
                "tokens_per_second": beat.tokens_per_second if beat else None,
            }
        )
    return rows


def boxes(head: Head, cluster: str) -> list[View]:
    """Return the hosts of a cluster on the roster, with their stages."""
    seated = head.roster.get(cluster)
    return [{"peer": peer, "stages": seated.stages_of(peer)} for peer in seated.peers] if seated else []


def stages(manifest: Manifest, head: Head) -> list[View]:
    """Return the number of replicas of each stage."""
    rows, hosting = [], defaultdict[int, list[str]](list)
    for cluster in head.roster.values():
        for peer in cluster.peers:
            for stage in set(cluster.stages_of(peer)):
                hosting[stage].append(peer)
    for stage, (first, last) in enumerate(stage_units(manifest.model)):
        hosts = sorted(hosting[stage])
        rows.append(
            {
                "stage": stage,
                "first_unit": first,
                "last_unit": last - 1,
                "parameters": sum(spec.elements for spec in stage_tensors(manifest.model, stage)),
                "replicas": len(hosts),
                "peers": hosts,
            }
        )
    return rows
