"""JSON of the API and of `--json`: a sentence and a unit for every field.

`a.b` is field b of a; `a[]` is each item of a list; `*` is a key that the value defines. null: unknown, or absent.
docs/reference/http.md and /openapi.json are generated from it; tests check that the documents have these fields and no others.
"""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ANSWERS",
    "COORDINATOR",
    "EVENT",
    "EXPLAINED",
    "HOLDER",
    "LISTS",
    "NODE",
    "PEER",
    "ROUND",
    "ROUND_ROW",
    "STAGE",
    "STOPPED",
    "WAITING",
    "fields_of",
]

Fields = Mapping[str, str]

_RUN: Fields = {
    "run.name": "name of the run",
    "run.run_id": "SHA-256 of the manifest, in hexadecimal",
    "run.rounds": "number of counted rounds after which the run is finished",
    "run.stages": "number of stages of the model",
    "run.parameters": "number of parameters of the whole model",
    "run.overlap": "overlap of exchange and training",
    "run.codec": "codec of the payloads",
    "run.rank_or_k": "rank or k of the codec at the beginning",
}
_HEALTH: Fields = {
    "answers[].question": "question, such as Counted?",
    "answers[].answer": "true or false; null: unknown",
    "answers[].says": "answer as a sentence",
    "answers[].do": "what to do; empty if nothing",
    "answers[].decides": "true if the daemon is healthy only with the answer true",
    "health.well": "true or false; null: unknown",
    "health.why": "reason as a sentence",
    "health.do": "what to do; empty if nothing",
}
_NETWORK: Fields = {
    "network.sent.*": "bytes sent since the daemon started, by kind",
    "network.received.*": "bytes received since the daemon started, by kind",
    "network.last_round": "traffic of the last whole round; null before the first",
    "network.last_round.round": "number of the last whole round",
    "network.last_round.sent": "bytes sent in it",
    "network.last_round.received": "bytes received in it",
    "network.upload.bytes_per_second": "current upload limit; null: no limit",
    "network.upload.until": "end of that limit, seconds since 1970; null: no end",
    "network.download.bytes_per_second": "current download limit; null: no limit",
    "network.download.until": "end of that limit, seconds since 1970; null: no end",
}
_PLACE: Fields = {
    "role": "node, coordinator, relay or archive; waiting: the daemon has not joined yet, waits for disk space, or is a standby",
    "peer": "peer id of this daemon",
    "name": "name of this daemon",
    "finished": "true if the run is finished",
    "round": "open round",
}
_LINE: Fields = {
    "address": "host:port for connections of other peers",
    "reachable": "true if other peers can open a connection; null: no peer has tried yet",
    "reach": "reachability as a sentence",
    "coordinator_connected": "true if the coordinator is live",
}

NODE: Fields = {
    **_PLACE,
    **_LINE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "state": "name of the current state of the node",
    "why": "current state as a sentence",
    "advice": "what the operator can do about it",
    "round_why": "reason why the round is open, from the coordinator",
    "nobody_keeps": "true if no roster member, relay or archive stores payloads of unreachable nodes",
    "clock_offset": "seconds by which this machine's clock is ahead of the coordinator's; null: not measured",
    "attestation": "state of this peer's evidence; null: the run requires none",
    "attestation.kind": "kind of the evidence",
    "attestation.attested": "true if the evidence is valid",
    "attestation.code": "code of the failure",
    "attestation.reason": "failure as a sentence",
    "attestation.valid_until": "end of the verdict, seconds since 1970",
    "phase_round": "round for which the local phase trains",
    "inner_step": "last inner step of that phase",
    "inner_steps": "inner steps of a phase",
    "phase_seconds_left": "estimated seconds of the phase; 0 if the node does not train",
    "seconds_left": "estimated seconds of the run, from the rounds so far; null: unknown",
    "on_roster": "true if its cluster has a seat in the open round",
    "cluster": "peer id of its cluster's lead host",
    "boxes[].peer": "peer id of a host of its cluster",
    "boxes[].stages[]": "stages of that host",
    "counted[]": "true if it was counted, for each of the last counting rounds; the newest is last",
    "nobody_counted": "true if the last commit counted no cluster",
    "stands_still": "true if the open round is below quorum",
    "excluded[].reason": "name of the reason why the last commit did not count it",
    "excluded[].detail": "that reason as a sentence",
    "excluded[].do": "what to do about it",
    "hours": "hours of the day in which it takes part; null: always",
    "privacy": "privacy budget and its use, with --private-epsilon; null: no account",
    "loss": "training loss of the last inner step, nats per token",
    "tokens_per_second": "rate of the last inner step",
    "step_seconds": "duration of the last inner step",
    "tokens": "tokens in announced phases since the daemon started",
    "total_steps": "inner steps since the workers started",
    "clock_seconds": "the first worker's monotonic clock after the last of total_steps",
    "codec_cpu_seconds": "CPU time of the codec since the workers started",
    "codec_native": "true if the codec's fast path was built; otherwise its reference runs",
    "allreduce_bytes": "bytes of an AllReduce of every gradient in network.last_round; 0: unknown",
    "fetch_failures": "transfers that failed since the daemon started",
    "downloading": "download in progress; null: none",
    "downloading.held": "bytes of it that have arrived",
    "downloading.size": "bytes of it in total",
    "applied_at_step.*": "inner step at which the commit of that round was applied",
    "phase_steps.*": "inner steps of the phase of that round",
    "state_roots.*": "root of the state before that round, in hexadecimal",
    "states.*": "digest of that stage's newest state, in hexadecimal",
    "state_hashes.*": "digests of all stages' states before that round, in hexadecimal",
    "state_hashes.*[]": "digest of a stage",
}
COORDINATOR: Fields = {
    **_PLACE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "phase": "gathering, starting, collecting, voting, closing or finished",
    "why": "reason why the round is open, as a sentence",
    "contributions": "number of contributions to the open round",
    "receipts": "number of votes in the open round",
    "roster[]": "clusters of the open round, by their lead hosts' peer ids",
    "absent[]": "clusters of them that are absent",
    "refused[].peer": "peer whose statement was rejected",
    "refused[].reason": "name of the reason",
    "refused[].detail": "reason as a sentence",
    "seconds_left": "estimated seconds of the run, from the rounds so far; null: unknown",
    "coordinators[].name": "name of a coordinator that shares a store with this one; absent with one coordinator",
    "coordinators[].address": "host:port of its gRPC server",
    "coordinators[].leads": "true if it is the leader; all others are standbys",
}
HOLDER: Fields = {
    **_PLACE,
    **_LINE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "state": "keeping or archiving",
    "why": "current work, or what prevents it",
    "kept_blobs": "number of blobs on its disk",
    "kept_bytes": "bytes of these blobs",
    "archive": "state of the archive; null: a relay without one",
    "archive.url": "address of the archive",
    "archive.commits": "number of commits in it",
    "archive.snapshots[]": "rounds whose starting states are in it",
    "archive.payloads[][]": "first and last of a span of rounds whose payloads are in it",
    "archive.data": "true if it has the run's data",
    "archive.why": "reason why something is missing in it; empty: nothing is",
}
WAITING: Fields = {
    **_HEALTH,
    "role": "node, coordinator, relay or archive; waiting: the daemon has not joined yet, waits for disk space, or is a standby",
    "state": "starting, no-room, or standby",
    "why": "reason of the wait",
    "advice": "what the operator can do about it",
}
STOPPED: Fields = {
    **_RUN,
    **{name: says for name, says in _HEALTH.items() if name.startswith("health")},
    "role": "node, coordinator, relay or archive; waiting: the daemon has not joined yet, waits for disk space, or is a standby",
    "why": "no daemon runs here",
    "peer": "peer id of the node of this folder; empty: no node's folder",
    "folder": "folder that was read",
    "round": "open round when the daemon ended",
    "finished": "true if the run is finished",
    "trained": "number of counted rounds",
    "closed_at": "time of the newest commit, seconds since 1970",
    "counted[]": "true if it was counted, for each of the last counting rounds; the newest is last",
}
"""Fields of `dilocox status --json` without a running daemon; no API sends them."""
_ATTESTATION: Fields = {
    "peer": "peer of the evidence",
    "kind": "kind of the evidence",
    "simulated": "true for simulated evidence, which proves nothing",
    "measurement": "measurement in hexadecimal",
    "tcb_status": "TCB status of its platform",
    "gpus": "GPUs that it covers",
    "valid_until": "end of the verdict, seconds since 1970",
}
PEER: Fields = {
    "peer": "its peer id",
    "name": "its name",
    "address": "host:port for connections of other peers; empty: it is not reachable",
    "version": "version of its program",
    "cluster": "peer id of its cluster's lead host; null: it has no seat",
    "stages[]": "stages of that host",
    "on_roster": "true if its cluster has a seat in the open round",
    "present": "true if it is live for the coordinator; null: it never was",
    "missed": "commits in a row that did not count its cluster",
    "standing": "reputation of its cluster; null: it has no seat",
    "standing.counted": "commits that counted it",
    "standing.refused": "commits that rejected its work",
    "standing.scored": "of both, those in which a committee measured the effect",
    "standing.audited": "of both, those in which an auditor computed steps again",
    "standing.lacking": "rounds in which probes missed an erasure shard that it should store",
    "standing.earned": "earned reputation, in rounds",
    "standing.of": "full reputation, in rounds; 0: all clusters are equal",
    "attestation": "its evidence; null: none",
    **{f"attestation.{key}": says for key, says in _ATTESTATION.items()},
    "round": "round for which it trains; null: it was never live",
    "step": "its inner step",
    "loss": "training loss of that step, nats per token",
    "tokens_per_second": "rate of that step",
}
STAGE: Fields = {
    "stage": "number of the stage",
    "first_unit": "first unit of the model in it; units are the embedding, the layers and the head",
    "last_unit": "last unit of the model in it",
    "parameters": "number of its parameters",
    "replicas": "number of peers with this stage",
    "peers[]": "peer ids of them",
}
ROUND_ROW: Fields = {
    "round": "number of the round",
    "closing": "true for the run's last commit, which counts no cluster",
    "loss": "mean training loss of counted clusters, nats per token; null: none was counted",
    "evaluation_loss": "held-out loss of its starting state; null: not measured",
    "counted": "number of counted clusters",
    "roster": "number of clusters with a seat",
    "trained": "number of counting rounds up to it",
    "tokens": "tokens of counted clusters",
    "payload_bytes": "payload bytes of counted clusters",
    "seconds": "seconds from its opening to its commit",
    "collect_seconds": "seconds until more than half had contributed",
    "vote_seconds": "seconds from the ballot until more than half had voted",
    "state": "root of its starting state, in hexadecimal; empty: not agreed",
}
ROUND: Fields = {
    **ROUND_ROW,
    "previous": "digest of the commit before, in hexadecimal",
    "clusters[].cluster": "counted cluster",
    "clusters[].tokens": "tokens of its phase",
    "clusters[].weight": "weight in the mean",
    "clusters[].clipped": "factor by which its payload was scaled down; 1: not clipped",
    "clusters[].inner_steps": "inner steps of its phase",
    "clusters[].bytes": "bytes of its payload",
    "clusters[].loss": "its training loss, nats per token; null: private, under a privacy budget",
    "clusters[].norm": "norm of its payload",
    "clusters[].effective_rank": "effective rank of the last averaged pseudo-gradient, in runs with adaptive rank; 0: not measured",
    "clusters[].error": "relative error of its codec",
    "clusters[].leaves": "digest of its payload index, in hexadecimal",
    "clusters[].base_state": "root of the state that it built on, in hexadecimal",
    "clusters[].holders": "peers with its payload: itself, and clusters that accepted it",
    "clusters[].kept_by[]": "peers to which it uploaded the payload, if it is not reachable",
    "clusters[].attestations[].bound": "true if the contribution names this evidence",
    **{
        f"clusters[].attestations[].{key.removeprefix('attestation.')}": PEER[key]
        for key in PEER
        if key.startswith("attestation.")
    },
    "excluded[].peer": "cluster with a seat that was not counted",
    "excluded[].reason": "name of the reason",
    "excluded[].detail": "reason as a sentence",
    "refused[].peer": "peer whose statement was rejected",
    "refused[].reason": "name of the reason",
    "refused[].detail": "reason as a sentence",
    "audits[].round": "round of the audited work",
    "audits[].cluster": "audited cluster",
    "audits[].auditors[].cluster": "drawn auditor",
    "audits[].auditors[].votes": "number of its votes",
    "audits[].auditors[].found": "equal, near, differs, …; empty: no report",
    "audits[].auditors[].distance": "relative distance of the announced and the computed state; null: no report",
    "next_roster[]": "clusters with a seat in the next round",
    "next_rank_or_k": "rank or k of the next payloads",
    "next_inner_steps": "inner steps of the next phases",
    "median_norm": "median norm of counted payloads, which clips the next round's",
}
EXPLAINED: Fields = {
    "round": "number of the round",
    "verdict": "in the usual range, slow, incomplete (a cluster of its roster was not counted), slow and incomplete, or open",
    "seconds": "seconds from its opening to its commit; null: it is open",
    "usual_seconds": "median of the rounds before; null: there are none",
    "slow_above_seconds": "limit above which a round counts as slow; null: no rounds before",
    "findings[].about": "time, collect, vote, counted, …",
    "findings[].says": "finding as a sentence",
    "findings[].do": "what to do; empty if nothing",
}
EVENT: Fields = {
    "id": "larger than that of every earlier event, across restarts",
    "time": "seconds since 1970",
    "event": "kind of the event",
    "line": "event as a sentence",
    "*": "fields of its kind, such as round",
}
"""Fields of each line of `dilocox events --json`, and of each `data:` of /v1/events."""


ANSWERS: Mapping[str, tuple[Fields, ...]] = {
    "/v1/status": (NODE, COORDINATOR, HOLDER, WAITING),
    "/v1/peers": (PEER,),
    "/v1/stages": (STAGE,),
    "/v1/rounds": (ROUND_ROW,),
    "/v1/rounds/{number}": (ROUND,),
    "/v1/explain/{number}": (EXPLAINED,),
}
"""Documents by API path: one of these, by the daemon's role; for a list, its items."""
LISTS = ("/v1/peers", "/v1/stages", "/v1/rounds")


def fields_of(value: Any, name: str = "") -> set[str]:
    """Return the names of all fields of a document, as this module writes them. A list counts as its items."""
    if isinstance(value, dict):
        inside = [fields_of(each, f"{name}.{key}".removeprefix(".")) for key, each in value.items()]
        return set().union(*inside)
    if isinstance(value, list | tuple):
        return set().union(*(fields_of(each, f"{name}[]" if name else "") for each in value))
    return {name}
