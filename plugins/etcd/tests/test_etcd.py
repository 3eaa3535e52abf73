"""Tests of the store over etcd: one script runs against real members, if the binary exists, and the fake; and tests of
each failure's message."""

import asyncio
import datetime
import ipaddress
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from etcd_members import EtcdMembers, etcd_members

from dilocox.coordinator import log_chunks, shared_log
from dilocox.coordinator.kv_store import (
    Delete,
    Guard,
    Item,
    Put,
    Store,
    StoreError,
    StoreFiles,
    StoreRefusedError,
)
from dilocox.coordinator.leadership import write_down_store
from dilocox.coordinator.round_log import Entry
from dilocox.coordinator.shared_log import Candidate, DeposedError, SharedLog
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.transport.store.chain_file import ChainFile
from dilocox_etcd import client as etcd
from dilocox_etcd.client import Etcd, EtcdPlace, parse_store
from tests.fake_store import FakeStore
from tests.helpers import PATIENCE_SECONDS, identity, manifest

RUN = manifest()


def test_who_shared_a_store_does_not_go_on_alone_beside_the_others(tmp_path: Path):
    write_down_store(tmp_path, None)
    write_down_store(tmp_path, EtcdPlace(("http://192.0.2.1:2379", "http://192.0.2.2:2379"), "runs"))
    write_down_store(tmp_path, EtcdPlace(("http://192.0.2.1:2379",), "runs"))
    with pytest.raises(ConfigError, match=r"others at http://192\.0\.2\.1:2379/runs: pass --store"):
        write_down_store(tmp_path, None)
    (tmp_path / "shared-store").unlink()
    write_down_store(tmp_path, None)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend time limits: etcd waits for the disk at each write."""
    monkeypatch.setattr(etcd, "REQUEST_SECONDS", 60.0)


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    with etcd_members(tmp_path_factory.mktemp("etcd"), 1) as members:
        yield members


@pytest.fixture(params=["fake", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "fake":
        yield FakeStore(time.monotonic)
        return
    members: EtcdMembers = request.getfixturevalue("member")
    real = Etcd(parse_store(f"etcd://{members.at}/x"))
    await real.apply((), [Delete("a", "z")])
    yield real
    await real.close()


Done = TypeVar("Done")


async def until_done(call: Callable[[], Awaitable[Done]]) -> Done:
    """Call a store again while it does not answer; return what it does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await call()
            except StoreError:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[Etcd]:
    """Run a store whose etcd gives these answers."""
    app = web.Application()
    app.router.add_post("/v3/{call:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    store = Etcd(parse_store(f"etcd://127.0.0.1:{runner.addresses[0][1]}/x"))
    try:
        yield store
    finally:
        await store.close()
        await runner.cleanup()


async def test_the_fake_and_etcd_do_the_same(store: Store):
    assert list(await store.read("a", "z", 10)) == []
    assert (await store.apply([Guard("a")], [Put("a", b"1"), Put("b", b"\x00\xff")])).applied
    first, second = await store.read("a", "z", 10)
    assert (first.key, first.value, second.value) == ("a", b"1", b"\x00\xff")
    assert [item.key for item in await store.read("a", "z", 1)] == ["a"]
    assert [item.key for item in await store.read("a0", "z", 9)] == ["b"]
    refused = await store.apply([Guard("a")], [Put("c", b"")], ["a", "c"])
    assert not refused.applied
    assert refused.items == {"a": first}
    assert (await store.apply([Guard("a", value=b"1")], [Put("a", b"2")])).applied
    (changed,) = await store.read("a", "b", 10)
    assert changed.value == b"2"
    assert not (await store.apply([Guard("a", value=b"1")], [Put("a", b"3")])).applied
    assert not (await store.apply([Guard("none", value=b"")], [Put("a", b"3")])).applied
    assert (await store.apply((), [Put("c", b"3"), Delete("a", "c")])).applied
    assert [item.key for item in await store.read("a", "z", 10)] == ["c"]
    assert (await store.apply([Guard("a")], [Put("a", b"4")])).applied
    (again,) = await store.read("a", "b", 10)
    assert again.value == b"4"


async def test_a_key_goes_with_its_lease_in_both(store: Store):
    lease = await store.grant(600)
    assert await store.keep(lease)
    await store.apply((), [Put("a", b"1", lease), Put("b", b"1", lease)])
    await store.apply((), [Put("b", b"2")])
    with pytest.raises(StoreRefusedError, match="duplicate"):
        await store.apply((), [Put("b", b"2"), Delete("a", "c")])
    await store.revoke(lease)
    assert [item.key for item in await store.read("a", "z", 10)] == ["b"], "which was written again without it"
    assert not await store.keep(lease)
    await store.revoke(lease)
    with pytest.raises(StoreRefusedError, match="lease not found"):
        await store.apply((), [Put("a", b"1", lease)])
    ending = await store.grant(10)
    await store.apply((), [Put("c", b"1", ending)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await store.read("c", "d", 1):
            await asyncio.sleep(0.1)
    assert not await store.keep(ending)


async def test_largest_values_go_through_and_come_back_in_pages(store: Store):
    value = bytes(range(256)) * (log_chunks.PART_BYTES // 256)
    for number in range(6):
        assert (await store.apply([Guard(f"p{number}")], [Put(f"p{number}", value), Put("n", b"x")])).applied
    found, first = list[Item](), "p"
    while page := await store.read(first, "q", 64):
        found += page
        first = page[-1].key + "\0"
    assert [(item.key, item.value == value) for item in found] == [(f"p{number}", True) for number in range(6)]
    with pytest.raises(StoreRefusedError, match="large"):
        await store.apply((), [Put("p", bytes(3 << 19))])


async def test_a_coordinator_takes_over_in_a_real_etcd(tmp_path: Path, member: EtcdMembers, monkeypatch: pytest.MonkeyPatch):
    """Check that an unused lease ends by etcd's clock, and that its former owner is rejected."""
    monkeypatch.setattr(shared_log, "LEASE_SECONDS", 15)  # a busy machine may delay the leader's lease

    def office(number: int) -> SharedLog:
        chain = ChainFile(tmp_path / f"{number}.db", RUN)
        me = Candidate(f"office {number}", f"192.0.2.{number}:1", bytes([number] * 32).hex())
        return SharedLog(stores[number], "over", chain, me, lambda: Moment(time.monotonic(), int(1000 * time.time())))

    stores = [Etcd(parse_store(f"etcd://{member.at}/x")) for _ in range(2)]
    one, two = office(0), office(1)
    entry = Entry(round_machine.Absent(identity(1).peer), Moment(1.0, 1))
    for log in (one, two):
        await log.enter()
    assert await one.stand()
    await one.write([entry])
    assert not await two.stand()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await two.stand():
            await asyncio.sleep(0.05)
    with pytest.raises(DeposedError):
        await one.write([entry])
    assert [each.event for each in two.replay()] == [entry.event]
    for store in stores:
        await store.close()


async def test_members_are_asked_in_turn(tmp_path: Path):
    with etcd_members(tmp_path / "three", 3) as members:
        store = Etcd(parse_store(f"etcd://{members.at}/x"))
        members.signal(0, signal.SIGKILL)

        assert (await until_done(lambda: store.apply((), [Put("a", b"1")]))).applied
        await store.close()


async def test_a_user_and_a_password_come_by_file(tmp_path: Path):
    secret = tmp_path / "auth"
    secret.write_text("root\nsecret\n")
    secret.chmod(0o600)
    with etcd_members(tmp_path / "one", 1, ["--auth-token-ttl", "1"]) as members:
        place = parse_store(f"etcd://{members.at}/x", StoreFiles(auth=secret))
        plain = Etcd(parse_store(f"etcd://{members.at}/x"))
        for call, body in (("user/add", {"name": "root", "password": "secret"}), ("role/add", {"name": "root"})):
            await plain.call(f"auth/{call}", body)
        await plain.call("auth/user/grant", {"user": "root", "role": "root"})
        await plain.call("auth/enable", {})
        with pytest.raises(StoreRefusedError, match=r"--store-auth|refuses"):
            await plain.apply((), [Put("a", b"1")])
        store = Etcd(place)
        assert (await store.apply((), [Put("a", b"1")])).applied
        members.signal(0, signal.SIGKILL)
        members.start(0)
        members.wait()

        found = await until_done(lambda: store.read("a", "b", 1))  # its tokens went with it
        assert [item.value for item in found] == [b"1"]
        await plain.close()
        await store.close()


async def test_etcd_over_tls_with_a_certificate_of_ours(tmp_path: Path):
    """Use one self-signed certificate on both sides."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    certificate, secret = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    options = [f"--cert-file={certificate}", f"--key-file={secret}", "--client-cert-auth", f"--trusted-ca-file={certificate}"]
    with etcd_members(tmp_path / "one", 1, options, "https") as members:
        at = f"etcds://{members.at}/x"
        store = Etcd(parse_store(at, StoreFiles(None, certificate, certificate, secret)))
        strangers = [Etcd(parse_store(at)), Etcd(parse_store(at, StoreFiles(ca=certificate)))]

        assert (await until_done(lambda: store.apply((), [Put("a", b"1")]))).applied
        for stranger in strangers:
            with pytest.raises(StoreError):
                await stranger.read("a", "b", 1)
        for each in (store, *strangers):
            await each.close()


ANSWERS = [
    ({"error": "x", "code": 8, "message": "etcdserver: mvcc: database space exceeded"}, StoreRefusedError, "compact"),
    ({"error": "x", "code": 3, "message": "etcdserver: request is too large"}, StoreRefusedError, "--max-request-bytes"),
    ({"error": "x", "code": 7, "message": "etcdserver: permission denied"}, StoreRefusedError, "user"),
    ({"error": "x", "code": 14, "message": "etcdserver: request timed out"}, StoreError, "timed out"),
    ({"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}, StoreError, "no leader"),
    ({"error": "x", "code": 12, "message": "Not Implemented"}, StoreRefusedError, "3.4"),
    ([], StoreError, "does not answer"),
]


@pytest.mark.parametrize(("answer", "kind", "says"), ANSWERS)
async def test_what_etcd_says_is_a_sentence(answer: object, kind: type[Exception], says: str):
    async def reply(request: web.Request) -> web.Response:
        return web.Response(text=json.dumps(answer))

    async with answering(reply) as store:
        with pytest.raises(kind, match=says):
            await store.apply((), [Put("a", b"1")])


async def test_a_member_that_hangs_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(etcd, "REQUEST_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # the kernel accepts connections; no process reads them
        hangs.setblocking(False)
        store = Etcd(EtcdPlace((f"http://127.0.0.1:{hangs.getsockname()[1]}", "http://127.0.0.1:1"), "x"))
        for _ in range(2):
            with pytest.raises(StoreError, match="does not answer"):
                await store.read("a", "b", 1)
        await store.close()
        accepted = 0
        with suppress(BlockingIOError):
            while True:
                hangs.accept()[0].close()
                accepted += 1
        assert accepted <= 1, "the other one was asked the second time"


BAD = ["etcd://", "etcd://h:1", "etcd://h/x", "http://h:1/x", "etcd://u:p@h:1/x", "etcd://h:x/y", "sqlite", "etcd://h:1,/x"]


@pytest.mark.parametrize("text", [*BAD, "etcd://" + ",".join(f"h{n}:1" for n in range(17)) + "/x"])
def test_a_store_that_is_no_address_is_refused_in_words(text: str):
    with pytest.raises(ConfigError, match="--store"):
        parse_store(text)


async def test_files_of_secrets_are_checked(tmp_path: Path):
    place = parse_store(
        "etcds://a:1,[::1]:2/p/q/", StoreFiles(tmp_path / "auth", tmp_path / "ca", tmp_path / "c", tmp_path / "k")
    )
    assert (place.endpoints, place.prefix) == (("https://a:1", "https://[::1]:2"), "p/q")
    with pytest.raises(ConfigError, match="--store-auth"):
        Etcd(place)
    (tmp_path / "auth").write_text("user\npassword\n")
    (tmp_path / "auth").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Etcd(place)
    (tmp_path / "auth").chmod(0o600)
    with pytest.raises(ConfigError, match="--store-ca"):
        Etcd(place)
    with pytest.raises(ConfigError, match="--store-key"):
        parse_store("etcds://a:1/p", StoreFiles(certificate=tmp_path / "c"))
    with pytest.raises(ConfigError, match="etcds"):
        parse_store("etcd://a:1/p", StoreFiles(ca=tmp_path / "ca"))


JUNK: list[object] = [
    None,
    True,
    0,
    -1,
    "",
    "x",
    "AA==",
    [],
    [None],
    {},
    {"a": 1},
    1e400,
    "9" * 50,
    {"kvs": None},
    {"kvs": [{"key": "!"}]},
]
FIELDS = ["kvs", "succeeded", "responses", "ID", "result", "error", "code", "message", "token"]
WHOLE = [b"", b"null", b"[]", b"{", b'"x"', b"NaN", b"[" * 100_000, b'{"kvs":' + b"[" * 50_000, b'{"kvs":[{"key":"/w=="}]}']


def junk(random: Random) -> bytes:
    """Return an answer that etcd would never send."""
    if random.random() < 0.1:
        return random.choice(WHOLE)
    answer = {field: random.choice(JUNK) for field in random.sample(FIELDS, random.randint(0, 5))}
    if random.random() < 0.3:
        answer["responses"] = [{"response_range": {"kvs": random.choice(JUNK)}}]
    return json.dumps(answer).encode()


async def test_answers_of_any_other_form_are_store_errors():
    random = Random(5)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=junk(random), status=random.choice([200, 200, 400, 503]))

    async with answering(answer) as store:
        calls = [
            lambda: store.read("a", "b", 4),
            lambda: store.grant(3),
            lambda: store.keep(1),
            lambda: store.revoke(1),
            lambda: store.apply([], [Put("a", b"b")], ["a"]),
        ]
        failed = 0
        for number in range(1500):
            try:
                await calls[number % len(calls)]()
            except StoreError:
                failed += 1
        assert failed > 500
