"""Documents out of files, one at a time: text, JSON lines, JSON, Parquet, and the Arrow files of a `datasets` folder."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dilocox.protocol.errors import ConfigError
from dilocox.transport.store.files import open_regular

__all__ = ["RECORDS", "TABLES", "TEXTS", "Document", "Record", "Unreadable", "documents", "ending_of", "records", "sound"]

Document = tuple[str, int]
"""Its text, and the bytes of its file that were read for it."""
Record = tuple[str, Any, int]
"""Position, value, and the bytes of its file read for it."""
Value = tuple[str, Any, int]
"""A record of a JSON file: where in the file, what, and about how long it is."""
PIECE_BYTES = 64 << 10
"""A text file is one document; a longer one is cut at line ends into several of about this size."""
DOCUMENT_BYTES = 64 << 20
"""Largest line or value of JSON, and largest row of a table."""
READ_CHARACTERS = 1 << 20
"""Characters of a JSON file that are read at a time."""
TEXTS, RECORDS, TABLES = (".txt", ".md"), (".jsonl", ".ndjson", ".jsonlines", ".ldjson"), (".parquet", ".arrow")
"""Endings of the files that are taken from a folder; the first two kinds also before .gz."""
KNOWN = (*TEXTS, *RECORDS, ".json", *TABLES)
TABLE_ROWS, TABLE_BYTES = 64, 1 << 30
"""Most rows, and bytes, of a table in memory. A group of more bytes is read in fewer rows, one at least: all of its bytes may
belong to one row."""
MARK = "\ufeff"
"""Byte order mark."""
GAP = re.compile(r"[\s,\ufeff]*")


@dataclass(frozen=True)
class Unreadable:
    """A record that is none."""

    why: str


def ending_of(path: Path) -> str:
    """Return the end of a file's name, in small letters, such as `.jsonl.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix + (".gz" if name.endswith(".gz") else "")


def documents(path: Path, field: str) -> Iterator[Document]:
    """Yield the documents of a file. `field`: the key or column of the text. Raises ConfigError where it cannot be read."""
    ending = ending_of(path).removesuffix(".gz")
    with _readable(path):
        if ending in (*RECORDS, ".json"):
            found = _texts(path, field)
        elif ending in TABLES:
            found = _cells(path, field)
        else:
            found = _pieces(path, field)
        for text, size in found:
            yield sound(text), size


def records(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yield values of JSON, or rows with these of a table's columns. A line that is no JSON is Unreadable. Raises ConfigError where
    the file is neither, or cannot be read."""
    ending = ending_of(path).removesuffix(".gz")
    with _readable(path):
        if ending in RECORDS:
            yield from ((f"{path}, {where}", value, size) for where, value, size in _lines(path))
        elif ending == ".json":
            yield from ((f"{path}, {where}", value, size) for where, value, size in _values(path))
        elif ending in TABLES:
            for number, (row, size) in enumerate(_rows(path, lambda names: [each for each in fields if each in names])):
                yield f"{path}, row {number + 1}", row, size
        else:
            known = ", ".join((*RECORDS, ".json", *TABLES))
            raise ConfigError(f"{path} contains no records: rename it to end in its format ({known})")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises ConfigError instead of what reading raises."""
    try:
        yield
    except UnicodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def sound(text: str) -> str:
    """Return a text without a leading byte order mark, and without half a surrogate pair, which JSON may contain."""
    text = text.lstrip(MARK)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open text in UTF-8, or in UTF-16 with a byte order mark, as some Windows tools write it."""
    with open_regular(path) as file:
        raw: Any = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        begin = raw.peek(4)[:2]
        encoding = "utf-16" if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        with io.TextIOWrapper(raw, encoding=encoding, newline="") as text:
            yield text


def _pieces(path: Path, field: str) -> Iterator[Document]:
    with _opened(path) as file:
        piece, size, begun = [], 0, False
        while line := file.readline(PIECE_BYTES):
            line = line.lstrip(MARK)
            if "\0" in line:
                raise ConfigError(f"{path} is not text: it contains NUL bytes. Use text or one of {', '.join(KNOWN)}.")
            if not begun and line.lstrip().startswith("{") and re.search(rf'"{re.escape(field)}"\s*:\s*"', line):
                raise ConfigError(f"{path} contains JSON lines: rename it to end in {RECORDS[0]}")
            begun = begun or bool(line.strip())
            piece.append(line)
            size += len(line)
            if size >= PIECE_BYTES:
                yield "".join(piece), size
                piece, size = [], 0
        if piece:
            yield "".join(piece), size


def _lines(path: Path) -> Iterator[Value]:
    """Yield each line's value, or that it is Unreadable."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(DOCUMENT_BYTES):
            number += 1
            where, size, value = f"line {number}", len(line), None
            if size == DOCUMENT_BYTES and not line.endswith("\n"):
                value = Unreadable(f"longer than {DOCUMENT_BYTES >> 20} MiB")
                while (more := file.readline(READ_CHARACTERS)) and not more.endswith("\n"):
                    size += len(more)
            elif not line.strip(" \t\r\n" + MARK):
                continue
            else:
                try:
                    value = json.loads(line.lstrip(MARK))
                except (ValueError, RecursionError) as error:
                    value = Unreadable(f"not JSON: {error}")
            yield where, value, size


def _values(path: Path) -> Iterator[Value]:
    """Yield the values of a JSON file, in sequence or in one list, in any layout. Raises ConfigError."""
    decode = json.JSONDecoder().raw_decode
    with _opened(path) as file:
        text, at, number, inside, done = "", 0, 0, False, False
        why: Exception | str = "it ends too early"
        while True:
            at = _behind_gap(text, at)
            if at < len(text):
                if not number and not inside and text[at] == "[":
                    inside, at = True, at + 1
                    continue
                if inside and text[at] == "]":
                    return
                try:
                    value, end = decode(text, at)
                    if end < len(text) or done:  # a number may continue
                        number += 1
                        yield f"value {number}", value, end - at
                        at = end
                        continue
                except RecursionError as error:
                    raise ConfigError(f"{path}, value {number + 1}: {error}") from error
                except ValueError as error:
                    why = error
            if done and (at < len(text) or inside):
                raise ConfigError(f"{path}, value {number + 1} is not JSON: {why}")
            if done:
                return
            if len(text) - at > DOCUMENT_BYTES:
                raise ConfigError(f"{path}, value {number + 1} is not JSON, or longer than {DOCUMENT_BYTES >> 20} MiB: {why}")
            more = file.read(max(READ_CHARACTERS, len(text) - at))
            text, at, done = text[at:] + more, 0, not more


def _behind_gap(text: str, at: int) -> int:
    gap = GAP.match(text, at)
    return at if gap is None else gap.end()


def _texts(path: Path, field: str) -> Iterator[Document]:
    whole = ending_of(path).removesuffix(".gz") == ".json"
    for where, value, size in (_values if whole else _lines)(path):
        if isinstance(value, Unreadable):
            raise ConfigError(f"{path}, {where}: {value.why}")
        if isinstance(value, dict) and field in value and value[field] is None:
            continue  # tables have rows without a text
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise ConfigError(
                f"{path}, {where}: no text in {field!r}; pass the field of the text with --field (found: {known})"
            )
        yield value[field], size


def _cells(path: Path, field: str) -> Iterator[Document]:
    def choose(names: list[str]) -> list[str]:
        if field not in names:
            raise ConfigError(
                f"{path} has no column {field!r}; pass the column of the text with --field (found: {', '.join(names)})"
            )
        return [field]

    for row, _ in _rows(path, choose):
        if row[field] is None:
            continue
        if not isinstance(row[field], str):
            raise ConfigError(f"{path}: the column {field!r} is not text")
        yield row[field], len(row[field])


def _rows(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the chosen columns of each row, by name, and about how long they are. `choose`: among the table's."""
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'dilocox[data]'") from error
    open_regular(path).close()
    try:
        number = 0
        for batch in (_parquet if ending_of(path) == ".parquet" else _arrow)(path, choose):
            size = batch.nbytes // max(1, batch.num_rows)
            for part in _parts(batch):
                if part.num_rows == 1 and _row_bytes(part) > DOCUMENT_BYTES:
                    raise ConfigError(f"{path}, row {number + 1}: longer than {DOCUMENT_BYTES >> 20} MiB")
                number += part.num_rows
                for row in part.to_pylist():
                    yield row, size
    except (arrow.ArrowException, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _parts(batch: Any) -> Iterator[Any]:
    """Yield some rows at a time, and large ones by themselves."""
    if batch.num_rows <= TABLE_ROWS and batch.nbytes <= DOCUMENT_BYTES:
        yield batch
        return
    for start in range(0, batch.num_rows, TABLE_ROWS):
        part = batch.slice(start, TABLE_ROWS)
        step = 1 if part.nbytes > DOCUMENT_BYTES else TABLE_ROWS
        yield from (part.slice(at, step) for at in range(0, part.num_rows, step))


def _row_bytes(part: Any) -> int:
    """Return about how long one row is. Columns of dictionaries and views count all that other rows share with it."""
    shared = any(name in str(field.type) for field in part.schema for name in ("dictionary", "view"))
    return _length(part.to_pylist()) if shared and part.nbytes > DOCUMENT_BYTES else part.nbytes


def _length(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list) else len(value) if isinstance(value, str | bytes) else 1


def _parquet(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[Any]:
    """Yield batches of few rows: one row may be as large as its group, and repeat."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        columns = choose(file.schema_arrow.names)
        for group in range(file.metadata.num_row_groups):
            meta = file.metadata.row_group(group)
            chunks = [meta.column(index) for index in range(meta.num_columns)]
            size = sum(
                chunk.total_uncompressed_size
                for chunk in chunks
                if any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in columns)
            )
            rows = max(1, min(TABLE_ROWS, TABLE_BYTES // max(1, size)))
            yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=columns)


def _arrow(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[Any]:
    """Yield batches of a stream, which `datasets` writes, or of a file."""
    import pyarrow as arrow

    source = arrow.memory_map(str(path))
    try:
        reader: Any = arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        file = arrow.ipc.open_file(source)
        reader = arrow.RecordBatchReader.from_batches(file.schema, (file.get_batch(i) for i in range(file.num_record_batches)))
    columns = choose(reader.schema.names)
    yield from (batch.select(columns) for batch in reader)
