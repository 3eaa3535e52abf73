"""Tests of the owner's appointments of the key that signs commits: chains prove them, files follow them, and they end the
halt after a fork."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.round_log import Entry, InputLog
from dilocox.node.exchange.forks import check_forks, follow_owner, proof_of_fork
from dilocox.protocol.consensus import chain, terms
from dilocox.protocol.consensus.head import Head, initial_head
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.rounds import round_machine as round
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.store.appointment_bundle import read_handover, take_over
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import format_identity
from tests.helpers import COORDINATOR, Table, digest, dilocox, identity, manifest
from tests.peers import meeting

OWNER, NEW = Identity(b"\x0e" * 32), identity(50)
RUN = manifest(run={"owner": OWNER.key.hex()}, rounds={"count": 100})


def appointment(after: Head, term: int = 1, coordinator: str = NEW.peer, pen: Identity = OWNER, **changes: Any) -> pb.Envelope:
    values = {"term": term, "coordinator": coordinator, "round": after.round, "head": after.digest, **changes}
    return seal(pen, pb.KIND_APPOINTMENT, RUN.run_id, pb.Appointment(**values)).envelope


def appointed(table: Table, envelope: pb.Envelope, pen: Identity = NEW) -> Table:
    """Return the round machine of the new coordinator."""
    state = round.start(table.run, terms.appoint(table.run, table.head, envelope), table.now)
    table.state, table.pen = state, pen
    return table


def replaced(rounds: int = 2) -> Table:
    """Return three commits by the run's first coordinator, then some by another."""
    table = Table(RUN).genesis().train(2)
    return appointed(table, appointment(table.head)).train(rounds)


def filed(path: Path, commits: list[Statement]) -> ChainFile:
    file = ChainFile(path, RUN)
    for commit in commits:
        file.append(commit.envelope)
    return file


def other(commit: Statement, pen: Identity = COORDINATOR, run: Manifest = RUN) -> Statement:
    body = pb.Commit.FromString(commit.envelope.body)
    body.closed_at_ms += 1
    return seal(pen, pb.KIND_COMMIT, run.run_id, body)


async def nobody(round: int) -> Statement:
    raise AssertionError("nobody is asked")


# A chain proves its authorized signers.


def test_a_chain_proves_by_itself_who_signs_it():
    table = replaced()
    head = table.verify()
    assert (head.coordinator, head.term, head.appointment) == (NEW.peer, 1, None)
    assert [commit.peer for commit in table.commits] == [COORDINATOR.peer] * 3 + [NEW.peer] * 2
    assert [commit.body.HasField("appointment") for commit in table.commits] == [False] * 3 + [True, False]
    again = appointed(table, appointment(table.head, 2, COORDINATOR.peer), COORDINATOR).train(1)
    assert again.verify().term == 2


def test_before_the_first_commit_too():
    table = Table(RUN)
    appointed(table, appointment(table.head)).genesis().train(1)
    assert table.verify().term == 1


def test_nobody_else_signs():
    """Check the previous coordinator, too: its commit would be of another term."""
    head = initial_head(COORDINATOR.peer)
    *before, first, _ = replaced().commits
    for commit in before:
        head, _ = chain.extend(RUN, head, commit.envelope)
    stripped = pb.Commit.FromString(first.envelope.body)
    stripped.ClearField("appointment")
    for pen, body in ((COORDINATOR, first.body), (identity(51), first.body), (NEW, stripped)):
        with pytest.raises(RemoteError):
            chain.extend(RUN, head, seal(pen, pb.KIND_COMMIT, RUN.run_id, body).envelope)
    after = terms.appoint(RUN, head, first.body.appointment)
    for pen, body in ((COORDINATOR, stripped), (NEW, stripped)):
        with pytest.raises(RemoteError):
            chain.extend(RUN, after, seal(pen, pb.KIND_COMMIT, RUN.run_id, body).envelope)
    for start in (head, after):
        assert chain.extend(RUN, start, first.envelope)[0].coordinator == NEW.peer


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pen": NEW}, "not the run's owner"),
        ({"pen": COORDINATOR}, "not the run's owner"),
        ({"head": digest("another")}, "names another commit"),
        ({"round": 2}, "names another commit"),
        ({"term": 0}, "term out of range"),
        ({"term": (1 << 32) - 1}, "term out of range"),
        ({"coordinator": "somebody"}, "not a peer id"),
        ({"head": b"short"}, "not 32 bytes"),
        ({"round": 0}, "not empty before"),
    ],
)
def test_only_the_owner_appoints_and_for_this_commit(changes: dict[str, Any], why: str):
    table = Table(RUN).genesis().train(2)
    with pytest.raises(RemoteError, match=why):
        terms.appoint(RUN, table.head, appointment(table.head, **changes))


def test_an_older_term_is_over():
    table = replaced()
    for term in (0, 1):
        with pytest.raises(RemoteError):
            terms.appoint(RUN, table.head, appointment(table.head, max(1, term)))
    assert terms.appoint(RUN, table.head, appointment(table.head, 2)).term == 2


# Files follow it.


def test_a_file_follows_the_owner_and_keeps_what_it_gave_up(tmp_path: Path):
    table = Table(RUN).genesis().train(2)
    head = table.head
    table.train(2)
    file = filed(tmp_path / "chain.db", table.commits)
    word = appointment(head)
    assert file.appoint(word)
    assert (file.length, file.head.coordinator, file.head.term, file.signer) == (3, NEW.peer, 1, NEW.peer)
    assert not file.appoint(word), "said twice"
    given_up = file.database.execute("SELECT round, envelope FROM given_up ORDER BY round").fetchall()
    assert [(number, pb.Envelope.FromString(raw)) for number, raw in given_up] == [
        (n, table.commits[n].envelope) for n in (3, 4)
    ]
    file.close()
    file = ChainFile(tmp_path / "chain.db", RUN)
    assert (file.length, file.head.coordinator) == (3, NEW.peer), "also after a restart"
    for commit in replaced().commits[3:]:
        file.append(commit.envelope)
    assert len(list(file.verify())) == 5
    assert file.appointment_of(1) is not None
    assert file.appointment_of(2) is None
    file.close()


def test_a_file_that_is_behind_follows_when_it_gets_there(tmp_path: Path):
    table = replaced()
    file = filed(tmp_path / "chain.db", table.commits[:2])
    assert not file.appoint(table.commits[3].body.appointment)
    assert (file.length, file.head.coordinator, file.signer, file.term) == (2, COORDINATOR.peer, NEW.peer, 1)
    file.append(table.commits[2].envelope)
    assert file.head.coordinator == NEW.peer
    for commit in table.commits[3:]:
        file.append(commit.envelope)
    assert file.head == table.head
    file.close()


def test_a_file_learns_it_from_the_chain(tmp_path: Path):
    file = filed(tmp_path / "chain.db", replaced().commits)
    assert (file.term, file.signer) == (1, NEW.peer)
    found = file.appointment_of(1)
    assert found is not None
    assert found.body.coordinator == NEW.peer
    file.close()


def test_a_damaged_file_heals_with_its_appointment(tmp_path: Path):
    table = Table(RUN).genesis().train(2)
    file = filed(tmp_path / "chain.db", table.commits)
    file.appoint(appointment(table.head))
    file.database.execute("UPDATE commits SET checksum = ? WHERE round = 2", (b"x" * 32,))
    file.close()
    file = ChainFile(tmp_path / "chain.db", RUN)
    assert (file.healed, file.length, file.signer) == (True, 2, NEW.peer)
    file.close()


def test_what_is_given_up_is_given_up_at_once_or_not_at_all(tmp_path: Path):
    """Reproduce a fault: a kill in between left commits that no restart gave up."""
    table = Table(RUN).genesis().train(2)
    word = appointment(table.head)
    file = filed(tmp_path / "chain.db", table.train(2).commits)
    InputLog(file).write_now([Entry(round.Tick(), round.Moment(1.0, 1))])
    file.database.execute("CREATE TRIGGER power BEFORE DELETE ON commits BEGIN SELECT RAISE(ABORT, 'power is gone'); END")
    with pytest.raises(sqlite3.IntegrityError):
        file.appoint(word)
    assert (file.length, file.term) == (5, 0)
    file.close()
    file = ChainFile(tmp_path / "chain.db", RUN)
    assert (file.length, file.term) == (5, 0)
    assert len(list(InputLog(file).replay())) == 1
    file.database.execute("DROP TRIGGER power")
    assert file.appoint(word)
    assert (file.length, file.term) == (3, 1)
    assert not list(InputLog(file).replay()), "of a round that is not open any more"
    file.close()


def test_no_commit_is_taken_against_the_owners_newest_word(tmp_path: Path):
    """Check a coordinator that the owner replaced, and a peer that is behind."""
    table = Table(RUN).genesis().train(2)
    word = appointment(table.head)
    commits = table.train(2).commits
    for known, lost in ((3, commits[3]), (2, other(commits[2]))):
        file = filed(tmp_path / f"{known}.db", commits[:known])
        file.appoint(word)
        with pytest.raises(RemoteError):
            file.append(lost.envelope)
        assert file.length == known
        if known == 2:
            file.append(commits[2].envelope)
            assert file.head.coordinator == NEW.peer
        file.close()


def test_a_file_that_lost_its_appointments_is_mended_and_gives_nothing_up(tmp_path: Path):
    table = replaced()
    file = filed(tmp_path / "chain.db", table.commits)
    signed = seal(OWNER, pb.KIND_MANIFEST, RUN.run_id, RUN.canonical_bytes()).envelope
    file.keep_signed_manifest(signed)
    file.database.execute("DROP TABLE appointments")
    file.close()
    file = ChainFile(tmp_path / "chain.db", RUN)
    assert (file.healed, file.length, file.term, file.signer) == (True, 5, 1, NEW.peer)
    assert file.signed_manifest == signed
    assert not file.appoint(table.commits[3].body.appointment)
    assert file.length == 5
    file.close()


# A node follows it, and a halt ends.


async def test_who_meets_a_follower_learns_that_the_owner_has_spoken(tmp_path: Path):
    table = Table(RUN).genesis().train(2)
    word, commits = appointment(table.head), list(table.commits)
    abandoned = [*commits, *table.train(1).commits[3:]]
    async with meeting(tmp_path, RUN, abandoned, commits, commits) as (astray, follower, liar):
        follower.chain.appoint(word)
        blob = astray.store.put([b"payload"])
        forged = appointment(astray.chain.head, 7, pen=NEW)
        liar.forks.tip = lambda: services.Tip(appointment=forged)  # type: ignore[method-assign]
        await liar.exchange.downloader.fetch(blob, [identity(0).peer])
        await follower.exchange.downloader.fetch(blob, [identity(0).peer])
        assert f"appointed {NEW.peer}" in str(await astray.ended())


async def test_a_commit_of_a_later_term_ends_a_node_that_did_not_know_of_it(tmp_path: Path):
    """Check the same coordinator, appointed again: the link does not change, and nodes just connect again."""
    table = Table(RUN).genesis().train(2)
    before = list(table.commits)
    again = appointed(table, appointment(table.head, 1, COORDINATOR.peer), COORDINATOR).train(1).commits[3]
    astray = filed(tmp_path / "chain.db", [*before, *Table(RUN).genesis().train(3).commits[3:]])
    assert f"appointed {COORDINATOR.peer}" in str(proof_of_fork(astray, 3, again.envelope))
    astray.close()


async def test_a_fork_halts_until_the_owner_has_spoken(tmp_path: Path):
    table = Table(RUN).genesis().train(2)
    kept, lost = filed(tmp_path / "chain.db", table.commits), filed(tmp_path / "lost.db", table.commits[:2])
    second = other(table.commits[2])
    assert "two different commits" in str(proof_of_fork(kept, 2, second.envelope))
    with pytest.raises(LocalError, match="two different commits"):
        check_forks(kept)
    word = terms.open_appointment(RUN, appointment(table.head))
    await follow_owner(kept, NEW.peer, word, nobody)
    check_forks(kept)
    with pytest.raises(RemoteError, match=r"^stale-round: .*coordinator"):
        proof_of_fork(kept, 2, second.envelope)
    assert kept.length == 3
    # A follower of the other chain starts again.
    with lost.database:
        lost.write(lost.head, second)
    lost.close()
    lost = ChainFile(tmp_path / "lost.db", RUN)
    await follow_owner(lost, NEW.peer, word, nobody)
    assert (lost.length, lost.signer) == (0, NEW.peer)
    for file in (kept, lost):
        file.close()


async def test_who_is_behind_asks_whether_it_is_on_the_named_chain(tmp_path: Path):
    commits = replaced().commits
    word = terms.open_appointment(RUN, commits[3].body.appointment)

    async def ask(round: int) -> Statement:
        return commits[round]

    behind = filed(tmp_path / "behind.db", commits[:2])
    astray = filed(tmp_path / "astray.db", commits[:1])
    with astray.database:
        astray.write(astray.head, other(commits[1]))
    astray.close()
    astray = ChainFile(tmp_path / "astray.db", RUN)
    for file, length in ((behind, 2), (astray, 0)):
        await follow_owner(file, NEW.peer, word, ask)
        assert file.length == length
        for commit in commits[length:]:
            file.append(commit.envelope)
        assert file.head.coordinator == NEW.peer
        file.close()


async def test_a_coordinator_whose_term_is_over_is_not_followed(tmp_path: Path):
    file = filed(tmp_path / "chain.db", replaced().commits)
    with pytest.raises(LocalError, match="new join link"):
        await follow_owner(file, COORDINATOR.peer, None, nobody)
    await follow_owner(file, NEW.peer, file.appointment_of(1), nobody)
    file.close()


def test_a_fork_in_a_later_term_is_proven_with_its_appointment(tmp_path: Path):
    table = replaced()
    file = filed(tmp_path / "chain.db", table.commits)
    assert "round 4" in str(proof_of_fork(file, 4, other(table.commits[4], NEW).envelope))
    proof = pb.Fork.FromString((tmp_path / "fork-4.pb").read_bytes())
    assert terms.forked_round(RUN, proof) == (4, 1)
    for spoil in (
        lambda fork: fork.ClearField("appointment"),
        lambda fork: fork.appointment.CopyFrom(appointment(table.head, 2)),
        lambda fork: fork.appointment.CopyFrom(appointment(table.head, pen=NEW)),
        lambda fork: fork.second.CopyFrom(other(table.commits[4]).envelope),
        lambda fork: fork.second.CopyFrom(table.commits[3].envelope),
    ):
        spoiled = pb.Fork.FromString(proof.SerializeToString())
        spoil(spoiled)
        with pytest.raises(RemoteError):
            terms.forked_round(RUN, spoiled)
    file.close()


# The owner's verb.


RUN_FILE = """
[run]
name = "test"
owner = "{owner}"
[model]
sequence_length = 16
stages = 2
[model.config]
model_type = "qwen2"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 1
[data]
name = "none"
digest = "0000000000000000000000000000000000000000000000000000000000000000"
[training]
learning_rate = 1e-2
total_steps = 100
batch_size = 4
[compression]
rank = 8
[rounds]
count = 5
inner_steps = 4
max_inner_steps = 12
"""


def test_appoint_writes_what_makes_a_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "[r].toml").write_text(RUN_FILE.replace("{owner}", OWNER.key.hex()))
    (tmp_path / "[r].key").write_bytes(format_identity(b"\x0e" * 32))
    (tmp_path / "[r].key").chmod(0o600)
    run = Manifest.from_toml((tmp_path / "[r].toml").read_text())
    table = Table(run, pen=OWNER).genesis().train(2)
    folder = tmp_path / "home" / "runs" / run.run_id.hex()[:16]
    folder.mkdir(parents=True)
    file = ChainFile(folder / "chain.db", run)
    for commit in table.commits:
        file.append(commit.envelope)
    file.close()
    home = ("--home", tmp_path / "home")
    monkeypatch.setattr("time.time", lambda: 4000.5)
    assert dilocox(monkeypatch, "owner", "appoint", "somebody", tmp_path / "[r].toml", *home) == 2
    assert dilocox(monkeypatch, "owner", "appoint", NEW.peer, tmp_path / "[r].toml", *home, "--round", 9) == 2
    assert dilocox(monkeypatch, "owner", "appoint", NEW.peer, tmp_path / "[r].toml", "--home", tmp_path) == 2
    assert not (tmp_path / "[r].chain").exists()
    assert dilocox(monkeypatch, "owner", "appoint", NEW.peer, tmp_path / "[r].toml", *home, "--round", 2) == 0
    assert "from round 2 on (term 4000)" in capsys.readouterr().out
    assert read_handover(tmp_path / "[r].chain") == (run, NEW.peer)
    assert dilocox(monkeypatch, "owner", "appoint", NEW.peer, tmp_path / "[r].toml", *home) == 2, "it is not overwritten"
    assert {path.name for path in tmp_path.iterdir()} == {"[r].toml", "[r].key", "[r].chain", "home"}
    for commits, gave_up in ((table.commits, True), ([], False), (table.commits[:2], False)):
        mine = ChainFile(tmp_path / f"mine {len(commits)}.db", run)
        for commit in commits:
            mine.append(commit.envelope)
        assert take_over(tmp_path / "[r].chain", mine) == gave_up
        assert (mine.length, mine.head.coordinator) == (2, NEW.peer)
        assert not take_over(tmp_path / "[r].chain", mine), "again: a coordinator may always be started from it"
        assert mine.signed_manifest is not None
        mine.close()
    astray = ChainFile(tmp_path / "astray.db", run)
    astray.append(table.commits[0].envelope)
    with astray.database:
        astray.write(astray.head, other(table.commits[1], OWNER, run))
    astray.close()
    astray = ChainFile(tmp_path / "astray.db", run)
    assert take_over(tmp_path / "[r].chain", astray), "its own folder held a chain that the owner did not name"
    assert (astray.length, astray.head.coordinator) == (2, NEW.peer)
    # The next appointment is larger, although this folder never received the first.
    (tmp_path / "[r].chain").rename(tmp_path / "first.chain")
    monkeypatch.setattr("time.time", lambda: 5000.5)
    assert dilocox(monkeypatch, "owner", "appoint", identity(52).peer, tmp_path / "[r].toml", *home, "--round", 2) == 0
    take_over(tmp_path / "[r].chain", astray)
    assert (astray.term, astray.signer) == (5000, identity(52).peer)
    astray.close()
    another = ChainFile(tmp_path / "another.db", RUN)
    with pytest.raises(RemoteError, match=r"^wrong-run: "):
        take_over(tmp_path / "[r].chain", another)
    another.close()
    with pytest.raises(ConfigError, match="signed manifest"):
        read_handover(folder / "chain.db")


def test_a_full_disk_is_heard_of_though_it_ended_the_transaction(tmp_path: Path):
    commits = Table(RUN).genesis().commits
    file = filed(tmp_path / "chain.db", [])
    file.database.execute("CREATE TRIGGER full BEFORE INSERT ON commits BEGIN SELECT RAISE(ROLLBACK, 'disk is full'); END")
    with pytest.raises(sqlite3.IntegrityError, match="disk is full"):
        file.append(commits[0].envelope)
    file.database.execute("DROP TRIGGER full")
    file.append(commits[0].envelope)
    assert file.length == 1
    file.close()


def test_a_commit_that_the_disk_refuses_leaves_no_transaction_open(tmp_path: Path):
    commits = Table(RUN).genesis().commits
    file = filed(tmp_path / "chain.db", [])
    for statement in (  # what is wrong only at the end
        "PRAGMA foreign_keys = ON",
        "CREATE TABLE parents (id INTEGER PRIMARY KEY)",
        "CREATE TABLE children (id INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER late AFTER INSERT ON commits BEGIN INSERT INTO children VALUES (7); END",
    ):
        file.database.execute(statement)
    with pytest.raises(sqlite3.IntegrityError):
        file.append(commits[0].envelope)
    file.database.execute("DROP TRIGGER late")
    file.append(commits[0].envelope)
    file.close()


def tick() -> Entry:
    return Entry(round.Tick(), round.Moment(1.0, 1))


def test_inputs_are_written_all_or_none(tmp_path: Path):
    def cut() -> Iterator[Entry]:
        yield tick()
        raise OSError("the disk is gone")

    file = filed(tmp_path / "chain.db", [])
    log = InputLog(file)
    with pytest.raises(OSError, match="gone"):
        log.write_now(cut())
    assert not list(log.replay())
    file.append(Table(RUN).genesis().commits[0].envelope)
    file.close()


def test_a_chain_file_is_not_closed_while_inputs_are_written(tmp_path: Path):
    """Reproduce a fault: a coordinator ended with a segmentation fault."""
    file = filed(tmp_path / "chain.db", [])
    log, closing = InputLog(file), threading.Thread(target=file.close)

    def batch() -> Iterator[Entry]:
        yield tick()
        closing.start()
        closing.join(1.0)  # would suffice, were it not to wait for us
        yield tick()

    log.write_now(batch())
    closing.join()
    file = ChainFile(tmp_path / "chain.db", RUN)
    assert len(list(InputLog(file).replay())) == 2
    file.close()
