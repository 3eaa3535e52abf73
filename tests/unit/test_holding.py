"""Tests of peers that are not reachable: relays store their payloads; and of the decision that a peer is not reachable."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from aiohttp.test_utils import TestClient, TestServer

from dilocox.node.attest.prover import AttestorService
from dilocox.node.context.peer import PeerRuntime, find_relays, open_relay_store
from dilocox.node.exchange import relays
from dilocox.node.exchange.relay_store import ROUNDS_KEPT, AgreedStates, RelayStore
from dilocox.node.exchange.relays import Relays
from dilocox.node.hosts.lead import LeadService
from dilocox.node.relay_daemon import HolderPage, Retention
from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import canonical, open_envelope, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.net import tls
from dilocox.transport.net.reachability import Reachability, ReachService
from dilocox.transport.net.rpc import ChannelPool, create_server, push_blob
from dilocox.transport.store.blobs import PUSHED, BlobStore, PartialBlob
from dilocox.transport.store.event_log import EVENTS, EventLog
from tests.helpers import Table, digest, identity, manifest, serve_also
from tests.peers import PATIENCE_SECONDS, Peer, meeting

RUN = manifest(rounds={"count": 100}, model={"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024})
BIG = os.urandom(limits.CHUNK_BYTES + 4321)


async def spend(size: int) -> None:
    """Spend without a limit."""


def roster() -> Table:
    return Table(RUN).genesis()


async def test_who_cannot_be_dialled_is_kept_by_others_who_serve_it(tmp_path: Path):
    chain = roster().commits
    async with meeting(tmp_path, RUN, *[chain] * 4) as (hidden, one, other, stranger):
        del hidden.everybody.records[identity(0).peer]
        blobs = [hidden.store.put([BIG]), hidden.store.put([b"leaves"])]
        holders = await hidden.relays.find(blobs)
        assert set(holders) == {identity(1).peer, identity(2).peer}
        for peer in (one, other):
            assert all(peer.store.verify(blob) for blob in blobs)
            assert peer.relay_store.blobs() == set(blobs)
        once = len(BIG) + len(b"leaves")
        assert hidden.service.bytes_sent == 2 * once
        for blob in blobs:
            await stranger.exchange.downloader.fetch(blob, [identity(0).peer, *holders])
        assert hidden.service.bytes_sent == 2 * once, "it carried each payload once for each holder, and never more"
        assert set(await hidden.relays.find(blobs)) == set(holders)


async def test_a_contribution_is_judged_by_what_its_holders_serve(tmp_path: Path):
    async with meeting(tmp_path, RUN, *[roster().commits] * 3) as (hidden, one, voter):
        del hidden.everybody.records[identity(0).peer]
        empty = one.store.put([b""])
        body = pb.Contribution(round=1, base_state=digest("base"), leaves=empty, size=1, holders=[identity(1).peer])
        statement = seal(identity(0), pb.KIND_CONTRIBUTION, RUN.run_id, body)
        judging = voter.exchange.checker.judge(statement, digest("base"), RUN.compression.keep)
        reason, _ = await asyncio.wait_for(judging, PATIENCE_SECONDS)
        assert reason == pb.REASON_WRONG_STAGES, "it was fetched, and announces no stage"


async def test_who_does_not_answer_where_it_was_is_looked_up(tmp_path: Path):
    """Reproduce a fault: only the DHT's regular refresh found a moved peer; now a peer that misses it asks."""
    async with meeting(tmp_path, RUN, *[roster().commits] * 2) as (one, other):
        blob, moved = other.store.put([BIG]), identity(1).peer
        where, asked = one.everybody.records[moved], list[str]()
        one.everybody.records[moved] = pb.PeerRecord(address="127.0.0.1:1", certificate=where.certificate)

        async def look_up(peer: str) -> None:
            asked.append(peer)
            one.everybody.records[peer] = where

        one.everybody.look_up = look_up  # type: ignore[method-assign]
        with pytest.raises(RemoteError):
            await one.exchange.downloader.fetch(blob, [moved])
        await one.exchange.downloader.fetch(blob, [moved])
        assert asked == [moved]
        assert one.store.verify(blob)


async def test_one_who_goes_away_is_passed_over(tmp_path: Path):
    chain = roster().commits
    async with meeting(tmp_path, RUN, *[chain] * 3) as (hidden, _, _):
        del hidden.everybody.records[identity(2).peer]
        assert await hidden.relays.find([hidden.store.put([BIG])]) == (identity(1).peer,)


async def test_nobody_to_keep_it_is_asked_again_until_the_round_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relays, "RETRY_SECONDS", 0.01)
    table = roster()
    async with meeting(tmp_path, RUN, list(table.commits)) as (hidden,):
        looking = asyncio.create_task(hidden.relays.find([hidden.store.put([BIG])]))
        done, _ = await asyncio.wait({looking}, timeout=0.1)
        assert not done
        table.train(1)
        hidden.chain.append(table.commits[1].envelope)
        assert await asyncio.wait_for(looking, PATIENCE_SECONDS) == ()


async def test_a_push_that_breaks_off_goes_on_where_it_stopped(tmp_path: Path):
    async with meeting(tmp_path, RUN, *[roster().commits] * 2) as (hidden, one):
        blob = hidden.store.put([BIG])
        part = PartialBlob(one.store, blob, len(BIG), hidden.store.index(blob), PUSHED)
        part.feed(BIG[: limits.CHUNK_BYTES + 100])
        with one.store.path(blob).with_suffix(PUSHED).open("ab") as torn:
            torn.write(b"what a crash left")
        await push_blob(hidden.channels.channel(one.record), hidden.store, blob, spend)
        assert one.store.verify(blob)
        assert not one.store.path(blob).with_suffix(PUSHED).exists()


async def push(hidden: Peer, one: Peer, *parts: services.PushRequest) -> pb.Envelope:
    async def said():
        for part in parts:
            yield part

    return await rpc.PeerStub(hidden.channels.channel(one.record)).Push(said(), timeout=PATIENCE_SECONDS)


def announced(store: BlobStore, blob: bytes) -> services.PushRequest:
    index = services.BlobIndex(size=store.size(blob), chunk_hashes=store.index(blob))
    return services.PushRequest(index=services.PushIndex(digest=blob, index=index))


async def test_what_is_pushed_is_what_was_announced_and_no_more(tmp_path: Path):
    async with meeting(tmp_path, RUN, *[roster().commits] * 2) as (hidden, one):
        blob = hidden.store.put([BIG])
        first = announced(hidden.store, blob)
        other = services.PushRequest(index=services.PushIndex(digest=digest("another"), index=first.index.index))
        short, long = (
            services.PushRequest(index=services.PushIndex(digest=d, index=first.index.index)) for d in (b"", bytes(200))
        )
        half, wrong, empty = (services.PushRequest(data=data) for data in (BIG[:1000], bytes(len(BIG)), b""))
        for parts in (
            (first,),
            (first, half),
            (first, wrong),
            (first, empty),
            (other, half),
            (short, half),
            (long, half),
            (half,),
            (),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await push(hidden, one, *parts)
            assert blob not in one.store
        assert one.relay_store.blobs() <= {blob, digest("another")}, "a name that is no digest would be somebody's folder"
        rest = [services.PushRequest(data=BIG[at : at + 1_000_000]) for at in range(0, len(BIG), 1_000_000)]
        signed = open_envelope(await push(hidden, one, first, *rest), RUN.run_id, (pb.KIND_HELD,))
        assert (signed.peer, signed.body.blob, signed.body.round) == (identity(1).peer, blob, 1)
        assert one.store.verify(blob)


async def test_nobody_waits_for_somebody_elses_push_of_the_same_blob(tmp_path: Path):
    """Reproduce a fault: a member that announced a state's stage and sent it slowly blocked the same push of all others."""
    async with meeting(tmp_path, RUN, *[roster().commits] * 3) as (slow, honest, one):
        blob = honest.store.put([BIG])
        slow.store.put([BIG])
        done = asyncio.Event()

        async def trickle():
            yield announced(slow.store, blob)
            yield services.PushRequest(data=bytes(1000))
            await done.wait()
            yield services.PushRequest(data=bytes(limits.CHUNK_BYTES - 2000))

        trickling = rpc.PeerStub(slow.channels.channel(one.record)).Push(trickle())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.service.coming != {blob}:
                await asyncio.sleep(0.01)
        await push_blob(honest.channels.channel(one.record), honest.store, blob, spend)
        assert one.store.verify(blob)
        assert one.service.coming == {blob}, "the slow one is still at it"
        done.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await trickling
        assert not one.service.coming
        assert not one.store.partials()


async def test_several_push_one_blob_and_one_of_them_lies(tmp_path: Path):
    async with meeting(tmp_path, RUN, *[roster().commits] * 3) as (liar, honest, one):
        blob = honest.store.put([BIG])
        first, honestly = announced(honest.store, blob), honest.channels.channel(one.record)
        lies = [push(liar, one, first, services.PushRequest(data=bytes(size))) for size in (100, len(BIG))]
        said = await asyncio.gather(*lies, push_blob(honestly, honest.store, blob, spend), return_exceptions=True)
        assert isinstance(said[-1], pb.Envelope)
        assert one.store.verify(blob)
        assert not one.store.partials()


async def test_only_members_are_kept_for_and_only_a_rounds_payloads(tmp_path: Path):
    table = roster()
    async with meeting(tmp_path, RUN, list(table.commits), *[table.commits] * 8) as peers:
        one, stranger = peers[0], peers[8]
        blob = stranger.store.put([BIG])
        with pytest.raises(RemoteError):
            await push_blob(stranger.channels.channel(one.record), stranger.store, blob, spend)
        keeps = one.relay_store
        assert not keeps.blobs()
        with pytest.raises(RemoteError) as caught:
            keeps.admit(identity(1).peer, digest("huge"), 1 << 30)
        assert caught.value.reason == pb.REASON_OVERSIZE
        most = ROUNDS_KEPT * (RUN.model.stages + 1) + 1
        for number in range(most):
            keeps.admit(identity(1).peer, digest(number), 1000)
        keeps.admit(identity(1).peer, digest(0), 1000)
        with pytest.raises(RemoteError, match=r"^rate: .*payloads"):
            keeps.admit(identity(1).peer, digest("one more"), 1000)
        keeps.admit(identity(2).peer, digest("another's"), 1000)
        assert len(keeps.blobs()) == most + 1
        table.train(ROUNDS_KEPT)
        for commit in table.commits[1:]:
            one.chain.append(commit.envelope)
        assert not keeps.blobs(), "no contribution can name them any more"
        assert len(keeps.forgotten()) == most + 1
        assert not keeps.forgotten(), "told once"
        keeps.admit(identity(1).peer, digest("one more"), 1000)


# Reachable peers.


async def reach(folder: Path, number: int) -> tuple[grpc.aio.Server, pb.PeerRecord]:
    """Run a daemon that connects back."""
    folder.mkdir()
    certificate = tls.load_or_create(folder)
    server, port = await create_server("127.0.0.1:0", certificate)
    callers = CallerAuth(RUN.run_id, certificate.certificate_der)
    rpc.add_ReachServicer_to_server(ReachService(RUN.run_id, callers, HeadGossip()), server)
    await server.start()
    return server, pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)


async def test_others_say_whether_we_can_be_dialled(tmp_path: Path):
    (mine, own), (server, other) = [await reach(tmp_path / str(number), number) for number in range(2)]
    channels = ChannelPool(identity(0), RUN.run_id)

    async def said(record: pb.PeerRecord, *others: pb.PeerRecord) -> tuple[bool | None, str]:
        asked = Reachability()
        await asked.ask(channels, list(others), seal(identity(0), pb.KIND_PEER_RECORD, RUN.run_id, record))
        return asked.reachable, asked.why

    dead = pb.PeerRecord(address="127.0.0.1:1", certificate=other.certificate)
    assert await said(own, other) == (True, "")
    assert await said(own, dead, other) == (True, "")
    assert await said(own) == await said(own, own) == await said(own, dead) == (None, "")
    elsewhere = pb.PeerRecord(address="192.0.2.1:4711", certificate=own.certificate)
    assert await said(elsewhere, other) == (False, "its calls come from 127.0.0.1, but its record names 192.0.2.1")
    spoilt = pb.PeerRecord(address=own.address, certificate=other.certificate)
    assert await said(spoilt, other) == (False, f"another server answers at {own.address}")
    nonsense = pb.PeerRecord(address="nonsense", certificate=own.certificate)
    assert (await said(nonsense, other))[0] is False
    await mine.stop(grace=0)
    reachable, why = await said(own, other)
    assert reachable is False
    assert why.startswith("no TLS server answers")
    stub = rpc.ReachStub(channels.channel(other))
    for envelope in (seal(identity(1), pb.KIND_PEER_RECORD, RUN.run_id, own).envelope, pb.Envelope()):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.DialBack(services.DialBackRequest(record=envelope))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await channels.close()
    await server.stop(grace=0)


# A relay that the run names.

HELD_RUN = manifest(run={"relays": [identity(3).peer]}, rounds={"count": 100})


def thin_line(peer: Peer) -> Relays:
    """Return the relays with --upload-copies 1."""
    return Relays(identity(0), peer.chain, peer.store, peer.everybody, peer.channels, lambda: True, 1)


async def test_the_runs_holder_comes_first_and_one_copy_may_be_enough(tmp_path: Path):
    chain = Table(HELD_RUN).genesis().commits
    async with meeting(tmp_path, HELD_RUN, *[chain] * 4) as (hidden, _, _, holder):
        blob = hidden.store.put([b"payload"])
        assert (await hidden.relays.find([blob]))[0] == identity(3).peer, "though it is not on the roster"
        assert holder.relay_store.blobs() == {blob}
        thin = thin_line(hidden)
        other = hidden.store.put([b"another payload"])
        assert await thin.find([other]) == (identity(3).peer,)


async def test_the_runs_holder_is_given_the_states_that_joiners_start_from(tmp_path: Path):
    chain = Table(HELD_RUN).genesis().commits
    async with meeting(tmp_path, HELD_RUN, *[chain] * 4) as (hidden, _, _, holder):
        stages = [hidden.store.put([b"one stage"]), hidden.store.put([b"another stage"])]
        root = hidden.store.put([canonical(pb.StageStates(digests=stages))])
        state = [root, *stages]
        asked = asyncio.Event()

        def newest() -> list[bytes]:
            asked.set()
            return state

        supplying = asyncio.create_task(hidden.relays.supply(newest))
        await asked.wait()
        await asyncio.sleep(0)
        assert not hidden.service.bytes_sent, "who can be dialled serves joiners itself"
        supplying.cancel()
        hidden.relays.dialable = lambda: False
        serve_also(holder.service, keeper=RelayStore(identity(3), holder.chain, holder.store, state))
        supplying = asyncio.create_task(hidden.relays.supply(lambda: state))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(holder.store.verify(blob) for blob in state):
                await asyncio.sleep(0.01)
        supplying.cancel()
        assert not holder.relay_store.blobs(), "states are kept as long as the chain names them, not for rounds"
        with pytest.raises(RemoteError, match=r"^oversize: .*payload"):
            holder.relay_store.admit(identity(0).peer, digest("large"), 1 << 40)


def place_of(peer: Peer) -> PeerRuntime:
    network = SimpleNamespace(directory=peer.everybody, reach=Reachability(), address="")
    return PeerRuntime(
        peer.store.folder.parent,
        network,  # type: ignore[arg-type]
        peer.channels,
        peer.store,
        peer.service,
        AttestorService(),
        LeadService(CallerAuth(b"", b""), set()),
        None,  # type: ignore[arg-type]
    )


async def test_what_an_earlier_life_kept_is_kept_for_as_long(tmp_path: Path):
    """Check a named relay and a node: a restart would delete the blobs that they had signed for."""
    table = Table(HELD_RUN).genesis()
    async with meeting(tmp_path, HELD_RUN, list(table.commits)) as (one,):
        kept = {one.store.put([b"one"]), one.store.put([b"two"])}
        state = one.store.put([bytes(2 * limits.LEAVES_BYTES)])
        assert one.store.size(state) > limits.LEAVES_BYTES
        home = SimpleNamespace(identity=identity(1))
        keeping = open_relay_store(place_of(one), home, one.chain)  # type: ignore[arg-type]
        assert keeping.blobs() == kept, "and no states, which are large, and which the chain names"
        for commit in table.train(2).commits[1:]:
            assert keeping.blobs() == kept
            one.chain.append(commit.envelope)
        assert keeping.blobs() == set()
        assert keeping.forgotten() == kept


class Going(BlobStore):
    """Store that loses one blob while it is listed."""

    def files(self) -> Iterator[tuple[bytes, Path]]:
        for number, found in enumerate(super().files()):
            if not number:
                self.remove(max(BlobStore(self.folder).digests() - {found[0]}))
            yield found


async def test_who_asks_a_holder_while_it_removes_blobs_is_answered(tmp_path: Path):
    async with meeting(tmp_path, HELD_RUN, list(Table(HELD_RUN).genesis().commits)) as (one,):
        for text in (b"one", b"two", b"three"):
            one.store.put([text])
        place, coordinator = place_of(one), SimpleNamespace(connected=True)
        place = replace(place, store=Going(one.store.folder))
        log = EventLog(tmp_path / EVENTS)
        page = HolderPage("attic", identity(0).peer, place, one.chain, coordinator, log)  # type: ignore[arg-type]
        async with TestClient(TestServer(page.app())) as client:
            async with client.get("/v1/status") as answer:
                assert answer.status == 200
                assert (await answer.json())["kept_blobs"] == 2
            async with client.get("/metrics") as answer:
                assert answer.status == 200
        log.close()


async def test_who_keeps_what_nobody_can_have_is_passed_over_for_a_while(tmp_path: Path):
    """Check a named relay that signs and does not serve: a peer that sends one copy would never be counted."""
    table = Table(HELD_RUN).genesis()
    me, holder = identity(0).peer, identity(3).peer
    async with meeting(tmp_path, HELD_RUN, *[list(table.commits)] * 4) as peers:
        hidden = peers[0]
        for round in range(relays.ROUNDS_PASSED_OVER + 3):
            thin = thin_line(hidden)  # a restart forgets nothing: the chain has it
            assert not thin.serves_its_own()
            (name,) = await thin.find([hidden.store.put([b"payload %d" % round])])
            assert (name == holder) == (round in (0, relays.ROUNDS_PASSED_OVER + 1))
            table.submit(table.contribution(0, lambda body, name=name: body.holders.append(name)))
            table.contribute([1, 2]).vote(range(3), {0: pb.REASON_UNAVAILABLE} if name == holder else None)
            assert table.counted() == ([1, 2] if name == holder else [0, 1, 2])
            assert relays.failing_holders(table.commits[-1].body, me) == ({holder} if name == holder else set())
            for peer in peers:
                peer.chain.append(table.commits[-1].envelope)
        for number in (1, 2):
            del hidden.everybody.records[identity(number).peer]
        assert await thin_line(hidden).find([hidden.store.put([b"the last"])]) == (holder,), "rather than nobody"


async def test_a_thin_line_that_others_can_dial_supplies_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relays, "SUPPLY_SECONDS", 0.01)
    async with meeting(tmp_path, HELD_RUN, *[Table(HELD_RUN).genesis().commits] * 4) as (hidden, _, _, holder):
        root = hidden.store.put([b"a state's root"])
        place, home = place_of(hidden), SimpleNamespace(identity=identity(0))
        thin = find_relays(place, home, hidden.chain, 1)  # type: ignore[arg-type]
        supplying = asyncio.create_task(thin.supply(lambda: [root]))
        done, _ = await asyncio.wait({supplying}, timeout=0.3)
        assert not done
        assert not hidden.service.bytes_sent
        place.network.reach.reachable = False
        async with asyncio.timeout(PATIENCE_SECONDS):
            while root not in holder.store:
                await asyncio.sleep(0.01)
        supplying.cancel()


async def test_what_breaks_off_does_not_fill_a_holders_disk(tmp_path: Path):
    run = manifest(run={"relays": [identity(3).peer]}, rounds={"count": 100}, model=RUN.model.model_dump())
    table = Table(run).genesis()
    async with meeting(tmp_path, run, *[list(table.commits)] * 4) as (hidden, _, _, one):
        starts = one.exchange.starts(one.chain)
        keeps = Retention(one.store, starts, one.relay_store, AgreedStates(one.store), one.service)
        blob, other = hidden.store.put([BIG]), hidden.store.put([BIG[::-1]])
        sent = asyncio.Event()

        async def half():
            yield announced(hidden.store, other)
            yield services.PushRequest(data=BIG[::-1][: limits.CHUNK_BYTES])
            await sent.wait()

        with pytest.raises(grpc.aio.AioRpcError):
            await push(hidden, one, announced(hidden.store, blob), services.PushRequest(data=BIG[: limits.CHUNK_BYTES]))
        assert one.store.partials() == {blob}
        pushing = rpc.PeerStub(hidden.channels.channel(one.record)).Push(half())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.store.partials() != {blob, other}:
                await asyncio.sleep(0.01)
        await keeps.retain()
        assert one.store.partials() == {blob, other}, "its author may go on with it"
        table.train(ROUNDS_KEPT)
        for commit in table.commits[1:]:
            one.chain.append(commit.envelope)
        await keeps.retain()
        assert one.store.partials() == {other}, "what is being pushed stays"
        sent.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await pushing
        await keeps.retain()
        assert list(one.store.folder.iterdir()) == []
