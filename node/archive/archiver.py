"""Archiver: copies a run's chain, agreed states, data, and optionally every counted payload to an archive.

It finds missing objects level by level, and fetches them from peers as a joiner would; then one head names them. After
a restart, or a day without the archive, it continues with what peers still store.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.node.archive.copier import BlobCopier
from dilocox.node.context.peer import PeerRuntime
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.state.run_data import RunData
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope, stages_in
from dilocox.transport.archive.archive import Archive, create_archive
from dilocox.transport.archive.chain import commits_of, in_common, word_of, write_commits
from dilocox.transport.archive.index import ArchiveHead, Snapshot, covered, cut, due, joined
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import Folders, named_store
from dilocox.transport.store.data_directory import DataDirectory

__all__ = ["ArchiveSettings", "Archiver", "check_sealing", "make_archiver"]

log = logging.getLogger(__name__)

Done = tuple[ArchiveHead, str]
"""The head after a step, and why something is still missing."""
ALONE_LOOKS = 24
"""Reads without a write by another archiver, after which that one counts as gone: this one then reads after every commit."""
LOOK_SECONDS = 5.0
"""Pause before a failed fetch or write is tried again; a commit is handled when it arrives."""


@dataclass(frozen=True)
class ArchiveSettings:
    place: ArchivePlace
    plain: bool
    """True if the archive is not sealed although the run is not public."""
    every: int | None
    """Rounds between two snapshots; None: those that peers store for joiners."""
    keep: int | None
    """So many snapshots; None: all."""
    payloads: bool
    """Every payload that counted, too."""
    data: Folders
    """Folders of the run's data on this machine, by name; empty: they are fetched."""


def check_sealing(manifest: Manifest, key: Path | None, plain: bool) -> None:
    """Raises ConfigError where an archive would say to others what the run does not."""
    if key is None and not plain and (manifest.admission.policy == "allow-list" or not manifest.may_read("")):
        raise ConfigError(
            "this run is not public, but the storage's operator could read the archive: pass --archive-key FILE "
            "(created if missing) to encrypt it, or --archive-plain"
        )


def make_archiver(
    settings: ArchiveSettings,
    home: DataDirectory,
    place: PeerRuntime,
    chain: ChainFile,
    run_data: RunData,
    tell: Callable[[str], None],
) -> tuple["Archiver", set[bytes]]:
    """Return the archiver, and the blobs that must stay in the store until they are archived. Raises ConfigError."""
    manifest = chain.manifest
    named, supplies = named_store(manifest.data, settings.data), None
    data = named or BlobStore(home.folder / "data")
    if named is None:
        me, network = home.identity.peer, place.network
        supplies = Downloader(me, data, network.directory, place.channels)
    carrier = BlobCopier(manifest, run_data.starts, run_data.downloader, run_data.applies, data, supplies)
    url, key = settings.place.url, settings.place.key

    def open_place() -> Archive:
        return create_archive(url, manifest.run_id, key)

    return Archiver(manifest, open_place, settings, chain, run_data.starts, carrier, tell), carrier.pinned


class Archiver:
    def __init__(
        self,
        manifest: Manifest,
        open: Callable[[], Archive],
        settings: ArchiveSettings,
        chain: ChainFile,
        starts: ResumePlanner,
        carrier: BlobCopier,
        tell: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`open`: the archive, where it can be reached. `tell`: called when the reason changes why it is not complete."""
        self._tell = tell
        self._manifest, self._open, self._settings = manifest, open, settings
        self._chain, self._starts, self.carrier = chain, starts, carrier
        self._every = settings.every or manifest.rounds.snapshot_every
        self._archive: Archive | None = None
        self._wrote: int | None = None
        """Number of the newest head that we know; None: of none."""
        self._alone = ALONE_LOOKS
        """Reads since another archiver wrote."""
        self._dropped = -1  # number of the head whose removed blobs are deleted
        self.has_data = False
        """All of the run's data was carried."""
        self.grew = asyncio.Event()
        """Event, set when the chain has a new commit."""
        self.head: ArchiveHead | None = None
        """Head that this archiver wrote last."""
        self.why = "it was not opened yet"
        """Why the archive is not as it should be; empty: it is."""

    async def carry_data(self) -> None:
        """Copy the run's data and its tokenizer, until the archive has all of it; the next head names it."""
        said = ""
        while not self.has_data:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if self.head is not None and not self.head.data:
                    await self.carrier.data(self._chain.parties)
                self.has_data = self.head is not None
            except RemoteError as error:
                if error.detail != said:
                    log.warning("the run's data are not archived yet: %s", error.detail)
                    said = error.detail
        self.grew.set()

    async def run(self) -> None:
        """Archive the run, until cancelled. Raises ConfigError if the archive's place contains something else."""
        said = ""
        while True:
            self.grew.clear()
            try:
                self.why = await self.archive_once()
            except RemoteError as error:
                self.why = error.detail
            if self.why != said:
                self._tell(self.why)
                said = self.why
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.grew.wait()
            except TimeoutError:
                pass

    async def archive_once(self) -> str:
        """Have what is missing; why something still is. Raises RemoteError where the archive cannot be used."""
        if self._archive is None:
            self._archive = await asyncio.to_thread(self._open)
            self.carrier.carry_into(self._archive)
        head, others = await asyncio.to_thread(self._current, self._archive)
        if head is None:
            return "the chain here is shorter than the archive's: waiting for the coordinator's"
        self._alone = 0 if others else self._alone + 1
        both = "another process also writes to this archive: stop one of them, or use another --archive"
        missing = [both] if self._alone < ALONE_LOOKS else []
        for step in (self._imported, self._snapshot, self._payload_log):
            head, why = await step(head)
            missing += [why] if why else []
        if self.has_data and not head.data:
            head = await self._publish(head, head.model_copy(update={"data": True}))
        self.head = head
        return "; ".join(missing)

    def status(self) -> dict[str, Any]:
        """Return the status for people."""
        head = self.head
        return {
            "url": self._settings.place.url,
            "commits": head.length if head else 0,
            "snapshots": [item.round for item in head.snapshots] if head else [],
            "payloads": [list(span) for span in head.payloads] if head else [],
            "data": bool(head and head.data),
            "why": self.why,
        }

    # The head

    def _current(self, archive: Archive) -> tuple[ArchiveHead | None, bool]:
        """Return the newest head without parts of other chains, or None if our chain is shorter; and whether another
        archiver wrote since. Blocking."""
        before = head = archive.head()
        others = before is not None and self._wrote not in (None, before.sequence)
        self._wrote = before.sequence if before is not None else None
        if head is None:
            signed = self._chain.signed_manifest
            assert signed is not None, "a daemon of the run stores it"
            head = ArchiveHead(sequence=0, run=archive.run_id.hex(), manifest=archive.write(canonical(signed)).hex())
        if before is not None:
            self._drop(archive, before)
        ours = in_common(archive, head, self._chain)
        if ours.commits < head.length and not ours.parted:
            return None, others
        gone: list[bytes] = []
        changed = head
        if ours.parted:
            log.warning("the run's owner chose another chain: %d of the archive's %d commits remain", ours.commits, head.length)
            changed, gone = self._without(archive, head, ours.commits)
        segments = tuple(write_commits(archive, self._chain, ours.segments))
        blobs = {segment.blob for segment in segments}
        gone += [bytes.fromhex(segment.blob) for segment in head.segments if segment.blob not in blobs]
        changed = changed.model_copy(update={"segments": segments, "appointment": word_of(archive, self._chain)})
        return self._published(archive, before, changed, gone), others

    def _without(self, archive: Archive, head: ArchiveHead, stand: int) -> tuple[ArchiveHead, list[bytes]]:
        """Return the head without rejected commits, and the blobs to remove. Blocking."""
        snapshots = tuple(item for item in head.snapshots if self._chain.state_before(item.round).hex() == item.root)
        gone = self._states(archive, [bytes.fromhex(item.root) for item in set(head.snapshots) - set(snapshots)])
        for raw in commits_of(archive, head, stand):
            gone += self._payloads(archive, head, open_envelope(raw, archive.run_id, (pb.KIND_COMMIT,)))
        return head.model_copy(update={"snapshots": snapshots, "payloads": cut(head.payloads, 0, stand - 1)}), gone

    def _drop(self, archive: Archive, head: ArchiveHead) -> None:
        """Delete blobs that no head names, before any other write, which might write one of them again. Blocking."""
        if self._dropped != head.sequence:
            for digest in head.retired:
                archive.drop(bytes.fromhex(digest))
            self._dropped = head.sequence

    def _published(
        self, archive: Archive, before: ArchiveHead | None, changed: ArchiveHead, gone: Iterable[bytes] = ()
    ) -> ArchiveHead:
        """`changed` instead of `before`; then what is `gone` goes, but for what is of a state that it still names. Blocking."""
        going = set(gone)
        if going:
            imported = [self._manifest.model.imported] if changed.imported else []
            going -= set(self._states(archive, [*changed.roots, *imported]))
        changed = changed.model_copy(update={"retired": tuple(sorted(digest.hex() for digest in going))})
        if before is not None and not going and changed == before.model_copy(update={"retired": ()}):
            return before
        written = archive.publish(changed)
        self._wrote = written.sequence
        self._drop(archive, written)
        return written

    async def _publish(self, before: ArchiveHead, changed: ArchiveHead, gone: Iterable[bytes] = ()) -> ArchiveHead:
        return await asyncio.to_thread(self._published, self._opened, before, changed, gone)

    @property
    def _opened(self) -> Archive:
        assert self._archive is not None, "nothing runs before"
        return self._archive

    # Contents

    @staticmethod
    def _states(archive: Archive, roots: Iterable[bytes]) -> list[bytes]:
        """Blobs of these states. Blocking."""
        return [blob for root in roots for blob in (root, *stages_in(archive.read(root, limits.LEAVES_BYTES)))]

    def _payloads(self, archive: Archive, head: ArchiveHead, commit: Statement[pb.Commit]) -> list[bytes]:
        """Return counted payloads in the archive. Blocking."""
        if not covered(head.payloads, commit.body.round):
            return []
        leaves = [item.contribution.leaves for item in taken(commit.body)]
        read = [read_leaves(self._manifest, archive.read(digest, limits.LEAVES_BYTES)) for digest in leaves]
        state = [commit.body.state] if commit.body.state else []
        return [*state, *leaves, *(leaf.digest for each in read for leaf in each)]

    # States

    async def _imported(self, head: ArchiveHead) -> Done:
        root = self._manifest.model.imported
        if head.imported or not root:
            return head, ""
        try:
            await self.carrier.stages(0, await self.carrier.root(0, root))
        except RemoteError as error:
            return head, f"the imported weights are not archived yet: {error.detail}"
        return await self._publish(head, head.model_copy(update={"imported": True})), ""

    async def _snapshot(self, head: ArchiveHead) -> Done:
        agreed, why, begun = self._starts.agreed(), "", head.coming
        rounds = due(head, agreed, 1 if self._chain.head.finished else self._every)  # what it ended with, always
        if begun is not None and agreed.get(begun.round, b"").hex() == begun.root:
            rounds = [begun.round, *(round for round in rounds if round != begun.round)]
        for round in rounds:
            try:
                head = await self._have_state(head, Snapshot(round=round, root=agreed[round].hex()))
            except RemoteError as error:
                why = f"the state before round {round} is not archived yet: {error.detail}"
                newest = await asyncio.to_thread(self._opened.head)
                assert newest is not None, "there was one"
                head = newest
                continue
            log.info("the state before round %d is archived", round)
            return await self._retire(head), ""
        if begun is not None and begun == head.coming and begun.round not in rounds:  # no peer serves the rest of it any more
            head = await self._instead(head, None)
        return head, why

    async def _instead(self, head: ArchiveHead, coming: Snapshot | None) -> ArchiveHead:
        """Replace an incomplete snapshot by another one; remove its objects."""
        before, gone = head.coming, set[bytes]()
        if before is not None and before != coming:
            gone = set(await asyncio.to_thread(self._states, self._opened, [bytes.fromhex(before.root)]))
            if covered(head.payloads, before.round):  # its list is what a replay is checked by
                gone.discard(bytes.fromhex(before.root))
        return await self._publish(head, head.model_copy(update={"coming": coming}), gone)

    async def _have_state(self, head: ArchiveHead, snapshot: Snapshot) -> ArchiveHead:
        """Copy a state. Raises RemoteError if no peer serves all of it."""
        root = bytes.fromhex(snapshot.root)
        digests = await self.carrier.root(snapshot.round, root)
        head = await self._instead(head, snapshot)
        await self.carrier.stages(snapshot.round, digests)
        kept = tuple(sorted({*head.snapshots, snapshot}, key=lambda item: item.round))
        return await self._publish(head, head.model_copy(update={"snapshots": kept, "coming": None}))

    async def _retire(self, head: ArchiveHead) -> ArchiveHead:
        """Without the oldest snapshots, and the payloads before the oldest that stays, where so few are kept."""
        keep = self._settings.keep
        if keep is None or len(head.snapshots) <= keep:
            return head
        old, kept = head.snapshots[:-keep], head.snapshots[-keep:]
        first = kept[0].round
        changed = head.model_copy(update={"snapshots": kept, "payloads": cut(head.payloads, first, limits.ROUNDS)})

        def gone() -> list[bytes]:
            end = min(first, self._chain.length)
            commits = (self._chain.commit(number) for a, b in head.payloads for number in range(a, min(b + 1, end)))
            payloads = [blob for c in commits if c is not None for blob in self._payloads(self._opened, head, c)]
            return payloads + self._states(self._opened, [bytes.fromhex(item.root) for item in old])

        return await self._publish(head, changed, await asyncio.to_thread(gone))

    # Payloads

    async def _payload_log(self, head: ArchiveHead) -> Done:
        """Copy payloads of rounds that peers still store."""
        if not self._settings.payloads:
            return head, ""
        before, why, full = head, "", len(head.snapshots) == self._settings.keep
        oldest = head.snapshots[0].round if full else 0
        for number in range(max(oldest, self._starts.oldest_kept()), self._chain.length):
            if covered(head.payloads, number):
                continue
            commit = self._chain.commit(number)
            assert commit is not None
            try:
                await self.carrier.payloads(commit)
            except RemoteError as error:
                why = f"payloads of round {number} are not archived yet: {error.detail}"
            else:
                head = head.model_copy(update={"payloads": joined(head.payloads, number)})
        return await self._publish(before, head), why
