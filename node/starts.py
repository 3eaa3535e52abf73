"""Where the stage workers can start from, and which blobs must be kept so that they, and others, can."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from dilocox.node.exchange import Exchange
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile

__all__ = ["BOUNDARIES_KEPT", "Starts"]

BOUNDARIES_KEPT = 2
"""Boundary checkpoints whose blobs are kept: as many as the workers keep."""
RECENT_STATES = 2
"""States of the last rounds are kept whether snapshots or not: a restart builds on them."""
SNAPSHOTS_KEPT = 2
"""DESIGN: payloads are kept until two later snapshots are agreed."""


class Starts:
    def __init__(self, manifest: Manifest, chain: ChainFile, store: BlobStore, exchange: Exchange) -> None:
        self._manifest, self._chain, self._store, self._exchange = manifest, chain, store, exchange

    def candidates(self, hellos: Sequence[worker.Hello], avoid_boundaries: bool) -> list[worker.Start]:
        """Where the workers could start, the best first.

        Our newest boundary with the very state it was built on; with an agreed snapshot, where the payloads in between are gone
        (the inner optimizer and the feedback are kept); a snapshot alone; the beginning.
        """
        snapshots = self._agreed_snapshots()
        resumable = {} if avoid_boundaries else self._resumable(hellos)
        boundaries = [round for round in sorted(resumable, reverse=True) if round <= self._chain.head.round]
        starts = [
            self._start(worker.Start.ORIGIN_BOUNDARY, boundary, resumable[boundary], boundary)
            for boundary in boundaries
            if all(self._store.sound(state.digest) for state in resumable[boundary])
        ]
        for boundary in boundaries[:1]:
            later = {round: states for round, states in snapshots.items() if round > boundary}
            starts += [self._start(worker.Start.ORIGIN_BOUNDARY, r, states, boundary) for r, states in later.items()]
        starts += [self._start(worker.Start.ORIGIN_SNAPSHOT, round, states) for round, states in snapshots.items()]
        return [*starts, worker.Start(origin=worker.Start.ORIGIN_INITIAL)]

    def _resumable(self, hellos: Sequence[worker.Hello]) -> dict[int, list[pb.StageState]]:
        """Boundaries that every worker has, with the state they build on. Their payloads are here and right: they are announced
        again, and what was not counted returns from them to the feedback."""
        rounds = set.intersection(*({b.round for b in hello.boundaries} for hello in hellos))
        found: dict[int, list[pb.StageState]] = {round: [] for round in rounds}
        for hello in sorted(hellos, key=lambda hello: int(hello.rank)):
            for boundary in hello.boundaries:
                if not all(self._store.sound(payload.digest) for payload in boundary.payloads):
                    found.pop(boundary.round, None)
                elif boundary.round in found:
                    found[boundary.round] += [pb.StageState(stage=p.stage, digest=p.base_state) for p in boundary.payloads]
        return found

    def _agreed_snapshots(self) -> dict[int, list[pb.StageState]]:
        """The states that peers keep for joiners and the run agreed on, the newest first."""
        found: dict[int, list[pb.StageState]] = {}
        newest = self._manifest.snapshot_round(max(1, self._chain.head.round))
        for round in range(newest, 1, -self._manifest.rounds.snapshot_every)[:SNAPSHOTS_KEPT]:
            commit = self._chain.commit(round)
            if commit is not None and len(commit.body.states) == self._manifest.model.stages:
                found[round] = list(commit.body.states)
        return found

    def _start(
        self, origin: worker.Start.Origin, round: int, states: list[pb.StageState], boundary: int | None = None
    ) -> worker.Start:
        start = worker.Start(origin=origin, round=round, states=states, opening_commit=self._chain.raw(round - 1))
        if boundary is not None:
            start.boundary = boundary
            if boundary < round:
                start.boundary_commit = self._chain.raw(boundary) or b""
        return start

    async def complete(self, start: worker.Start, say: Callable[[str, str], None]) -> worker.Start:
        """Fetch what the start needs. Raises RemoteError when it cannot be had."""
        commit = self._chain.commit(start.round)
        if commit is not None and not all([await asyncio.to_thread(self._store.sound, state.digest) for state in start.states]):
            providers = [host.peer for member in commit.body.roster for host in member.hosts]
            for number, state in enumerate(start.states, 1):
                say("synchronising", f"fetching the state before round {start.round}, stage {number} of {len(start.states)}")
                await self._exchange.fetch(state.digest, providers)
        for number in range(start.round, self._chain.length):
            commit = self._chain.commit(number)
            assert commit is not None
            if commit.body.closing:
                break
            for item in commit.body.counted:
                for payload in item.payloads:
                    await self._exchange.fetch(payload.digest, list(item.holders), payload.size)
            start.commits.append(commit.envelope.SerializeToString())
        return start

    def worth_keeping(self, own_states: Mapping[int, Mapping[int, bytes]]) -> set[bytes]:
        """Payloads and states of the rounds that a joiner or a restart may build on; `own_states` by round and stage."""
        head = self._chain.head
        newest = self._manifest.snapshot_round(max(1, head.round))
        oldest = max(1, newest - SNAPSHOTS_KEPT * self._manifest.rounds.snapshot_every)
        keep: set[bytes] = set()

        def wanted(round: int) -> bool:
            return round >= head.round - RECENT_STATES or round == self._manifest.snapshot_round(round) >= oldest

        for number in range(oldest, head.round):
            commit = self._chain.commit(number)
            assert commit is not None
            keep |= {payload.digest for item in commit.body.counted for payload in item.payloads}
            if wanted(number):
                keep |= {state.digest for state in commit.body.states}
        for round, states in own_states.items():
            if wanted(round):
                keep |= set(states.values())
        return keep
