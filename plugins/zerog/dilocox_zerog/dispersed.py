"""Record of the dispersed part of a run's chain: batches, each with some commits in one blob; the first begins with the
run's signed manifest. A reader with the record and the run's id needs no other trust: the record has the downloads'
digests, and they are verified as any chain."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Literal

from google.protobuf.message import DecodeError
from pydantic import Field, model_validator

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.archive.chain import packed, packs, unpacked
from dilocox.transport.store.chain_file import ChainFile
from dilocox_zerog.disperser import Place
from dilocox_zerog.record import Part

__all__ = ["Batch", "Dispersed", "Waiting", "envelopes", "waiting"]

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, lt=1 << 64)]


class Batch(Part):
    """Consecutive commits in one blob."""

    first: Annotated[int, Field(ge=0, lt=limits.ROUNDS)]
    count: Annotated[int, Field(gt=0, lt=limits.ROUNDS)]
    last: Digest
    """Digest of the last of these commits."""
    sha256: Digest
    """Digest of the blob."""
    root: Digest
    """Root of its Merkle tree, as on the disperser's chain."""
    epoch: Number
    quorum: Number

    def is_of(self, chain: ChainFile) -> bool:
        last = chain.commit(self.first + self.count - 1)
        return last is not None and last.digest.hex() == self.last

    @property
    def place(self) -> Place:
        return Place(bytes.fromhex(self.root), self.epoch, self.quorum)


class Dispersed(Part):
    """Dispersed part of a run's chain."""

    format: Literal["dilocox-dispersed-1"] = "dilocox-dispersed-1"
    run: Digest
    batches: tuple[Batch, ...] = ()

    @model_validator(mode="after")
    def _is_without_gaps(self) -> "Dispersed":
        starts = [0, *(batch.first + batch.count for batch in self.batches)]
        if [batch.first for batch in self.batches] != starts[:-1]:
            raise ValueError("commits are missing between its batches")
        return self

    @property
    def commits(self) -> int:
        """Return the number of dispersed commits, from the first one on."""
        return self.batches[-1].first + self.batches[-1].count if self.batches else 0

    def of(self, chain: ChainFile) -> "Dispersed":
        """Return the record without the batches of commits that the run's owner gave up since. Raises ConfigError if it is
        another run's."""
        if self.run != chain.manifest.run_id.hex():
            raise ConfigError(f"the record belongs to the run {self.run}, not to {chain.manifest.run_id.hex()}")
        kept = tuple(takewhile(lambda batch: batch.is_of(chain), self.batches))
        return self.model_copy(update={"batches": kept})

    def with_batch(self, batch: Batch) -> "Dispersed":
        return self.model_copy(update={"batches": (*self.batches, batch)})


@dataclass(frozen=True)
class Waiting:
    """A batch that is not dispersed yet."""

    first: int
    count: int
    last: bytes
    blob: bytes

    def at(self, place: Place) -> Batch:
        return Batch(
            first=self.first,
            count=self.count,
            last=self.last.hex(),
            sha256=sha256(self.blob).hex(),
            root=place.root.hex(),
            epoch=place.epoch,
            quorum=place.quorum,
        )


def waiting(chain: ChainFile, record: Dispersed) -> Iterator[Waiting]:
    """Yield the commits of the chain beyond the record, which belongs to it. Raises LocalError if its folder has no signed
    manifest."""
    manifest = chain.signed_manifest
    if manifest is None:
        raise LocalError(f"{chain.path} does not contain the run's manifest as its owner signed it: pass --join LINK")
    for first, raws in packs(chain, record.commits):
        last = chain.commit(first + len(raws) - 1)
        assert last is not None, "it was just read"
        yield Waiting(first, len(raws), last.digest, packed(raws if first else [canonical(manifest), *raws]))


def envelopes(batch: Batch, blob: bytes) -> list[pb.Envelope]:
    """Return the envelopes of a batch; the first batch begins with the run's signed manifest. Raises RemoteError if the
    blob differs."""
    if sha256(blob).hex() != batch.sha256:
        raise RemoteError(
            pb.REASON_DIGEST_MISMATCH, f"the fetched commits from {batch.first} on differ from those that were dispersed"
        )
    try:
        found = [pb.Envelope.FromString(raw) for raw in unpacked(blob)]
    except DecodeError as error:
        raise RemoteError(pb.REASON_MALFORMED, "an entry is not a statement") from error
    if len(found) != batch.count + (batch.first == 0):
        raise RemoteError(pb.REASON_MALFORMED, f"{len(found)} statements for {batch.count} commits")
    return found
