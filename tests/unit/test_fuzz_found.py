"""Tests of the findings of bench.fuzz: each of these ended a daemon, filled its log, or was accepted."""

import asyncio
import base64
import logging
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from dilocox.node.outer.checkpoint import BoundaryMeta, boundaries, seal_boundary
from dilocox.node.outer.tensor_file import save_tensors
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.protocol import limits
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import seal
from dilocox.transport.limits.caller_auth import HEADER, CallerAuth, Credentials
from dilocox.transport.net import tls
from dilocox.transport.net.peer_directory import PeerDirectory, cached_records
from dilocox.transport.net.reachability import dial
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from tests.helpers import COORDINATOR, PATIENCE_SECONDS, Table, digest, identity, manifest
from tests.peers import meeting
from tests.unit.test_callers import Call

RUN = manifest()


@pytest.mark.parametrize("method", ["/dilocox.v1.Peer/Fetch", "/dilocox.v1.Peer/GetCommit", "/dilocox.v1.Peer/Push"])
async def test_a_request_that_does_not_parse_is_refused_in_a_word(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Reproduce a fault: gRPC answered "unexpected" and logged a traceback for each."""
    async with meeting(tmp_path, RUN, Table(RUN).genesis().commits) as (peer,), asyncio.timeout(PATIENCE_SECONDS):
        credentials = grpc.ssl_channel_credentials(tls.pem_of(peer.record.certificate))
        options = [("grpc.ssl_target_name_override", tls.SERVER_NAME)]
        channel: Any
        async with grpc.aio.secure_channel(peer.record.address, credentials, options) as channel:
            if method.endswith("Push"):
                call: Any = channel.stream_unary(method)(iter([b"\xff"]))
            elif method.endswith("Fetch"):
                call = channel.unary_stream(method)(b"\xff").read()
            else:
                call = channel.unary_unary(method)(b"\xff")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            whole = services.CommitRequest(round=0).SerializeToString()
            assert await channel.unary_unary("/dilocox.v1.Peer/GetCommit")(whole), "and who asks for something gets it"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("port", ["70000", "65536", "0", "-1", "99999999999999999999"])
async def test_a_record_without_a_port_is_dialled_by_nobody(port: str):
    """Reproduce a fault: the resolver takes a port modulo 65,536, and the socket raised an error that no code caught."""
    with pytest.raises(RemoteError, match=r"^unavailable: .*address"):
        await dial(pb.PeerRecord(address=f"127.0.0.1:{port}"), "127.0.0.1")


def test_a_credential_is_no_longer_than_it_must_be():
    """Reproduce a fault: verdicts are remembered by the credential's bytes, and padded ones were 80 MB of them."""
    ((_, raw),) = Credentials(identity(1), RUN.run_id, b"der").metadata
    callers = CallerAuth(RUN.run_id, b"der")
    assert len(raw) <= limits.CREDENTIAL_BYTES
    assert callers.peer(Call(((HEADER, raw),))) == identity(1).peer  # type: ignore[arg-type]
    long = raw + b"\xfa\x01" + bytes([127]) + bytes(127)  # an unknown field
    with pytest.raises(RemoteError, match="oversize"):
        callers.peer(Call(((HEADER, long),)))  # type: ignore[arg-type]
    assert not callers.remembered(Call(((HEADER, long),)))  # type: ignore[arg-type]


def test_a_verdict_on_evidence_that_the_run_does_not_ask_for_stands_in_no_commit():
    """Reproduce a fault: no peer can send such a verdict live, but a commit with it was accepted."""
    table = Table(RUN).genesis()
    body = pb.Commit.FromString(table.commits[0].envelope.body)
    body.attested.append(pb.Attestation(peer=identity(1).peer, kind="sev-snp", valid_until_ms=1 << 50))
    with pytest.raises(RemoteError, match=r"^attestation: "):
        chain.extend(RUN, initial_head(COORDINATOR.peer), seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body).envelope)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000])
def test_a_run_file_that_python_does_not_read_is_a_sentence(text: str):
    with pytest.raises(ConfigError, match="run file is not TOML"):
        Manifest.from_toml(text)


def test_a_link_s_addresses_can_be_written():
    link = JoinLink(RUN.run_id, identity(1).peer, "h:1", digest("certificate"), ("/ip4/1",))
    for bad in (str(link).replace("at=h", "at=\ud800"), str(link).replace("/ip4", "/ip4%0A")):
        with pytest.raises(ConfigError, match="characters"):
            JoinLink.parse(bad)


# Files: opened, or set aside and created again


@pytest.mark.parametrize("damage", [b"1" + b"0" * 30, b"-5", b"9" * 5000])
def test_a_damaged_count_of_starts_is_begun_again(tmp_path: Path, damage: bytes):
    """Reproduce a fault: a record's sequence did not fit the wire, and the daemon ended at every start."""
    (tmp_path / "starts").write_bytes(damage)
    with closing(DataDirectory(tmp_path, identity(1))) as home:
        PeerDirectory(None, identity(1), RUN.run_id, home.start_number()).seal_record("h:1", b"", "", [])
    assert (tmp_path / "starts.bad").read_bytes() == damage


@pytest.mark.parametrize("damage", [b'{"port": 5000.0}', b'{"dht_port": true}', b"[" * 10_000])
def test_a_port_is_a_whole_number(tmp_path: Path, damage: bytes):
    (tmp_path / "daemon.json").write_bytes(damage)
    with closing(DataDirectory(tmp_path, identity(1))) as home:
        assert home.remembered() == {}


def test_records_nested_beyond_all_reason_are_set_aside(tmp_path: Path):
    (tmp_path / "peers.json").write_bytes(b"[" * 100_000)
    assert cached_records(tmp_path / "peers.json", RUN.run_id) == []


def test_a_certificate_of_a_kind_that_nobody_knows_is_made_again(tmp_path: Path):
    """Reproduce a fault: the library's error for it is no ValueError."""
    first = tls.load_or_create(tmp_path)
    curve = bytes.fromhex("06082a8648ce3d030107")  # P-256, in the key's DER
    other = first.certificate_der.replace(curve, curve[:-1] + b"\x08")
    assert other != first.certificate_der
    (tmp_path / "tls.pem").write_bytes(first.key_pem + pem(other))
    assert tls.load_or_create(tmp_path) != first


def pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    "statement", ["UPDATE own SET envelope = 7", "UPDATE sequence SET reserved = 'x'", "UPDATE sequence SET reserved = -9"]
)
def test_what_a_node_signed_is_bytes_and_its_counter_counts(tmp_path: Path, statement: str):
    with closing(SignedStatementLog(tmp_path / "own.db", RUN.run_id)) as own:
        own.keep(Table(RUN).claim(1))
        reached = own.next_sequence()
    with closing(sqlite3.connect(tmp_path / "own.db")) as database:
        database.execute(statement)
        database.commit()
    with closing(SignedStatementLog(tmp_path / "own.db", RUN.run_id)) as again:
        assert list(again.all()) == []
        assert again.next_sequence() >= reached - 1000
    assert list(tmp_path.glob("own.db.bad"))


@pytest.mark.parametrize("spoilt", ["commits RENAME COLUMN envelope TO envelops", "run RENAME COLUMN manifest TO manifesu"])
def test_a_chain_file_with_other_columns_is_begun_again(tmp_path: Path, spoilt: str):
    """Reproduce a fault: with one flipped bit in a column's name, the daemon reported a full disk at every start."""
    ChainFile(tmp_path / "chain.db", RUN).close()
    with closing(sqlite3.connect(tmp_path / "chain.db")) as database:
        database.execute(f"ALTER TABLE {spoilt}")
    with closing(ChainFile(tmp_path / "chain.db", RUN)) as opened:
        assert opened.length == 0
        assert opened.healed


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_a_boundary_whose_description_rotted_was_never_there(tmp_path: Path, at: int):
    """Reproduce a fault: a worker ended on it, and the next one too."""
    meta = BoundaryMeta(3, 4, 64, 2.5, 16, 1, 4, 8, "ef" * 32, "ab" * 32, "cd" * 32, 100, 1.0, 4.0, 0.5, "7878")
    folder = tmp_path / "0001" / "00000003"
    folder.mkdir(parents=True)
    for name in ("inner", "outer"):
        save_tensors({}, folder / f"{name}.safetensors")
    seal_boundary(tmp_path, 1, meta)
    assert boundaries(tmp_path, 1) == {3: meta}
    raw = bytearray((folder / "boundary.json").read_bytes())
    assert len(raw) > len(asdict(meta))
    raw[at % len(raw)] ^= 4
    (folder / "boundary.json").write_bytes(raw)
    assert boundaries(tmp_path, 1) == {}
    assert (folder / "boundary.json.bad").exists()


def test_a_chain_file_whose_schema_is_no_text_is_begun_again(tmp_path: Path):
    """Reproduce a finding of 10⁷ inputs: the recovery read the old file, and raised an unexpected error."""
    ChainFile(tmp_path / "chain.db", RUN).close()
    sound = (tmp_path / "chain.db").read_bytes()
    first = sound.index(b"CREATE TABLE appointments")
    for at in range(first, first + 80, 2):
        path = tmp_path / f"{at}.db"
        path.write_bytes(sound[:at] + b"\xff" + sound[at + 1 :])
        with closing(ChainFile(path, RUN)) as opened:
            assert opened.length == 0
