"""Documents out of files, one at a time: text, JSONL, Parquet, and the Arrow files of a `datasets` folder."""

import errno
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from dilocox.protocol.errors import ConfigError

__all__ = ["STDLIB", "Document", "Record", "documents", "find_files", "records", "sound"]

Document = tuple[str, int]
"""Its text, and the bytes of its file that were read for it."""
Record = tuple[str, Any, int]
"""Where it stands, what stands there, and the bytes of its file that were read for it."""
STDLIB = "stdlib"
"""As a source: the text of Python's own standard library, which is on any machine that runs this."""
PIECE_BYTES = 64 << 10
"""A text file is one document; a longer one is cut at line ends into several of about this size."""
DOCUMENT_BYTES = 64 << 20
"""Largest JSON line."""
TEXT, TABLES = (".txt", ".md", ".jsonl"), (".parquet", ".arrow")
TABLE_ROWS = 64
"""In memory at a time."""
SUFFIXES = (*TEXT, *(f"{suffix}.gz" for suffix in TEXT), *TABLES)
"""Of the files that are taken from a folder."""
NOT_STDLIB = {"site-packages", "test", "tests", "idlelib", "__pycache__"}


def find_files(sources: Iterable[str], skip: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """Files and folders, in the order given, each once; a folder's files by name. `skip`: hears of files in folders that are not of
    a known kind. Raises ConfigError, OSError."""
    found: dict[Path, Path] = {}
    for source in sources:
        path = Path(source)
        if source == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            files = [p for p in root.rglob("*.py") if not NOT_STDLIB & set(p.relative_to(root).parts)]
        elif path.is_dir():
            files = [p for p in _below(path) if p.is_file() and not p.name.startswith("cache-")]
            for other in [p for p in files if not p.name.lower().endswith(SUFFIXES)]:
                files.remove(other)
                skip(other)
        elif path.is_file():
            files = [path]
        else:
            raise ConfigError(f"there is no file or folder {source}")
        for file in files:
            if not os.access(file, os.R_OK):  # before hours go into those that come before it
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        if not files:
            raise ConfigError(
                f"{source} holds no file whose name ends in one of {', '.join(SUFFIXES)}; other files name one by one"
            )
        found |= {file.resolve(): file for file in sorted(files) if file.resolve() not in found}
    return list(found.values())


def _below(folder: Path) -> Iterator[Path]:
    """Raises OSError where one of its folders may not be read, which looks empty to rglob."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for place, _, names in os.walk(folder, onerror=fail):
        yield from (Path(place, name) for name in names)


def documents(path: Path, field: str) -> Iterator[Document]:
    """`field`: of a JSON line or a table that holds the text. Raises ConfigError where it cannot be read."""
    name = path.name.lower().removesuffix(".gz")
    with _readable(path):
        if name.endswith(".jsonl"):
            found = _texts(path, field)
        elif name.endswith(TABLES):
            found = _cells(path, field)
        else:
            found = _pieces(path)
        for text, size in found:
            yield sound(text), size


def records(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """JSON lines, or rows with these of a table's columns. Raises ConfigError where it is neither, or cannot be read."""
    name = path.name.lower().removesuffix(".gz")
    with _readable(path):
        if name.endswith(".jsonl"):
            for number, value, size in _lines(path):
                yield f"{path}, line {number}", value, size
        elif name.endswith(TABLES):
            for number, (row, size) in enumerate(_rows(path, lambda names: [each for each in fields if each in names])):
                yield f"{path}, row {number + 1}", row, size
        else:
            raise ConfigError(f"{path} holds no records: they lie in .jsonl, .jsonl.gz, .parquet or .arrow")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises ConfigError instead of what reading raises."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def sound(text: str) -> str:
    """Half a surrogate pair, which JSON may hold, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _open(path: Path) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _pieces(path: Path) -> Iterator[Document]:
    with _open(path) as file:
        piece, size = [], 0
        while line := file.readline(PIECE_BYTES):
            if "\0" in line:
                raise ConfigError(f"{path} is no text: it holds NUL bytes. Known are text and {', '.join(SUFFIXES)}.")
            piece.append(line)
            size += len(line)
            if size >= PIECE_BYTES:
                yield "".join(piece), size
                piece, size = [], 0
        if piece:
            yield "".join(piece), size


def _lines(path: Path) -> Iterator[tuple[int, Any, int]]:
    """(number of the line, its value, its length)."""
    with _open(path) as file:
        number = 0
        while line := file.readline(DOCUMENT_BYTES):
            number += 1
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{path}, line {number}: no JSON, or longer than {DOCUMENT_BYTES >> 20} MiB: {error}"
                ) from error
            yield number, value, len(line)


def _texts(path: Path, field: str) -> Iterator[Document]:
    for number, value, size in _lines(path):
        if isinstance(value, dict) and field in value and value[field] is None:
            continue  # tables have rows without a text
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise ConfigError(f"{path}, line {number}: no text in {field!r}; say where it is with --field (there are: {known})")
        yield value[field], size


def _cells(path: Path, field: str) -> Iterator[Document]:
    def choose(names: list[str]) -> list[str]:
        if field not in names:
            raise ConfigError(
                f"{path} has no column {field!r}; say which holds the text with --field (there are: {', '.join(names)})"
            )
        return [field]

    for row, _ in _rows(path, choose):
        if row[field] is None:
            continue
        if not isinstance(row[field], str):
            raise ConfigError(f"{path}: the column {field!r} holds no text")
        yield row[field], len(row[field])


def _rows(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[tuple[dict[str, Any], int]]:
    """The chosen columns of each row, by name, and about how long they are. `choose`: among the table's."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'dilocox[data]'") from error
    try:
        if path.name.lower().endswith(".parquet"):
            file = parquet.ParquetFile(path)
            columns = choose(file.schema_arrow.names)
            batches = file.iter_batches(batch_size=TABLE_ROWS, columns=columns)
        else:
            reader = _open_arrow(arrow, path)
            columns = choose(reader.schema.names)
            batches = (batch.select(columns) for batch in reader)
        for batch in batches:
            size = batch.nbytes // max(1, batch.num_rows)
            for start in range(0, batch.num_rows, TABLE_ROWS):
                for row in batch.slice(start, TABLE_ROWS).to_pylist():
                    yield row, size
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _open_arrow(arrow: Any, path: Path) -> Any:
    """As a stream, which `datasets` writes, or as a file."""
    source = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        file = arrow.ipc.open_file(source)
        return arrow.RecordBatchReader.from_batches(file.schema, (file.get_batch(i) for i in range(file.num_record_batches)))
