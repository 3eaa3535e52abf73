"""Tests of merit: a fold over commits that any reader can repeat, and a root that a contract can check."""

import pytest

from dilocox.protocol import limits
from dilocox.protocol.checks import merit_rules
from dilocox.protocol.checks.merit import merits_of
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import parse_account, peer_id
from dilocox.protocol.payload import merkle
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, Table, identity, manifest

SETTLES = manifest(settlement={"chain_id": 1, "contract": "0x" + "ab" * 20}, rounds={"count": 8})
ACCOUNTS = [bytes([number + 1]) * 20 for number in range(3)]


def settling(accounts: list[bytes] = ACCOUNTS) -> Table:
    table = Table(SETTLES)
    for number, account in enumerate(accounts):
        assert table.submit(table.claim(number, account=account)).outcome is Outcome.ACCEPT
    return table


def from_scratch(table: Table) -> dict[bytes, int]:
    """Return each account's merit, computed from the commits alone."""
    found: dict[bytes, int] = {}
    for before, commit in zip(table.commits, table.commits[1:], strict=False):
        accounts = {member.cluster: member.account for member in before.body.roster}
        for item in commit.body.counted:
            cluster = peer_id(commit.body.signers[commit.body.contributions[item.contribution].signer])
            found[accounts[cluster]] = found.get(accounts[cluster], 0) + item.weight
    return found


def test_commits_carry_what_accounts_earned_and_a_verifier_comes_to_the_same():
    table = settling().train(3)
    table.contribute([0, 1]).absent(2)
    table.vote([0, 1])
    merits = merits_of(table.verify())
    assert merits == from_scratch(table)
    assert merits[ACCOUNTS[0]] == 4 * merits[ACCOUNTS[2]] // 3 > 0
    assert table.commits[-1].body.merit_root == merit_rules.root(merits)


def test_who_names_no_account_earns_nothing_and_two_may_name_one():
    table = settling([ACCOUNTS[0], ACCOUNTS[0], b""]).train(1)
    assert list(merits_of(table.head)) == [ACCOUNTS[0]]
    assert merits_of(table.head)[ACCOUNTS[0]] == sum(item.weight for item in table.commits[-1].body.counted) * 2 // 3


def test_a_cluster_may_name_another_account_and_what_it_earned_stays():
    table = settling().train(1)
    earned, new = dict(merits_of(table.head)), b"\x09" * 20
    table.contribute()
    assert table.submit(table.claim(0, account=new)).outcome is Outcome.ACCEPT
    table.vote().train(1)
    assert merits_of(table.head)[new] == earned[ACCOUNTS[0]]
    assert merits_of(table.verify())[ACCOUNTS[0]] == 2 * earned[ACCOUNTS[0]]


@pytest.mark.parametrize(
    "lie",
    [
        lambda body: body.merits[0].__setattr__("merit", body.merits[0].merit + 1),
        lambda body: body.__setattr__("merit_root", bytes(32)),
        lambda body: body.ClearField("merits"),
    ],
)
def test_a_commit_that_says_another_merit_is_refused(lie):
    table = settling().train(2)
    head = initial_head(COORDINATOR.peer)
    for commit in table.commits[:-1]:
        head, _ = chain.extend(SETTLES, head, commit.envelope)
    forged = pb.Commit.FromString(table.commits[-1].envelope.body)
    lie(forged)
    sealed: Statement = seal(COORDINATOR, pb.KIND_COMMIT, SETTLES.run_id, forged)
    with pytest.raises(RemoteError, match="does not follow from its statements: merit"):
        chain.extend(SETTLES, head, sealed.envelope)


def test_a_run_that_settles_nothing_takes_no_account_and_its_commits_carry_no_merit():
    table = Table(manifest())
    judged = table.submit(table.claim(0, account=ACCOUNTS[0]))
    assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_MALFORMED)
    table.genesis().train(1)
    assert not merits_of(table.head)
    assert not table.commits[-1].body.merit_root


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_each_account_has_a_proof_of_its_merit_and_of_nothing_else(count: int):
    merits = {identity(number).key[:20]: 1000 + number for number in range(count)}
    root = merit_rules.root(merits)
    for account, earned in merits.items():
        proof = merit_rules.proof(merits, account)
        assert merit_rules.holds(root, account, earned, proof)
        assert not merit_rules.holds(root, account, earned + 1, proof)
        assert not merit_rules.holds(root, bytes(19) + b"\1", earned, proof)
        assert not proof or not merit_rules.holds(root, account, earned, proof[:-1])
    with pytest.raises(KeyError):
        merit_rules.proof(merits, b"\xff" * 20)


def test_a_node_of_the_tree_is_no_leaf():
    """Check it; otherwise an account without merit could pass the hash of two leaves as its own."""
    merits = dict.fromkeys(ACCOUNTS, 7)
    left = merkle.node(*[merit_rules.leaf(account, 7) for account in ACCOUNTS[:2]])
    assert merit_rules.root(merits) == merkle.node(left, merit_rules.leaf(ACCOUNTS[2], 7))
    assert left not in {merit_rules.leaf(account, 7) for account in ACCOUNTS}
    assert merit_rules.root({}) != bytes(32)


def test_the_table_of_accounts_is_bounded_and_forgets_nobody():
    full = {number.to_bytes(20, "big"): 5 for number in range(1, limits.ACCOUNTS + 1)}
    late, known = b"\xee" * 20, (7).to_bytes(20, "big")
    after = merit_rules.earned(full, [(late, 10), (known, 10), (b"", 10)])
    assert late not in after
    assert after == {**full, known: 15}
    assert merit_rules.earned({known: (1 << 64) - 2}, [(known, 9)]) == {known: (1 << 64) - 1}


@pytest.mark.parametrize("text", ["", "0x", "ab" * 20, "0x" + "ab" * 19, "0x" + "00" * 20, "0x" + "gg" * 20])
def test_what_is_no_account_is_refused(text: str):
    with pytest.raises(ConfigError):
        parse_account(text)
    assert parse_account("0x" + "aB" * 20) == b"\xab" * 20
