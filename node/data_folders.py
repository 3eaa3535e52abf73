"""Which files of this machine a run may read: those inside folders that its operator named with `--data NAME=DIR`, and no others.

A manifest names data as NAME/GLOB: what it can reach is what the operator meant, however the run's owner spells it, and whatever a
link inside the folder points to. Free of torch: the daemon refuses a run before its workers start.
"""

import glob
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import NAME, Data

__all__ = ["Folders", "check_data", "parse_folders", "source_files", "tokenizer_file"]

Folders = Mapping[str, Path]
"""NAME -> DIR."""


def parse_folders(options: Iterable[str]) -> dict[str, Path]:
    """Of `--data NAME=DIR`, each. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not re.fullmatch(NAME, name) or not folder or name in folders:
            raise ConfigError(f"--data {option}: write NAME=DIR, such as wikitext=/data/wikitext, each NAME once")
        if not Path(folder).is_dir():
            raise ConfigError(f"--data {option}: there is no folder {folder}")
        folders[name] = Path(folder).resolve()
    return folders


def check_data(data: Data, folders: Folders) -> None:
    """Raises ConfigError when the run wants files that are not there or that it may not read. Reads none of them."""
    if data.source != "stdlib":
        source_files(data, folders)
    if data.tokenizer != "bytes":
        tokenizer_file(data, folders)


def source_files(data: Data, folders: Folders) -> list[Path]:
    """The files of a `text:` source, sorted. Raises ConfigError."""
    name, pattern = data.source.removeprefix("text:").split("/", 1)
    return _inside(_folder(name, "data.source", folders), name, pattern, "data.source")


def tokenizer_file(data: Data, folders: Folders) -> Path:
    """Raises ConfigError."""
    name, file = data.tokenizer.split("/", 1)
    return _inside(_folder(name, "data.tokenizer", folders), name, glob.escape(file), "data.tokenizer")[0]


def _folder(name: str, key: str, folders: Folders) -> Path:
    if name not in folders:
        raise ConfigError(f"the run's {key} wants a data folder named {name}. Say where yours is: --data {name}=DIR")
    return folders[name]


def _inside(root: Path, name: str, pattern: str, key: str) -> list[Path]:
    """The files below `root` that match, links followed. Raises ConfigError when one lies elsewhere, or there is none."""
    found = []
    for match in sorted(glob.glob(pattern, root_dir=root, recursive=True)):
        path = (root / match).resolve()
        if not path.is_relative_to(root):
            raise ConfigError(
                f"{key}: {name}/{match} leads out of {root}. Remove that link, or name another folder with --data."
            )
        if path.is_file():
            found.append(path)
    if not found:
        raise ConfigError(f"{key}: no file matches {pattern} in {root}, the folder of --data {name}=…")
    return found
