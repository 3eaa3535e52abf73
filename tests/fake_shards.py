"""Erasure shards for tests of the core, which work without a plugin: a root is a hash, and there are no shards."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.crypto import sha256
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.transport.store.blobs import BlobStore


class FakeShards:
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def root(self, roster: Mapping[str, Cluster], store: BlobStore, blob: bytes, stage: int | None) -> bytes:
        store.size(blob)
        return sha256(b"root", blob, b"%d" % (-1 if stage is None else stage))

    def findings(self) -> Iterator[Finding]:
        yield Finding(Level.FINE, "availability", "fake")

    def bytes_a_round(self, clusters: int, stages: Sequence[int]) -> float:
        return 1000.0 * clusters * len(stages)

    def restorer(self, *parts: Any) -> Any:
        return parts

    def open(self, *parts: Any) -> Any:
        return parts
