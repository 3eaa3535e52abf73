"""The files of sources: which of a folder's are data, and what is left out."""

import errno
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from dilocox.node.data.sources import RECORDS, TABLES, TEXTS, ending_of
from dilocox.protocol.errors import ConfigError
from dilocox.transport.store.files import leads_out, open_regular

__all__ = ["STDLIB", "Found", "find_files"]

STDLIB = "stdlib"
"""Name of a source: the text of Python's standard library, which every machine with Python has."""
NOT_STDLIB = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
ABOUT = {"readme", "license", "licence", "copying", "notice", "copyright", "authors", "credits", "changelog", "citation"}
ABOUT |= {"contributing", "code_of_conduct", "security", "dataset_card", "datasheet"}
"""Names of texts about data, without their ending."""
CARD = b"---"
"""A README.md of the Hugging Face hub begins with this."""
NAMES_SHOWN = 3
MACOS = "__MACOSX"
"""A folder that macOS puts into archives: copies of attributes."""


@dataclass
class Found:
    """Files that `find_files` read and left out, in words."""

    read: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names, by why."""

    def leave_out(self, why: str, path: Path) -> None:
        self.left_out.setdefault(why, []).append(path.name)

    def __str__(self) -> str:
        """One line, or two: what is read, and what is left out, by kind."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.read.most_common())
        lines = [f"{self.read.total():,} files: {kinds}"]
        if self.left_out:
            groups = sorted(self.left_out.items(), key=lambda group: -len(group[1]))
            says = ", ".join(f"{len(names):,} {why}{_some(names) if not why.startswith('.') else ''}" for why, names in groups)
            lines.append(f"left out: {says}; to read such a file or folder, pass its path")
        return "\n".join(lines)


def _some(names: list[str]) -> str:
    shown = sorted(set(names))
    more = ", …" if len(shown) > NAMES_SHOWN else ""
    return f" ({', '.join(shown[:NAMES_SHOWN])}{more})"


def find_files(sources: Iterable[str], found: Found | None = None, only_records: bool = False) -> list[Path]:
    """Return files and folders, in the order given, each once; a folder's files by name. `found`: takes what was read and left out;
    `only_records`: of folders no plain text. Raises ConfigError, OSError."""
    chosen: dict[Path, Path] = {}
    found = Found() if found is None else found
    endings = (*([] if only_records else TEXTS), *RECORDS)
    endings = (*endings, *(f"{ending}.gz" for ending in endings), *TABLES)
    for source in sources:
        path = Path(source)
        if source == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            files = [p for p in root.rglob("*.py") if not NOT_STDLIB & set(p.relative_to(root).parts)]
        elif path.is_dir():
            files = list(_data_of(path, endings, found))
        elif path.exists():
            open_regular(path).close()
            files = [_named(path)]
        else:
            raise ConfigError(f"no file or folder {source}")
        for file in files:
            if not os.access(file, os.R_OK):  # before hours go into those that come before it
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        if not files:
            says = f" ({str(found).splitlines()[-1]})" if found.left_out else ""
            raise ConfigError(
                f"{source} has no file whose name ends in one of {', '.join(endings)}: pass the file itself{says}"
            )
        chosen |= {file.resolve(): file for file in sorted(files) if file.resolve() not in chosen}
    found.read.update(_kind(file) for file in chosen.values())
    return list(chosen.values())


def _named(path: Path) -> Path:
    """Raises ConfigError for a table as text: its commas and quotes would become tokens."""
    if ending_of(path).removesuffix(".gz") in (".csv", ".tsv"):
        raise ConfigError(f"{path} is a table in a text format that is not supported: convert it to Parquet or JSON lines")
    return path


def _kind(path: Path) -> str:
    ending = ending_of(path)
    known = ending.removesuffix(".gz") in (*TEXTS, *RECORDS, *TABLES, ".json", ".py")
    return ending if known else f"{ending or 'without an ending'}, as text"


def _data_of(folder: Path, endings: tuple[str, ...], found: Found) -> Iterator[Path]:
    """Yield the files of a folder that are data. Raises OSError."""
    files = [path for path in _regular(folder, found) if _is_data(path, endings, found)]
    records = any(not _is_text(path) for path in files)
    for path in files:
        if _is_text(path) and path.name.partition(".")[0].lower() in ABOUT and (records or _is_card(path)):
            found.leave_out("about the data", path)
        else:
            yield path


def _is_text(path: Path) -> bool:
    return ending_of(path).removesuffix(".gz") in TEXTS


def _is_card(path: Path) -> bool:
    with open_regular(path) as file:
        return path.name.lower() == "readme.md" and file.read(len(CARD)) == CARD


def _is_data(path: Path, endings: tuple[str, ...], found: Found) -> bool:
    if path.name.startswith("cache-") and ending_of(path) == ".arrow":
        found.leave_out("caches of `datasets`", path)
    elif ending_of(path) not in endings:
        found.leave_out(ending_of(path) or "without an ending", path)
    else:
        return True
    return False


def _regular(folder: Path, found: Found) -> Iterator[Path]:
    """Yield the regular files below a folder that are not hidden, also behind links that do not lead out of it. Raises OSError
    where a folder may not be read, which looks empty to rglob."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen, waiting = set[Path](), [folder]
    while waiting:
        for place, folders, names in os.walk(waiting.pop(0), onerror=fail):
            if (real := Path(place).resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            for path in [Path(place, name) for name in sorted(folders)]:
                if _is_left_out(path, folder, found):
                    folders.remove(path.name)
                elif path.is_symlink():
                    waiting.append(path)
            for path in (Path(place, name) for name in names):
                if not _is_left_out(path, folder, found):
                    yield path


def _is_left_out(path: Path, folder: Path, found: Found) -> bool:
    """Return whether a file or folder is none to read, whatever its name ends in; `found` takes why."""
    if path.name.startswith(".") or path.name == MACOS:
        found.leave_out("hidden", path)
    elif path.is_symlink() and not path.exists():
        found.leave_out("broken links", path)
    elif path.is_symlink() and leads_out(path, folder):
        found.leave_out("links out of the folder", path)
    elif not path.is_file() and not path.is_dir():
        found.leave_out("not regular files", path)
    else:
        return False
    return True
