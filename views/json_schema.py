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
    "run.name": "of the run, for people",
    "run.run_id": "SHA-256 of the manifest, in hexadecimal",
    "run.rounds": "after which the run is finished",
    "run.stages": "into which the model is split",
    "run.parameters": "of the whole model",
    "run.overlap": "whether the exchange runs beside training",
    "run.codec": "of the payloads",
    "run.rank_or_k": "with which the run begins",
}
_HEALTH: Fields = {
    "answers[].question": "such as Counted?",
    "answers[].answer": "true, false; null: not known yet",
    "answers[].says": "the answer in a sentence",
    "answers[].do": "what to do, where there is something",
    "answers[].decides": "whether the daemon is well only where the answer is yes",
    "health.well": "true, false; null: not known yet",
    "health.why": "in a sentence",
    "health.do": "what to do, where there is something",
}
_NETWORK: Fields = {
    "network.sent.*": "bytes sent since the daemon started, by kind",
    "network.received.*": "bytes received since the daemon started, by kind",
    "network.last_round": "null before a whole round has passed",
    "network.last_round.round": "the last whole round",
    "network.last_round.sent": "bytes sent in it",
    "network.last_round.received": "bytes received in it",
    "network.upload.bytes_per_second": "what may be sent now; null: no limit",
    "network.upload.until": "until when that holds, seconds since 1970; null: it stays",
    "network.download.bytes_per_second": "what may be fetched now; null: no limit",
    "network.download.until": "until when that holds, seconds since 1970; null: it stays",
}
_PLACE: Fields = {
    "role": "node, coordinator, relay, archive; waiting: of a daemon that has not joined yet, waits for room, or stands by",
    "peer": "this daemon's peer id",
    "name": "of this daemon, for people",
    "finished": "whether the run is",
    "round": "the open round",
}
_LINE: Fields = {
    "address": "host:port by which others reach it",
    "reachable": "whether others can dial it; null: nobody has tried yet",
    "reach": "that in a sentence",
    "coordinator_connected": "whether the coordinator is heard",
}

NODE: Fields = {
    **_PLACE,
    **_LINE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "state": "what it does, in a word",
    "why": "… and in a sentence",
    "advice": "what its operator can do about that",
    "round_why": "why the round is open, in the coordinator's words",
    "nobody_keeps": "whether nobody of the roster, no relay and no archive keeps what others push",
    "clock_offset": "seconds by which this machine's clock is ahead of the coordinator's; null: not measured",
    "attestation": "null where the run asks for no evidence",
    "attestation.kind": "of the evidence",
    "attestation.attested": "whether it holds",
    "attestation.code": "why not",
    "attestation.reason": "… in a sentence",
    "attestation.valid_until": "seconds since 1970",
    "phase_round": "the round that the local phase trains for",
    "inner_step": "the last inner step of that phase",
    "inner_steps": "steps of a phase",
    "phase_seconds_left": "of the phase; 0 where it does not train",
    "seconds_left": "of the run, as rounds took so far; null: nobody knows",
    "on_roster": "whether it has a seat in the open round",
    "cluster": "peer id of its cluster's lead",
    "boxes[].peer": "a box of its cluster",
    "boxes[].stages[]": "that it hosts",
    "counted[]": "whether it was counted, of the last rounds that counted anybody; newest last",
    "nobody_counted": "whether the last commit left out everybody",
    "stands_still": "whether the open round waits until more clusters take part",
    "excluded[].reason": "why the last commit left it out, by name",
    "excluded[].detail": "… and in a sentence",
    "excluded[].do": "what to do about it",
    "hours": "of the day in which it takes part; null: always",
    "privacy": "what its own data have given away of what they may, where it trains under --private-epsilon; null: nobody counts",
    "loss": "of the last inner step, nats per token",
    "tokens_per_second": "of the last inner step",
    "step_seconds": "of the last inner step",
    "tokens": "in announced phases since the daemon started",
    "total_steps": "inner steps since the workers started",
    "clock_seconds": "the first worker's monotonic clock after the last of total_steps",
    "codec_cpu_seconds": "CPU time of the codec since the workers started",
    "allreduce_bytes": "what averaging every gradient would have sent in network.last_round; 0: not known",
    "fetch_failures": "transfers that broke off since the daemon started",
    "downloading": "null: nothing is being fetched",
    "downloading.held": "bytes of it that are here",
    "downloading.size": "bytes of it",
    "applied_at_step.*": "the inner step at which the commit of that round was applied",
    "phase_steps.*": "inner steps of the phase for that round",
    "state_roots.*": "root of the state before that round, in hexadecimal",
    "states.*": "digest of that stage's newest state, in hexadecimal",
    "state_hashes.*": "digests of all stages' states before that round, in hexadecimal",
    "state_hashes.*[]": "of a stage",
}
COORDINATOR: Fields = {
    **_PLACE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "phase": "gathering, starting, collecting, voting, closing or finished",
    "why": "why the round is open, in a sentence",
    "contributions": "of the open round",
    "receipts": "votes in the open round",
    "roster[]": "clusters of the open round, by their leads' peer ids",
    "absent[]": "those of them that are not heard",
    "refused[].peer": "whose statement was refused in the open round",
    "refused[].reason": "by name",
    "refused[].detail": "in a sentence",
    "seconds_left": "of the run, as rounds took so far; null: nobody knows",
    "coordinators[].name": "of a coordinator that shares a store with this one; none: there is one coordinator",
    "coordinators[].address": "host:port of its gRPC server",
    "coordinators[].leads": "whether it does; the others stand by",
}
HOLDER: Fields = {
    **_PLACE,
    **_LINE,
    **_RUN,
    **_HEALTH,
    **_NETWORK,
    "state": "keeping or archiving",
    "why": "what it keeps, or what keeps it from that",
    "kept_blobs": "on its disk",
    "kept_bytes": "of them",
    "archive": "null: of a relay, not of `dilocox archive`",
    "archive.url": "where it is",
    "archive.commits": "in it",
    "archive.snapshots[]": "rounds whose starting states are in it",
    "archive.payloads[][]": "first and last of a span of rounds whose payloads are in it",
    "archive.data": "whether the run's data are",
    "archive.why": "why not all that is due is in it; empty: it is",
}
WAITING: Fields = {
    **_HEALTH,
    "role": "waiting",
    "state": "starting, no-room, or standby: of a coordinator that does not lead",
    "why": "what it waits for",
    "advice": "what its operator can do about that",
}
STOPPED: Fields = {
    **_RUN,
    **{name: says for name, says in _HEALTH.items() if name.startswith("health")},
    "role": "stopped",
    "why": "no daemon runs here",
    "peer": "peer id of the node whose folder it is; empty: it is no node's",
    "folder": "that was read",
    "round": "that was open when the daemon ended",
    "finished": "whether the run is",
    "trained": "rounds that counted somebody",
    "closed_at": "when the newest commit was made, seconds since 1970",
    "counted[]": "whether this node was counted, of the last rounds that counted anybody; newest last",
}
"""Fields of `dilocox status --json` without a running daemon; no API sends them."""
_ATTESTATION: Fields = {
    "peer": "whose evidence it is",
    "kind": "of the evidence",
    "simulated": "whether anybody could have made it",
    "measurement": "in hexadecimal",
    "tcb_status": "of its platform",
    "gpus": "that it covers",
    "valid_until": "seconds since 1970",
}
PEER: Fields = {
    "peer": "its peer id",
    "name": "for people",
    "address": "host:port by which others reach it; empty: they cannot",
    "version": "of its program",
    "cluster": "peer id of its cluster's lead; null: it has no seat",
    "stages[]": "that it hosts",
    "on_roster": "whether it has a seat in the open round",
    "present": "whether the coordinator hears it; null: it was never heard",
    "missed": "commits in a row that did not count its cluster",
    "standing": "null: it has no seat",
    "standing.counted": "commits that counted it",
    "standing.refused": "commits that refused what it made",
    "standing.scored": "of both: how often a committee measured what its work does",
    "standing.audited": "of both: how often an auditor looked at what it trained",
    "standing.lacking": "rounds in which those who were drawn to ask found it without a share that it should keep",
    "standing.earned": "of its standing",
    "standing.of": "what there is to earn; 0: all stand equal",
    "attestation": "null: it gave no evidence",
    **{f"attestation.{key}": says for key, says in _ATTESTATION.items()},
    "round": "for which it trains; null: it was never heard",
    "step": "its inner step",
    "loss": "of that step, nats per token",
    "tokens_per_second": "of that step",
}
STAGE: Fields = {
    "stage": "its number",
    "first_unit": "of the model's units, which are its layers with embedding and head",
    "last_unit": "… and the last",
    "parameters": "in it",
    "replicas": "peers that host it",
    "peers[]": "who they are",
}
ROUND_ROW: Fields = {
    "round": "its number",
    "closing": "whether it is the run's last commit, which counts nobody",
    "loss": "of training, over those counted, nats per token; null: it counted nobody",
    "evaluation_loss": "held out, of the state that it started from; null: nobody measured it",
    "counted": "clusters whose work it took",
    "roster": "clusters that had a seat",
    "trained": "rounds up to it that counted anybody",
    "tokens": "that those counted trained on",
    "payload_bytes": "that those counted made",
    "seconds": "from its opening to its commit",
    "collect_seconds": "until more than half had contributed",
    "vote_seconds": "from the ballot until more than half had voted",
    "state": "root of the state that it started from, in hexadecimal; empty: nobody agreed on one",
}
ROUND: Fields = {
    **ROUND_ROW,
    "previous": "digest of the commit before, in hexadecimal",
    "clusters[].cluster": "who counted",
    "clusters[].tokens": "that it trained on",
    "clusters[].weight": "with which it counts",
    "clusters[].clipped": "by how much its payload was scaled down; 1: not at all",
    "clusters[].inner_steps": "that it took",
    "clusters[].bytes": "of its payload",
    "clusters[].loss": "of its training, nats per token; null: it does not say, under a privacy budget",
    "clusters[].norm": "of its payload",
    "clusters[].effective_rank": "of the averaged pseudo-gradient of the commit before, where the rank follows it; 0: not measured",
    "clusters[].error": "what its codec lost, relative",
    "clusters[].leaves": "digest of what names its payload's parts, in hexadecimal",
    "clusters[].base_state": "root of the state that it built on, in hexadecimal",
    "clusters[].holders": "who has its payload: itself, and who accepted it",
    "clusters[].kept_by[]": "peers to which it pushed the payload, where nobody can dial it",
    "clusters[].attestations[].bound": "whether the contribution names this evidence",
    **{
        f"clusters[].attestations[].{key.removeprefix('attestation.')}": PEER[key]
        for key in PEER
        if key.startswith("attestation.")
    },
    "excluded[].peer": "who had a seat and did not count",
    "excluded[].reason": "by name",
    "excluded[].detail": "in a sentence",
    "refused[].peer": "whose statement was refused",
    "refused[].reason": "by name",
    "refused[].detail": "in a sentence",
    "audits[].round": "whose work was looked at",
    "audits[].cluster": "its author",
    "audits[].auditors[].cluster": "who was drawn",
    "audits[].auditors[].votes": "with how many votes",
    "audits[].auditors[].found": "equal, near, differs, …; nothing: it did not say",
    "audits[].auditors[].distance": "of what was said to what it computed, relative; null: it did not say",
    "next_roster[]": "clusters that have a seat in the next round",
    "next_rank_or_k": "of its payloads",
    "next_inner_steps": "of its phases",
    "median_norm": "of what was counted, to which the next round's payloads are clipped",
}
EXPLAINED: Fields = {
    "round": "its number",
    "verdict": "in the usual range, slow, incomplete (it did not count a cluster of its roster), slow and incomplete, or open",
    "seconds": "from its opening to its commit; null: it is open",
    "usual_seconds": "the median of the rounds before; null: there are none",
    "slow_above_seconds": "above it a round is slow; null: there are no rounds before",
    "findings[].about": "time, collect, vote, counted, …",
    "findings[].says": "what, with numbers",
    "findings[].do": "what to do, where there is something",
}
EVENT: Fields = {
    "id": "larger than that of every event before it, over restarts",
    "time": "seconds since 1970",
    "event": "its kind",
    "line": "the event in a sentence",
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
