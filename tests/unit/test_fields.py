"""Tests that every field of the API's answers has a sentence, and every sentence a field."""

import ast
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.schedule import Hours
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.store.chain_file import ChainFile
from dilocox.views import json_schema
from dilocox.views import json_views as views
from dilocox.views.explain import explain
from dilocox.views.health import answers, answers_of_coordinator, answers_of_waiting, health
from dilocox.views.json_schema import fields_of
from tests.helpers import COORDINATOR, Table, identity, manifest, told_fields

ROOT = Path(__file__).parents[2]


def test_names_are_written_as_the_module_says():
    assert fields_of({"a": {"b": 1}, "c": [{"d": None}], "e": [1], "f": []}) == {"a.b", "c[].d", "e[]"}
    with pytest.raises(AssertionError, match=r"c\[\]\.d has no sentence"):
        told_fields({"a.*": ""}, {"a.b", "c[].d"})


def test_rounds_peers_and_stages(tmp_path: Path):
    table = Table(manifest(rounds={"count": 9})).genesis().train(2, seconds=2.0)
    table.absent(2)
    table.train(1, [0, 1], seconds=1.0)
    chain = ChainFile(tmp_path / "chain.db", table.run, views.describe)
    for commit in table.commits:
        chain.append(commit.envelope)
    assert told_fields(json_schema.ROUND_ROW, set().union(*map(fields_of, json.loads(chain.rows())))) == set(
        json_schema.ROUND_ROW
    )
    details = [json.loads(text) for number in range(chain.length) if (text := chain.detail(number)) is not None]
    seen = told_fields(json_schema.ROUND, set().union(*map(fields_of, details)))
    assert not {
        each
        for each in set(json_schema.ROUND) - seen
        if not each.startswith(("clusters[].kept_by", "clusters[].att", "refused", "audits"))
    }
    assert told_fields(json_schema.STAGE, set().union(*map(fields_of, views.stages(table.run, table.head)))) == set(
        json_schema.STAGE
    )
    presence = services.PresenceList(peers=[services.Presence(peer=identity(0).peer, present=True, round=1, step=2, loss=1.0)])
    rows = views.peers(table.run, table.head, presence, {}, COORDINATOR.peer)
    seen = told_fields(json_schema.PEER, set().union(*map(fields_of, rows)))
    assert seen == set(json_schema.PEER) - {"standing"}, "all of them have a seat"
    found = explain(chain, lambda _: [], 3, identity(2).peer)
    assert told_fields(json_schema.EXPLAINED, fields_of(found)) == set(json_schema.EXPLAINED)
    chain.close()


def test_evidence():
    said = views.attestation(pb.Attestation(peer="x", kind="simulated", measurement="ab", gpus=1))
    assert fields_of({"attestation": said}) == {each for each in json_schema.PEER if each.startswith("attestation.")}


def test_what_every_status_has():
    traffic = Traffic(download=Rates(((Hours.parse("8-9"), 1e6),)))
    traffic.bytes.update({("sent", "blob"): 1, ("received", "blob"): 2})
    common = {"run": views.run(manifest()), "network": views.network(traffic)}
    assert told_fields(json_schema.COORDINATOR, fields_of(common)) >= {
        each for each in json_schema.COORDINATOR if each.startswith("run.")
    }
    status: dict[str, Any] = {
        "state": "training",
        "why": "",
        "advice": "",
        "counted": [],
        "nobody_counted": False,
        "round": 1,
        "stands_still": False,
        "excluded": [],
        "reachable": None,
        "reach": "",
        "on_roster": True,
    }
    for known, given in (
        (json_schema.NODE, answers(status, None)),
        (json_schema.COORDINATOR, answers_of_coordinator("collecting", False, "")),
        (json_schema.WAITING, answers_of_waiting(True, "", "")),
    ):
        document = {"answers": given, "health": health({**status, "answers": given})}
        assert told_fields(known, fields_of(document)) == {each for each in known if each.startswith(("answers", "health"))}


def keys(module: str) -> set[str]:
    """Return the keys of the status document in a module's source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Dict):
            names = {each.value for each in node.keys if isinstance(each, ast.Constant)}
            if "role" in names and "why" in names:
                found |= {str(name) for name in names}
    return found


@pytest.mark.parametrize(
    ("module", "known", "beside"),
    [
        ("node/api/server.py", json_schema.NODE, {"hours", "privacy", "answers", "health"}),
        ("coordinator/daemon.py", json_schema.COORDINATOR, {"health"}),
        ("node/relay_daemon.py", json_schema.HOLDER, {"health"}),
        ("views/api_listener.py", json_schema.WAITING, {"health"}),
        ("cli/offline.py", json_schema.STOPPED, set()),
    ],
)
def test_each_status_has_these_fields_and_no_others(module: str, known: Mapping[str, str], beside: set[str]):
    top = {re.split(r"[.\[]", name)[0] for name in known}
    assert keys(module) | beside == top


def test_everything_has_a_sentence():
    for known in (*itertools.chain.from_iterable(json_schema.ANSWERS.values()), json_schema.EVENT, json_schema.STOPPED):
        assert all(known.values())
