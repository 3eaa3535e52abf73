"""Parts that everything in a node uses: identity, chain, blobs and tasks of its run."""

from dataclasses import dataclass

from dilocox.protocol.crypto import Identity
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["RunContext"]


@dataclass(frozen=True)
class RunContext:
    identity: Identity
    chain: ChainFile
    store: BlobStore
    """Payloads and states of the run."""
    tasks: Tasks
    """Tasks of the daemon, which ends when one of them fails."""

    @property
    def manifest(self) -> Manifest:
        return self.chain.manifest

    @property
    def me(self) -> str:
        """Our peer id."""
        return self.identity.peer
