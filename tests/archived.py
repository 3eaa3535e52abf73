"""Run with real blobs as states and payloads, and its archiver: without network, without workers."""

from pathlib import Path
from typing import Any

from dilocox.node.archive.archiver import Archiver, ArchiveSettings
from dilocox.node.archive.copier import BlobCopier
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.shards import find_shards
from dilocox.node.run_reader import Nobody
from dilocox.node.state.resume_points import state_blob
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.crypto import Identity
from dilocox.protocol.payload.data_root import work_root
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.corpus import Corpus
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope, seal
from dilocox.transport.archive.archive import Archive
from dilocox.transport.archive.chain import archived_manifest, commits_of
from dilocox.transport.archive.index import ArchiveHead
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.corpora import corpus_of, words
from tests.exchanges import exchange_of
from tests.helpers import Table, identity, manifest

__all__ = ["OWNER", "RealTable", "archiving", "check_whole", "names_of", "real_run"]

OWNER = Identity(b"\x0e" * 32)


def real_run(store: BlobStore, **sections: dict[str, Any]) -> Manifest:
    """Return a run whose data are in `store`, and whose owner is OWNER."""
    text = corpus_of(store.folder, words(40, 20))
    rounds = {"count": 100, "snapshot_every": 2, **sections.pop("rounds", {})}
    model = {"stages": 3, **sections.pop("model", {})}
    return manifest(run={"owner": OWNER.key.hex()}, rounds=rounds, data=text.settings, model=model, **sections)


class RealTable(Table):
    def __init__(self, run: Manifest, store: BlobStore) -> None:
        super().__init__(run)
        self.store = store

    def state_root(self) -> bytes:
        counted = [c.body.round for c in self.commits if c.body.counted]
        stages = {  # the first never changes: states share it
            stage: self.store.put([repr((stage, counted if stage else "")).encode() * 9 + bytes(500)])
            for stage in range(self.run.model.stages)
        }
        return self.store.put([state_blob(stages)])

    def contribution(self, number: int, spoil: Any = None, **changes: Any) -> Statement:
        leaves = []
        for stage in range(self.run.model.stages):
            payload = f"payload {number} of {self.head.round} stage {stage}".encode() * 5
            norms = bytes(len(stage_tensors(self.run.model, stage)))
            leaf = pb.Leaf(stage=stage, digest=self.store.put([payload]), size=len(payload), norms=norms)
            leaf.shares = self.share_root(leaf.digest, stage)
            leaves.append(leaf)
        blob = self.store.put([canonical(pb.Leaves(leaves=leaves))])
        said: dict[str, Any] = {"leaves": blob, "size": sum(leaf.size for leaf in leaves)}
        if self.run.availability is not None:
            said["shares"] = work_root(self.share_root(blob, None), leaves)
        return super().contribution(number, spoil, **{**said, **changes})

    def share_root(self, blob: bytes, stage: int | None) -> bytes:
        """Return the root over a blob's shards in the open round; empty unless the run has availability."""
        shards = find_shards(self.run)
        return shards.root(self.head.roster, self.store, blob, stage) if shards is not None else b""

    def file(self, path: Path) -> ChainFile:
        """Write the signed chain so far, as a follower of the run stores it."""
        chain = ChainFile(path, self.run)
        chain.keep_signed_manifest(seal(OWNER, pb.KIND_MANIFEST, self.run.run_id, self.run.canonical_bytes()).envelope)
        for commit in self.commits:
            chain.append(commit.envelope)
        return chain


def archiving(
    run: Manifest,
    archive: Archive,
    chain: ChainFile,
    store: BlobStore,
    every: int | None = None,
    keep: int | None = None,
    payloads: bool = True,
) -> Archiver:
    """Return an archiver that has everything in `store`, and nothing else."""
    downloader = Downloader(identity(90).peer, store, Nobody(), ChannelPool())
    exchange = exchange_of(run, downloader)
    starts = exchange.starts(chain)
    settings = ArchiveSettings(ArchivePlace("", None), True, every, keep, payloads, {})
    return Archiver(
        run, lambda: archive, settings, chain, starts, BlobCopier(run, starts, downloader, exchange.applies, store, None)
    )


def names_of(archive: Archive, run: Manifest, head: ArchiveHead) -> set[bytes]:
    """Return the blobs that a head names, each read. Raises RemoteError if one is missing or invalid."""
    found = {bytes.fromhex(head.manifest)} | {bytes.fromhex(segment.blob) for segment in head.segments}
    if head.appointment is not None:
        found.add(bytes.fromhex(head.appointment))
    for root in head.states.values():
        found |= {root, *pb.StageStates.FromString(archive.read(root, limits.LEAVES_BYTES)).digests}
    for raw in commits_of(archive, head):
        commit = open_envelope(raw, run.run_id, (pb.KIND_COMMIT,))
        if any(first <= commit.body.round <= last for first, last in head.payloads):
            found |= {commit.body.state} - {b""}
            for item in taken(commit.body):
                leaves = item.contribution.leaves
                raw_leaves = archive.read(leaves, limits.LEAVES_BYTES)
                found |= {leaves, *(leaf.digest for leaf in read_leaves(run, raw_leaves))}
    if head.data:
        document = bytes.fromhex(run.data.digest)
        corpus = Corpus.from_canonical(archive.read(document, limits.CORPUS_BYTES))
        found |= {document, *(blob for blob, _ in corpus.blobs)}
    for blob in found:
        archive.read(blob, limits.BLOB_BYTES)
    return found


def check_whole(archive: Archive, run: Manifest, commits: list[Statement]) -> ArchiveHead | None:
    """Return the archive's head, if everything in it is present and its chain is the run's; None if there is none yet."""
    head = archive.head()
    if head is None:
        return None
    assert archived_manifest(archive, head) == run
    names_of(archive, run, head)
    archived = list(commits_of(archive, head))
    assert len(archived) == head.length
    told = [open_envelope(raw, run.run_id, (pb.KIND_COMMIT,)).digest for raw in archived]
    assert told == [commit.digest for commit in commits[: len(told)]]
    for round, root in head.states.items():
        assert round >= len(commits) or commits[round].body.state == root
    return head
