"""Private data of a cluster: its corpus, and the privacy account."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.node.context.settings import NodeSettings
from dilocox.node.data.verify import check_own, must_bring_own
from dilocox.protocol.run.corpus import Corpus
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.corpus_store import last_built

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account

__all__ = ["PrivateData", "open_private_data"]


@dataclass(frozen=True)
class PrivateData:
    folder: Path
    digest: bytes
    account: "Account"

    def check(self, manifest: Manifest, shared: Corpus) -> None:
        """Raises ConfigError where it is not whole, or does not fit the run. Blocking."""
        check_own(manifest, shared, self.folder, self.digest)


def open_private_data(settings: NodeSettings, home: Path, manifest: Manifest) -> PrivateData | None:
    """Return the private data; None if the run's data are public. Raises ConfigError if the run requires private data and
    none were named, or the reverse, and as `open_account`. Blocking."""
    must_bring_own(manifest, settings.private)
    if settings.private is None:
        return None
    from dilocox.node.data.privacy_budget import open_account  # a run on shared data has no account

    digest = last_built(settings.private)
    account = open_account(home, manifest, settings.private, digest, settings.budget, settings.gives_up_bound)
    return PrivateData(settings.private, digest, account)
