"""Parsers of bytes or text from outside, a row each: its inputs, its allowed exceptions, and the inputs that it must
reject.

A call returns if it accepts its input, and raises one of its errors if it rejects it. Any other exception, an
AssertionError too, is a bug: a call asserts that its accepted input is valid.
"""

import functools
import json
import math
import shutil
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import safetensors.torch
from google.protobuf.message import DecodeError, Message

from bench.sections import toml_value
from dilocox.coordinator.kv_store import StoreError, StoreRefusedError
from dilocox.node.attest import simulated
from dilocox.node.hosts.cluster_link import ClusterLink
from dilocox.node.outer import checkpoint
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.protocol.consensus import chain, terms
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink, key_of_peer, peer_id
from dilocox.protocol.payload import payload
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.run.manifest import Compression, Manifest, open_manifest
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.attestation import AttestationError, Evidence, check_binding
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope, seal
from dilocox.transport.archive.storage import open_storage
from dilocox.transport.limits import caller_auth, head_gossip
from dilocox.transport.net import tls
from dilocox.transport.net.peer_directory import PeerDirectory, cached_records
from dilocox.transport.store.blobs import BlobStore, PartialBlob, blob_digest
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import parse_folders
from dilocox.transport.store.data_directory import DataDirectory, format_identity, load_identity
from dilocox.views.http import wrong_address
from dilocox_etcd.client import Etcd, open_answer
from dilocox_tee import certificates, machine, nvidia, snp, tdx
from plugins.tee.tests.vendors import NOW, Amd, Gpu, Intel, pem
from tests.helpers import COORDINATOR, Table, digest, identity, manifest
from tests.property.test_payload import random_payload

__all__ = ["Target", "statements", "targets"]

RUN = manifest()
KINDS = tuple(kind for kind in pb.Kind.values() if kind not in (pb.KIND_UNSPECIFIED, pb.KIND_MANIFEST))
FREE = frozenset(("closed_at_ms", "open_ms", "collect_ms", "vote_ms", "collect_history", "vote_history", "refusals"))
"""Fields that a coordinator may freely choose in a commit: its clocks, its memory of them, and the refusals that it saw."""
MICROSECONDS, SIGNED, SLOW, DISK = 60.0, 12.0, 4.0, 0.4
"""Weights: shares of the inputs for a parser whose call takes microseconds, verifies a signature, takes most of a
millisecond, writes files."""


@dataclass(frozen=True)
class Target:
    name: str
    corpus: Sequence[bytes]
    """Inputs that would be accepted."""
    call: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (RemoteError,)
    weight: float = MICROSECONDS
    message: type[Message] | None = None
    """Message type whose canonical forms the corpus contains."""


LINK = JoinLink(RUN.run_id, identity(1).peer, "[2001:db8::1]:4711", digest("certificate"), ("/ip4/192.0.2.1/tcp/1/p2p/x",))


def statements() -> tuple[Table, list[Statement[Any]]]:
    """Return a round machine with a contribution from every cluster, and a statement of each kind that it would accept."""
    table = Table(RUN).genesis().train(2).contribute()
    head, certificate = table.head, b"c" * 32
    own = [
        (
            pb.KIND_PEER_RECORD,
            pb.PeerRecord(address="192.0.2.1:4711", certificate=b"der", dht_addresses=["/ip4/1"], sequence=9),
        ),
        (pb.KIND_HEARTBEAT, pb.Heartbeat(sequence=7, round=3, step=2, loss=2.5, tokens_per_second=9, head=head.digest)),
        (pb.KIND_CALL, pb.Call(certificate=certificate)),
        (pb.KIND_ANSWER, pb.Answer(statement=digest(1), outcome=pb.OUTCOME_REJECT, detail="no", round=3, head=head.digest)),
        (pb.KIND_HELD, pb.Held(blob=digest(2), round=3)),
        (pb.KIND_APPOINTMENT, pb.Appointment(term=1, coordinator=identity(1).peer, round=3, head=digest(3))),
        (pb.KIND_JOB, pb.Job(link=str(LINK), expires_at=9)),
        (pb.KIND_OFFER, pb.Offer(name="box", expires_at=9, devices=8, cuda=True, hours="22-06", price=7, account=bytes(20))),
        (pb.KIND_LINE, pb.Line(peer=identity(2).peer, upload_bits=10**8, download_bits=10**9, measured_at=9)),
        (
            pb.KIND_EVIDENCE,
            pb.BoundEvidence(key=identity(1).key, run=RUN.run_id, nonce=digest(3), evidence=evidence().message()),
        ),
    ]
    made = [table.claim(5), table.layout(1, [(1, 0, 1, 0), (7, 1, 1, 0)]), table.leave(2), table.report(1), table.receipt(1)]
    made += [table.contribution(1), table.ballots[-1], table.commits[-1]]
    return table, [*made, *(seal(identity(1), kind, RUN.run_id, body) for kind, body in own)]


def evidence() -> Evidence:
    return simulated.make(bytes(64), b"\x09" * 48)


def targets(folder: Path) -> list[Target]:
    """Return every row, in a fixed order. `folder`: for rows that read files; of this process alone."""
    table, said = statements()
    return [*_statements(said), *_chain(table), *_machine(table, said), *_payloads(), *_names(), *_hardware(), *_files(folder)]


# Statements, commits, the machine


def _statements(said: list[Statement[Any]]) -> list[Target]:
    corpus = [statement.envelope.SerializeToString(deterministic=True) for statement in said]

    def envelope(raw: bytes) -> None:
        opened = open_envelope(raw, RUN.run_id, KINDS)
        assert opened.envelope.SerializeToString(deterministic=True) in corpus, "what nobody signed was opened"

    def body(kind: Any, raw: bytes) -> None:
        opened = open_envelope(seal(identity(1), kind, RUN.run_id, raw).envelope, RUN.run_id, (kind,))
        assert canonical(opened.body) == raw, "a body has one form"

    rows = [Target("envelope", corpus, envelope, message=pb.Envelope, weight=SIGNED)]
    for kind in KINDS:
        bodies = [statement.envelope.body for statement in said if statement.kind == kind]
        message = next(type(statement.body) for statement in said if statement.kind == kind)
        name = f"body of {pb.Kind.Name(kind).removeprefix('KIND_').lower()}"
        rows.append(Target(name, bodies, functools.partial(body, kind), weight=SIGNED, message=message))
    return rows


def _chain(table: Table) -> list[Target]:
    heads_before = [initial_head(COORDINATOR.peer)]
    for made in table.commits:
        heads_before.append(chain.extend(RUN, heads_before[-1], made.envelope)[0])

    def commit(raw: bytes) -> None:
        claimed = _parsed(pb.Commit, raw)
        number = min(claimed.round, len(table.commits) - 1)
        honest = table.commits[number].body
        _, extended = chain.extend(RUN, heads_before[number], seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, raw).envelope)
        fields = [field.name for field in honest.DESCRIPTOR.fields]
        changed = {name for name in fields if getattr(honest, name) != getattr(extended.body, name)}
        assert changed <= FREE, f"a commit that does not follow was believed: {changed - FREE}"

    forged = seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, pb.Commit(round=1, previous=digest(0))).envelope
    proof = canonical(pb.Fork(first=table.commits[1].envelope, second=forged))

    def fork(raw: bytes) -> None:
        found = _parsed(pb.Fork, raw)
        terms.forked_round(RUN, found)
        signed = {bytes(found.first.body), bytes(found.second.body)}
        assert signed == {table.commits[1].envelope.body, forged.body}, "a proof of what was not signed"

    return [
        Target("commit", [made.envelope.body for made in table.commits], commit, weight=SLOW, message=pb.Commit),
        Target("fork proof", [proof], fork, weight=SIGNED, message=pb.Fork),
    ]


def _parsed(kind: type[Any], raw: bytes) -> Any:
    """Parse bytes as gRPC does for the product: it rejects unparsable messages itself."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise RemoteError(pb.REASON_MALFORMED, "does not parse") from error


def _machine(table: Table, said: list[Statement[Any]]) -> list[Target]:
    judged = [statement for statement in said if statement.kind in (pb.KIND_CLAIM, pb.KIND_CLUSTER, pb.KIND_LEAVE)]
    judged += [
        statement for statement in said if statement.kind in (pb.KIND_STATE_REPORT, pb.KIND_RECEIPT, pb.KIND_CONTRIBUTION)
    ]

    def step(statement: Statement[Any], raw: bytes) -> None:
        sealed = seal(identity(1), statement.kind, RUN.run_id, raw).envelope
        event = round_machine.Received(open_envelope(sealed, RUN.run_id, (statement.kind,)))
        after, _ = round_machine.step(table.state, event, table.moment)
        assert after.head.round == table.head.round, "one statement closes no round here"

    return [
        Target(
            f"machine, {pb.Kind.Name(one.kind).removeprefix('KIND_').lower()}",
            [one.envelope.body],
            functools.partial(step, one),
            weight=SIGNED,
            message=type(one.body),
        )
        for one in judged
    ]


# Payloads


def _payloads() -> list[Target]:
    rows = []
    for codec, entropy in (
        ("lowrank-int4", False),
        ("lowrank-int4", True),
        ("int2", True),
        ("topk-int2", True),
        ("fp32", False),
    ):
        compression = Compression.model_validate({"codec": codec, "entropy_coding": entropy, "rank": 4, "k": 256})
        layout = payload.stage_layout([(48, 40), (33,), (5, 7)], compression, compression.keep)
        corpus = [payload.pack(random_payload(layout, seed, compression.keep), entropy) for seed in range(3)]
        name = f"payload, {codec}{', coded' if entropy else ''}"
        rows.append(Target(name, corpus, functools.partial(_decode, layout), weight=SIGNED))
    stages = range(RUN.model.stages)
    leaves = [
        pb.Leaf(stage=n, digest=digest(n), size=100, norms=bytes([120] * len(stage_tensors(RUN.model, n)))) for n in stages
    ]
    rows.append(Target("leaves", [canonical(pb.Leaves(leaves=leaves))], lambda raw: read_leaves(RUN, raw), message=pb.Leaves))
    return rows


def _decode(layout: payload.StageLayout, raw: bytes) -> None:
    tensors = payload.parse(raw, layout)
    assert math.isfinite(payload.decoded_norm(tensors)), "a payload without a norm"
    again = payload.pack(tensors, layout.entropy, raw[payload.OWNER])
    assert layout.entropy or again == raw, "a payload that is not coded has one form"
    assert payload.pack(payload.parse(again, layout), layout.entropy, raw[payload.OWNER]) == again, (
        "what it says is not what it says again"
    )


# Names, documents, metadata


class Call:
    """Call as a service sees it."""

    def __init__(self, raw: bytes) -> None:
        self._metadata = ((caller_auth.HEADER, raw),)

    def invocation_metadata(self) -> Any:
        return self._metadata


ETCD_ANSWERS = (
    {"kvs": [{"key": "YQ==", "value": "Yg==", "mod_revision": "3", "lease": "7"}]},
    {"succeeded": True},
    {"responses": [{"response_range": {"kvs": [{"key": "YQ=="}]}}]},
    {"ID": "7", "TTL": "3"},
    {"result": {"ID": "7", "TTL": "3"}},
    {"error": "etcdserver: requested lease not found", "code": 5, "message": "etcdserver: requested lease not found"},
    {"error": {"grpc_code": 8, "message": "received message larger than max"}},
)


class Answered(Etcd):
    """A store whose member gives this answer to every call."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    async def call(self, call: str, request: dict[str, Any]) -> Any:
        return open_answer(self.raw, "http://store", False)


def _names() -> list[Target]:
    ours = [RUN, manifest(compression={"codec": "topk-int2", "k": 64, "rank": None})]
    owned = manifest(run={"owner": COORDINATOR.key.hex()})
    signed = seal(COORDINATOR, pb.KIND_MANIFEST, owned.run_id, owned.canonical_bytes()).envelope
    pen = caller_auth.Credentials(identity(1), RUN.run_id, b"der")
    known = caller_auth.CallerAuth(RUN.run_id, b"der")
    tip = services.Tip(round=3, head=digest(3), why="a sentence").SerializeToString()

    def document(raw: bytes) -> None:
        assert Manifest.from_canonical(raw).run_id == sha256(raw), "a run with two ids"

    def opened(raw: bytes) -> None:
        found = open_manifest(_parsed(pb.Envelope, raw), owned.run_id)
        assert found == owned, "another run than the link's"

    def join(raw: bytes) -> None:
        found = JoinLink.parse(_text(raw))
        assert JoinLink.parse(str(found)) == found, "a link that does not say again what it said"

    def folders(raw: bytes) -> None:
        assert all(folder.is_absolute() for folder in parse_folders([_text(raw)]).values()), "a folder that moves with us"

    def archive(raw: bytes) -> None:
        found = open_storage(_text(raw))
        assert open_storage(found.url).url == found.url, "an archive whose URL names another one"

    def etcd(raw: bytes) -> None:
        store = Answered(raw)
        for call in (store.read("a", "b", 4), store.apply([], [], ["a"]), store.grant(3), store.keep(1), store.revoke(1)):
            with suppress(StopIteration, StoreError, StoreRefusedError, ValueError):
                call.send(None)  # it waits for nothing

    def cluster(raw: bytes) -> None:
        found = ClusterLink.parse(_text(raw))
        assert ClusterLink.parse(str(found)) == found, "a link that does not say again what it said"

    def peer(raw: bytes) -> None:
        assert peer_id(key_of_peer(_text(raw))) == _text(raw), "a key with two names"

    def caller(raw: bytes) -> None:
        assert known.peer(cast(caller_auth.Context, Call(raw))) == identity(1).peer, "somebody who did not sign"

    def tips(raw: bytes) -> None:
        head_gossip.HeadGossip().take("somebody", ((head_gossip.HEADER, raw),))

    def page(raw: bytes) -> None:
        host, _, origin = _text(raw).partition("\n")
        wrong_address(host, origin or None, "dilocox.example")

    bare = {
        name: value for name, value in RUN.model_dump(exclude_none=True).items() if name not in ("attestation", "admission")
    }
    toml = "".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in section.items() if value is not None)
        for name, section in bare.items()
    )
    return [
        Target("manifest", [one.canonical_bytes() for one in ours], document),
        Target("manifest in its envelope", [canonical(signed)], opened, message=pb.Envelope, weight=SIGNED),
        Target("run file", [toml.encode()], lambda raw: Manifest.from_toml(_text(raw)), (ConfigError,), weight=SLOW),
        Target("--data", [b"x=/", b"wikitext-103=/usr/lib"], folders, (ConfigError,)),
        Target("--archive", [b"/srv/a", b"file:///srv/a%20b", b"s3://bucket/prefix"], archive, (ConfigError,)),
        Target("answer of etcd", [json.dumps(each).encode() for each in ETCD_ANSWERS], etcd, ()),
        Target("join link", [str(LINK).encode()], join, (ConfigError,)),
        Target("cluster link", [str(ClusterLink(bytes(32), LINK, LINK)).encode()], cluster, (ConfigError,)),
        Target("peer id", [identity(number).peer.encode() for number in range(3)], peer, (ValueError,)),
        Target("credential", [raw for _, raw in pen.metadata], caller, message=pb.Envelope),
        Target("head in metadata", [tip], tips, (), message=services.Tip),
        Target("certificate of a record", list(Amd().evidence().certs), tls.pem_of, (ValueError,)),
        Target("Host and Origin", [b"127.0.0.1:80\nhttp://127.0.0.1:80", b"[::1]:8080", b"dilocox.example"], page, ()),
    ]


def _text(raw: bytes) -> str:
    """Decode text that a person pastes, or a header contains: any characters, and lone surrogates."""
    return raw.decode(errors="surrogatepass" if b"\xed" in raw else "replace") if _decodes(raw) else raw.decode("latin-1")


def _decodes(raw: bytes) -> bool:
    try:
        raw.decode(errors="surrogatepass")
    except ValueError:
        return False
    return True


# Evidence of hardware


def _hardware() -> list[Target]:
    amd, gpu, intel, fake = Amd(), Gpu(), Intel(), evidence()
    platform, card, quote = amd.evidence(), gpu.evidence(), intel.evidence()
    verify_amd = functools.partial(snp.verify, now=NOW, roots=amd.roots)
    verify_gpu = functools.partial(nvidia.verify, now=NOW, root=gpu.root)
    verify_tdx = functools.partial(tdx.verify, now=NOW, root=intel.root_der)

    def same(verify: Callable[[Evidence], Any], honest: Evidence, part: str) -> Callable[[bytes], None]:
        claims = replace(verify(honest), notes=())

        def call(raw: bytes) -> None:
            spoilt: dict[str, Any] = {part: (raw, *honest.certs[1:]) if part == "certs" else raw}
            assert replace(verify(replace(honest, **spoilt)), notes=()) == claims, "claims that nobody signed"

        return call

    def binding(raw: bytes) -> None:
        found = _parsed(pb.BoundEvidence, raw)
        check_binding(found, identity(1).key, RUN.run_id, digest(3))
        Evidence.from_message(found.evidence)

    bound = pb.BoundEvidence(key=identity(1).key, run=RUN.run_id, nonce=digest(3), evidence=platform.message())
    table = bytes(16).join((b"", *(bytes([n]) * 16 + (72).to_bytes(4, "little") + (8).to_bytes(4, "little") for n in (1, 2))))
    denied = (AttestationError,)
    rows = [
        Target("evidence and its binding", [canonical(bound)], binding, message=pb.BoundEvidence),
        Target("simulated quote", [fake.blob], same(lambda item: simulated.verify(item, NOW), fake, "blob"), denied, SIGNED),
        Target("AMD report", [platform.blob], same(verify_amd, platform, "blob"), denied, DISK),
        Target("AMD report, its fields", [platform.blob], snp.parse, denied),
        Target("AMD certificate", [platform.certs[0]], same(verify_amd, platform, "certs"), denied, DISK),
        Target("AMD certificate table", [table], machine.certificate_table, ()),
        Target("GPU report", [card.blob], same(verify_gpu, card, "blob"), denied, DISK),
        Target("GPU certificate", [card.certs[0]], same(verify_gpu, card, "certs"), denied, DISK),
        Target("TDX quote", [quote.blob], same(verify_tdx, quote, "blob"), denied, DISK),
        Target("TDX collateral", [quote.collateral], same(verify_tdx, quote, "collateral"), denied, DISK),
        Target("TDX registers", [quote.blob], tdx.registers, denied),
    ]
    chains = [*platform.certs, pem(*amd.chain())]
    return [*rows, Target("certificates", chains, lambda raw: certificates.load_certificates([raw]), denied, SLOW)]


# Files of a daemon's folder: opened, or set aside and created again


def _files(folder: Path) -> list[Target]:
    home = folder / "home"

    def fresh(name: str, raw: bytes) -> Path:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        path = home / name
        path.write_bytes(raw)
        path.chmod(0o600)
        return path

    def directory(name: str, look: Callable[[DataDirectory], object]) -> Callable[[bytes], None]:
        def call(raw: bytes) -> None:
            with closing(DataDirectory(fresh(name, raw).parent, identity(1))) as opened:
                look(opened)

        return call

    def starts(opened: DataDirectory) -> None:
        number = opened.start_number()
        PeerDirectory(None, identity(1), RUN.run_id, number).seal_record("192.0.2.1:1", b"", "", [])

    def ports(opened: DataDirectory) -> None:
        facts = opened.remembered()
        assert all(type(facts.get(key, 1)) is int for key in ("port", "dht_port")), "a port that is no number"

    def commits(raw: bytes) -> None:
        with closing(ChainFile(fresh("chain.db", raw), RUN)) as opened:
            digests = [commit.digest for commit in opened.verify()]
            assert digests == [commit.digest for commit in table.commits][: opened.length], "a chain that nobody wrote"

    def own(raw: bytes) -> None:
        with closing(SignedStatementLog(fresh("own.db", raw), RUN.run_id)) as opened:
            for one in opened.all():
                assert one.envelope in [statement.envelope for statement in said], "what nobody signed"
            seal(identity(1), pb.KIND_HEARTBEAT, RUN.run_id, pb.Heartbeat(sequence=opened.next_sequence()))

    def blob(raw: bytes) -> None:
        path = fresh(content.hex(), raw)
        path.with_suffix(".index").write_bytes(raw[:40])
        assert BlobStore(home).sound(content) == (raw == body), "bytes of another digest"

    def part(raw: bytes) -> None:
        fresh(content.hex() + ".part", raw)
        partial = PartialBlob(BlobStore(home), content, len(body), hashes)
        assert partial.complete == raw.startswith(body), "bytes of another digest"

    def boundary(raw: bytes) -> None:
        shutil.rmtree(home, ignore_errors=True)
        sealed = home / "0001" / "00000003"
        sealed.mkdir(parents=True)
        (sealed / checkpoint.OUTER).write_bytes(no_tensors)
        (sealed / "boundary.json").write_bytes(raw)
        assert all(found.round == number for number, found in checkpoint.boundaries(home, 1).items())

    table, said = statements()
    no_tensors = safetensors.torch.save({})
    body = b"what a peer asked for" * 9
    hashes = [sha256(body)]
    content = blob_digest(len(body), hashes)
    with closing(ChainFile(fresh("chain.db", b""), RUN)) as chain_file:
        for commit in table.commits:
            chain_file.append(commit.envelope)
    database = (home / "chain.db").read_bytes()
    with closing(SignedStatementLog(fresh("own.db", b""), RUN.run_id)) as kept:
        for statement in said[:3]:
            kept.keep(statement)
        kept.next_sequence()
    own_database = (home / "own.db").read_bytes()
    records = [b64encode(one.envelope.SerializeToString()).decode() for one in said if one.kind == pb.KIND_PEER_RECORD]
    meta = checkpoint.BoundaryMeta(3, 4, 64, 2.5, 16, 1, 4, 8, "ef" * 32, "ab" * 32, "cd" * 32, 100, 1.0, 4.0, 0.5, "7878")
    tls.load_or_create(fresh("x", b"").parent)
    pem_file = (home / "tls.pem").read_bytes()
    return [
        Target(
            "identity.key", [format_identity(bytes(range(32)))], lambda r: load_identity(fresh("k", r)), (ConfigError,), DISK
        ),
        Target("starts", [b"1800000000", b"3"], directory("starts", starts), (), DISK),
        Target("daemon.json", [b'{"port": 5000, "dht_port": 4711}'], directory("daemon.json", ports), (), DISK),
        Target("tls.pem", [pem_file], lambda raw: tls.load_or_create(fresh("tls.pem", raw).parent), (), DISK),
        Target("peers.json", [json.dumps(records).encode()], lambda r: cached_records(fresh("p", r), RUN.run_id), (), DISK),
        Target("chain.db", [database], commits, (), DISK),
        Target("own.db", [own_database], own, (), DISK),
        Target("blob", [body], blob, (), DISK),
        Target("part of a blob", [body], part, (), DISK),
        Target("boundary.json", [json.dumps(asdict(meta)).encode()], boundary, (), DISK),
    ]
