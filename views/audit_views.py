"""Audits as JSON-able values."""

from collections.abc import Iterable
from typing import Any

from dilocox.protocol.checks.audit_rules import due, verdict_name
from dilocox.protocol.checks.audits import audits_of
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.ids import peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import author, parse

__all__ = ["audits"]


def audits(head: Head, commit: pb.Commit) -> list[dict[str, Any]]:
    """Return what this commit's votes say of each audit that was due. `head`: before the commit."""
    results = {peer_id(author(commit, signed)): parse(pb.Receipt, signed.body).audits for signed in commit.receipts}
    return [
        {
            "round": audit.round,
            "cluster": audit.cluster,
            "auditors": [
                {"cluster": name, "votes": votes, **_found(results.get(name, ()), index)}
                for name, votes in sorted(audit.auditors.items())
            ],
        }
        for index, audit in enumerate(due(audits_of(head), commit.round))
    ]


def _found(results: Iterable[pb.AuditResult], index: int) -> dict[str, Any]:
    """Return what one of its auditors found; nothing where its vote does not say."""
    found = next((result for result in results if result.index == index), None)
    verdict = verdict_name(found.verdict) if found is not None else "nothing"
    return {"found": verdict, "distance": found.distance if found is not None else None}
