"""Texts that benches and tests train on: a corpus in the library, by default the text of Python's standard library."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dilocox.node.data.build import build_stdlib
from dilocox.node.data.finding import STDLIB
from dilocox.transport.store.corpus_store import last_built, library, parse_folders

__all__ = ["UNREAD", "Text", "stdlib", "text_of"]


UNREAD = {"name": "none", "digest": "00" * 32}
"""The `data` of a manifest whose run trains on nothing."""


@dataclass(frozen=True)
class Text:
    name: str
    folder: Path
    digest: str

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of a manifest's `data`."""
        return {"name": self.name, "digest": self.digest}

    def into(self, run: str) -> str:
        """Return a run file that names the text."""
        assert run.count("[data]\n") == 1
        return run.replace("[data]\n", f'[data]\nname = "{self.name}"\ndigest = "{self.digest}"\n')


def stdlib() -> Text:
    return _built(library(STDLIB))


@cache
def _built(folder: Path) -> Text:
    digest, _ = build_stdlib(folder)
    return Text(STDLIB, folder, digest.hex())


def text_of(option: str | None) -> Text:
    """Return the text of `--data NAME=DIR`."""
    if option is None:
        return stdlib()
    [(name, folder)] = parse_folders([option]).items()
    return Text(name, folder, last_built(folder).hex())
