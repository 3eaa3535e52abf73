"""Tests of jobs and offers: the valid ones, their signers, and the effect of hostile entries; test_market_swarm.py tests
the DHT itself."""

import asyncio
import errno
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.node.attest import simulated
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.attestation import SIMULATED, report_data
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.net.dht import Dht
from dilocox.transport.net.dht_child import DHTID, PLAIN, DHTRecord, MSGPackSerializer, get_dht_time
from dilocox_market import board, listings
from dilocox_market.dht_child import ListingValidator
from dilocox_market.hire import Offered, attested, line_of, with_allowed
from dilocox_market.listings import BUCKETS, MARKET, bucket_of, key_of, lines_of, middle_line, nonce_of, open_listing, place_of
from dilocox_market.offer import invitations
from tests.helpers import digest, identity, manifest, until

NOW = 1_800_000_000
ME, OTHER = identity(1), identity(2)


OWNER = identity(7)


def run_of(coordinator: str, **sections: object) -> Manifest:
    return manifest(run={"owner": OWNER.key.hex(), "coordinator": coordinator}, **sections)  # type: ignore[arg-type]


def signed(run: Manifest, by=OWNER) -> pb.Envelope:
    return seal(by, pb.KIND_MANIFEST, run.run_id, run.canonical_bytes()).envelope


def link_of(peer: str, run: Manifest | None = None) -> str:
    return str(JoinLink((run or run_of(peer)).run_id, peer, "192.0.2.1:7000", digest("certificate", 1)))


def job(signer=ME, run=MARKET, **changes: object) -> Statement:
    said = {"link": link_of(signer.peer), "expires_at": NOW + 1800, "manifest": signed(run_of(signer.peer)), **changes}
    return seal(signer, pb.KIND_JOB, run, pb.Job(**said))  # type: ignore[arg-type]


def offer(signer=ME, **changes: object) -> Statement:
    said = {"name": "box", "expires_at": NOW + 1800, "devices": 8, "cuda": True, **changes}
    return seal(signer, pb.KIND_OFFER, MARKET, pb.Offer(**said))  # type: ignore[arg-type]


def raw(listing: Statement) -> bytes:
    return listing.envelope.SerializeToString()


def test_a_job_and_an_offer_count_until_they_expire():
    for listing in (job(), offer(), offer(account=bytes(20), price=7)):
        assert open_listing(raw(listing), NOW).body == listing.body
        for late in (NOW + 1800, NOW + 1801):
            with pytest.raises(RemoteError, match=r"^stale-round: .*expired"):
                open_listing(raw(listing), late)


@pytest.mark.parametrize(
    "listing",
    [
        job(expires_at=NOW + listings.LISTING_SECONDS + 1),
        job(link=link_of(OTHER.peer)),
        job(link="dilocox://nonsense"),
        job(link=""),
        job(link=link_of(ME.peer) + "&x=';echo pasted;'"),
        job(link=link_of(ME.peer) + "&x=\x1b]0;title\x07"),
        job(link=f" {link_of(ME.peer)}"),
        job(manifest=signed(run_of(OTHER.peer)), link=link_of(ME.peer, run_of(OTHER.peer))),
        job(manifest=signed(run_of(ME.peer), by=ME)),
        job(manifest=signed(run_of(ME.peer, rounds={"count": 9}))),
        job(manifest=pb.Envelope()),
        job(run=digest("run", 1)),
        offer(devices=0),
        offer(devices=limits.HOSTS + 1),
        offer(account=b"short"),
        offer(name="\x1b[2J"),
        offer(hours="x" * 1000),
        offer(evidence=pb.BoundEvidence(key=b"short")),
    ],
)
def test_what_does_not_count_is_refused(listing: Statement):
    with pytest.raises(RemoteError):
        open_listing(raw(listing), NOW)


def test_nobody_announces_anothers_run_nor_says_in_the_market_what_is_said_in_a_run():
    forged = pb.Envelope(
        kind=pb.KIND_JOB, key=ME.key, body=job().envelope.body, signature=job(OTHER, link=link_of(ME.peer)).envelope.signature
    )
    with pytest.raises(RemoteError):
        open_listing(forged.SerializeToString(), NOW)
    leave = seal(ME, pb.KIND_LEAVE, MARKET, pb.Leave(serial=1, round=2, head=digest("head", 1)))
    with pytest.raises(RemoteError, match=r"^malformed: .*kind"):
        open_listing(raw(leave), NOW)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_and_nothing_else(data: bytes):
    with pytest.raises(RemoteError):
        open_listing(data, NOW)


def test_signers_are_spread_over_buckets():
    assert {bucket_of(identity(number).peer) for number in range(100)} == set(range(BUCKETS))
    assert place_of(job()) == key_of(pb.KIND_JOB, bucket_of(ME.peer)) != place_of(offer())


# Listings that a node of the market stores for others


def record(listing: Statement, key: str = "", subkey: str = "", lives: float | None = None) -> DHTRecord:
    return DHTRecord(
        DHTID.generate(source=key or place_of(listing)).to_bytes(),
        MSGPackSerializer.dumps(subkey or listing.peer),
        MSGPackSerializer.dumps(raw(listing)),
        listing.body.expires_at if lives is None else lives,
    )


def test_a_node_keeps_what_counts_under_its_signers_name_alone():
    expires = int(get_dht_time()) + 1000
    keeps = ListingValidator().validate
    listing = offer(expires_at=expires)
    assert keeps(record(listing))
    assert keeps(record(job(expires_at=expires)))
    assert not keeps(record(listing, subkey=OTHER.peer))
    assert not keeps(record(listing, key=key_of(pb.KIND_JOB, bucket_of(ME.peer))))
    assert not keeps(record(listing, lives=expires + 1))
    assert not keeps(record(offer(expires_at=expires - 2000)))
    plain = record(listing)
    assert not keeps(DHTRecord(plain.key, PLAIN, plain.value, plain.expiration_time))
    assert not keeps(DHTRecord(plain.key, plain.subkey, b"\xc1 nonsense", plain.expiration_time))


def test_a_node_keeps_so_many_of_each_kind_and_has_room_again_when_they_expire(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listings, "LISTINGS", 3)
    now = int(get_dht_time())
    keeps = ListingValidator().validate
    strangers = [record(offer(identity(number), expires_at=now + 1000)) for number in range(1, 5)]
    assert [keeps(each) for each in strangers] == [True, True, True, False]
    assert keeps(strangers[0]), "who is there may say it again"
    assert keeps(record(job(expires_at=now + 1000))), "of the other kind there are none yet"
    monkeypatch.setattr("dilocox_market.dht_child.get_dht_time", lambda: now + 1001)
    assert keeps(record(offer(identity(9), expires_at=now + 2000)))


def test_what_a_node_keeps_of_a_kind_passes_in_one_answer(monkeypatch: pytest.MonkeyPatch):
    now = int(get_dht_time())
    keeps = ListingValidator().validate
    small, large = (record(offer(expires_at=now + 1000, hours=hours)) for hours in ("", "x" * 20))
    monkeypatch.setattr(listings, "LISTINGS_BYTES", len(raw(offer(expires_at=now + 1000, hours=""))) * 2 + 10)
    assert keeps(small)
    assert keeps(record(offer(OTHER, expires_at=now + 1000)))
    assert not keeps(record(offer(identity(3), expires_at=now + 1000)))
    assert not keeps(large), "what it is replaced by counts, too"
    assert keeps(small), "and who is there may say it again"
    monkeypatch.setattr("dilocox_market.dht_child.get_dht_time", lambda: now + 999.5)
    assert not keeps(record(offer(identity(3), expires_at=now + 2000)))
    monkeypatch.setattr("dilocox_market.dht_child.get_dht_time", lambda: now + 1000)
    assert keeps(record(offer(identity(3), expires_at=now + 2000)))


def test_the_most_that_is_kept_of_a_kind_fits_libp2ps_answer():
    from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE

    assert limits.JOB_BYTES < listings.LISTINGS_BYTES <= DEFAULT_MAX_MSG_SIZE * 7 // 8, "keys and addresses come with it"


# Checks of an offer's evidence


def proved(signer=ME, run=MARKET, nonce: bytes | None = None) -> Statement:
    expires = int(time.time()) + 1000
    nonce = nonce_of(expires) if nonce is None else nonce
    evidence = simulated.make(report_data(SIMULATED, signer.key, run, nonce), bytes(48))
    bound = pb.BoundEvidence(key=signer.key, run=run, nonce=nonce, evidence=evidence.message())
    return offer(ME, expires_at=expires, evidence=bound)


def test_an_offer_is_attested_where_its_evidence_was_made_for_it():
    assert attested(proved()) == SIMULATED
    assert attested(offer()) == ""


@pytest.mark.parametrize("lie", [{"signer": OTHER}, {"run": digest("run", 1)}, {"nonce": nonce_of(NOW)}, {"nonce": bytes(32)}])
def test_evidence_of_something_else_attests_nothing(lie: dict[str, object]):
    assert attested(proved(**lie)) == ""  # type: ignore[arg-type]


def test_evidence_that_says_another_report_attests_nothing():
    listing = proved()
    listing.body.evidence.evidence.blob = listing.body.evidence.evidence.blob[:-1] + b"x"
    assert attested(listing) == ""


def test_who_is_invited_hears_of_it():
    run = run_of(ME.peer, admission={"policy": "allow-list", "allow": [OTHER.peer]})
    jobs = [job(manifest=signed(run), link=link_of(ME.peer, run)), job()]
    assert invitations(jobs, OTHER.peer) == {link_of(ME.peer, run)}
    assert invitations(jobs, identity(5).peer) == set()


async def test_an_identity_that_is_offered_lies_nowhere_but_in_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dilocox_market.offer import offered

    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def made(end: int, lines: Sequence[pb.Envelope]) -> pb.Offer:
        return pb.Offer(expires_at=end, devices=1, lines=lines)

    offering = asyncio.create_task(offered((), 0, "127.0.0.1", ME, home, made, True))
    try:
        await until(lambda: (home / "libp2p.key").exists() or any(elsewhere.iterdir()))
        assert list(elsewhere.iterdir()) == [], "a process that is killed leaves it there"
    finally:
        offering.cancel()
        await asyncio.wait([offering])


def test_evidence_that_cannot_be_had_for_a_while_ends_no_offer(tmp_path: Path):
    """Reproduce a fault: it ended with a traceback the first time that the hardware did not answer."""
    from dilocox_market.offer import prover

    (tmp_path / "measurement").write_text("ab" * 48)
    proves = prover(ME, tmp_path / "measurement")
    assert attested(offer(expires_at=NOW, evidence=proves(nonce_of(NOW))))
    (tmp_path / "measurement").unlink()
    with pytest.raises(LocalError, match=r"--attest: .*/measurement contains"):
        proves(nonce_of(NOW))


async def test_what_cannot_be_said_is_told_once_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(board, "SOON_SECONDS", 0.0)
    tried, told = list[int](), list[Statement]()

    def made(end: int) -> pb.Offer:
        tried.append(end)
        if len(tried) < 3:
            raise LocalError("--attest: nothing answers")
        return pb.Offer(expires_at=end, devices=1)

    async def announce(self: board.Board, listing: Statement) -> bool:
        told.append(listing)
        return True

    monkeypatch.setattr(board.Board, "announce", announce)
    announcing = asyncio.create_task(board.Board(cast(Dht, None), "").announce_forever(ME, pb.KIND_OFFER, made))
    await until(lambda: bool(told))
    announcing.cancel()
    assert [each.endswith(": --attest: nothing answers") for each in caplog.messages] == [True]


async def test_what_ends_an_offer_is_said_as_it_is(tmp_path: Path):
    """Reproduce a fault: a group of one error was a traceback."""
    from dilocox_market.offer import offered

    def made(end: int, lines: Sequence[pb.Envelope]) -> pb.Offer:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        await offered((), 0, "127.0.0.1", ME, tmp_path, made, False)


# Bandwidth that others measured


def line(signer=OTHER, run=MARKET, **changes: object) -> pb.Envelope:
    said = {"peer": ME.peer, "upload_bits": 10**8, "download_bits": 10**9, "measured_at": NOW - 60, **changes}
    return seal(signer, pb.KIND_LINE, run, pb.Line(**said)).envelope  # type: ignore[arg-type]


def test_of_what_others_measured_the_middle_counts_and_each_once():
    three = [line(identity(n), upload_bits=n * 10, download_bits=100 - n) for n in (3, 4, 5)]
    found = lines_of(offer(lines=three), NOW)
    assert [each.peer for each in found] == [identity(n).peer for n in (3, 4, 5)]
    assert middle_line(found) == (40, 96)
    assert middle_line(found[:2]) == (30, 96), "of two the lower"
    assert len(lines_of(offer(lines=[line(upload_bits=n) for n in range(3)]), NOW)) == 1
    assert lines_of(offer(), NOW) == []
    with pytest.raises(RemoteError, match=r"^oversize: "):
        open_listing(raw(offer(lines=[line(identity(n)) for n in range(3, 7)])), NOW)


@pytest.mark.parametrize(
    "lie",
    [
        line(ME),
        line(peer=OTHER.peer),
        line(peer=identity(5).peer),
        line(run=digest("run", 1)),
        line(measured_at=NOW - listings.LINE_SECONDS),
        line(measured_at=NOW + listings.LISTING_SECONDS + 1),
        pb.Envelope(),
        offer(OTHER).envelope,
    ],
)
def test_a_measurement_that_is_not_anothers_of_this_line_does_not_count(lie: pb.Envelope):
    assert lines_of(offer(lines=[lie, line(identity(3))]), NOW)[0].peer == identity(3).peer
    assert len(lines_of(offer(lines=[lie, line(identity(3))]), NOW)) == 1


def test_who_hires_sees_what_was_measured_or_else_what_is_said():
    said = offer(upload_bits=5 * 10**8, download_bits=10**9, lines=[line()])
    assert line_of(Offered(ME.peer, said.body, lines_of(said, NOW), "", "")) == "100 up, 1,000 down, measured by 1"
    assert line_of(Offered(ME.peer, said.body, [], "", "")) == "500 up, 1,000 down, not measured"
    assert line_of(Offered(ME.peer, offer().body, [], "", "")) == ""


# Admission to a run


RUN_FILE = '[run]\nname = "r"\nowner = "' + "00" * 32 + '"\n'


def admitted(text: str) -> tuple[str, tuple[str, ...]]:
    import tomllib

    section = tomllib.loads(text)["admission"]
    return section["policy"], tuple(section["allow"])


@pytest.mark.parametrize(
    ("section", "before"),
    [
        ("", ()),
        ('\n[admission]\npolicy = "open"\n', ()),
        ('\n[admission]\npolicy = "allow-list"\nallow = ["A"]\npublic_read = true\n\n[data]\nname = "d"\n', ("A",)),
        ('\n[admission]  # who\nallow = [\n  "A",  # first\n  "B",\n]\n', ("A", "B")),
    ],
)
def test_who_is_hired_comes_onto_the_allow_list_and_all_else_stays(section: str, before: tuple[str, ...]):
    names = {"A": identity(3).peer, "B": identity(4).peer}
    for name, peer in names.items():
        section = section.replace(f'"{name}"', f'"{peer}"')
    found = with_allowed(RUN_FILE + section, [ME.peer, OTHER.peer])
    assert admitted(found) == ("allow-list", (*(names[name] for name in before), ME.peer, OTHER.peer))
    assert admitted(with_allowed(found, [ME.peer])) == admitted(found)
    import tomllib

    rest = tomllib.loads(found)
    was = tomllib.loads(RUN_FILE + section)
    assert {k: v for k, v in rest["admission"].items() if k not in ("policy", "allow")} == {
        k: v for k, v in was.get("admission", {}).items() if k not in ("policy", "allow")
    }
    assert {k: v for k, v in rest.items() if k != "admission"} == {k: v for k, v in was.items() if k != "admission"}


@pytest.mark.parametrize("last", ['policy = "open"', f'policy = "allow-list"\nallow = ["{OTHER.peer}"]'])
def test_a_run_file_without_its_last_line_s_end_is_edited_too(last: str):
    assert ME.peer in admitted(with_allowed(f"{RUN_FILE}[admission]\n{last}", [ME.peer]))[1]


@pytest.mark.parametrize(
    "text",
    [
        'admission = { policy = "open" }\n' + RUN_FILE,
        'admission.policy = "open"\n' + RUN_FILE,
        RUN_FILE + '["admission"]\npolicy = "open"\n',
        RUN_FILE + '[admission]\n"policy" = "open"\n',
        RUN_FILE + f'[admission]\npolicy = "allow-list"\nallow = [\n  "{OTHER.peer}",  # one ] of them\n]\n',
        '[run]\nname = """\n[admission]\npolicy = 1\n"""\n',
    ],
)
def test_a_run_file_that_is_written_in_another_way_is_left_to_a_person(text: str):
    with pytest.raises(ConfigError, match=f"allow-list|{ME.peer}"):
        with_allowed(text, [ME.peer])


def test_a_run_file_keeps_its_mode_and_its_place_and_is_left_as_it_is_where_it_cannot_be_edited(tmp_path: Path):
    from dilocox.cli.run.init import render_preset
    from dilocox_market.hire import hire

    there, named = tmp_path / "there.toml", tmp_path / "run.toml"
    there.write_text(render_preset("tiny", "t", "00" * 32))
    there.chmod(0o600)
    named.symlink_to(there)
    hire(named, [ME.peer])
    assert named.is_symlink()
    assert there.stat().st_mode & 0o777 == 0o600
    assert ME.peer in there.read_text()
    other = there.read_text().replace("[admission]", '["admission"]')
    there.write_text(other)
    with pytest.raises(ConfigError):
        hire(named, [OTHER.peer])
    assert there.read_text() == other


def test_who_is_no_peer_is_not_hired():
    with pytest.raises(ConfigError, match="not a peer id"):
        with_allowed(RUN_FILE, ["nobody"])


def test_a_whole_run_file_stays_one(tmp_path: Path):
    from dilocox.cli.run.init import render_preset

    text = with_allowed(render_preset("tiny", "t", "00" * 32), [ME.peer])
    assert Manifest.from_toml(text).admission.allow == (ME.peer,)
    assert manifest().admission.allow == ()
