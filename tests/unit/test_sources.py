"""Files of a folder: those that are data, messages about the rest, and the text of each."""

import gzip
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.data import sources
from dilocox.node.data.finding import Found, find_files
from dilocox.node.data.sources import documents, records
from dilocox.protocol.errors import ConfigError

LINE = json.dumps({"text": "a text", "n": 1}) + "\n"
MARK = b"\xef\xbb\xbf"


def found_in(folder: Path, **options: Any) -> tuple[list[str], Found]:
    found = Found()
    return [path.relative_to(folder).as_posix() for path in find_files([str(folder)], found, **options)], found


def write(path: Path, content: bytes | str = LINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts_of(path: Path, field: str = "text") -> list[str]:
    return [text for text, _ in documents(path, field)]


def test_hidden_files_and_folders_are_left_out_and_said(tmp_path: Path):
    for name in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", ".git/x.txt", "._a.jsonl", "__MACOSX/a.jsonl", "b/.c.txt"):
        write(tmp_path / name)
    files, found = found_in(tmp_path)
    assert files == ["a.jsonl"]
    assert sorted(found.left_out["hidden"]) == ["._a.jsonl", ".c.txt", ".git", ".ipynb_checkpoints", "__MACOSX"]
    assert str(found).splitlines() == [
        "1 files: 1 .jsonl",
        "left out: 5 hidden (._a.jsonl, .c.txt, .git, …); to read such a file or folder, pass its path",
    ]


def test_a_hidden_folder_that_is_named_is_read(tmp_path: Path):
    write(tmp_path / ".data" / "a.jsonl")
    assert found_in(tmp_path / ".data")[0] == ["a.jsonl"]
    assert find_files([str(write(tmp_path / ".b.txt"))])


def test_links_that_lead_out_are_left_out_and_said_and_others_are_followed_once(tmp_path: Path):
    far, data = tmp_path / "far", tmp_path / "data"
    write(far / "more.jsonl")
    write(tmp_path / "secret.txt")
    write(data / "a.jsonl")
    write(data / ".store" / "kept.jsonl")
    write(data / "deep" / "b.jsonl")
    for name, target in {
        "part2": far,
        "x.txt": tmp_path / "secret.txt",
        "shadow.txt": Path("/etc/shadow"),
        "stored": data / ".store",
        "again": data / "deep",
        "loop": data,
        "c.jsonl": data / "a.jsonl",
        "gone.txt": tmp_path / "gone",
        "round.txt": data / "round.txt",
    }.items():
        (data / name).symlink_to(target)
    files, found = found_in(data)
    assert len(files) == 3, "a, b, and what a link inside leads to; each once"
    assert {Path(file).resolve().name for file in files} <= {"a.jsonl", "b.jsonl", "kept.jsonl"} | {Path(f).name for f in files}
    assert sorted(found.left_out["links out of the folder"]) == ["part2", "shadow.txt", "x.txt"]
    assert sorted(found.left_out["broken links"]) == ["gone.txt", "round.txt"]
    assert "part2" in str(found)
    assert len(find_files([str(data), str(data / "part2"), str(data / "x.txt")])) == 5, "the operator names them"


def test_a_snapshot_of_the_hub_s_cache_is_read(tmp_path: Path):
    write(tmp_path / "blobs" / "0123")
    (tmp_path / "snapshots" / "abc" / "data").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "data" / "a.jsonl").symlink_to("../../../blobs/0123")
    assert found_in(tmp_path / "snapshots" / "abc")[0] == ["data/a.jsonl"]
    assert found_in(tmp_path)[0] == ["snapshots/abc/data/a.jsonl"]


@pytest.mark.parametrize("name", ["README.md", "readme.txt", "LICENSE.txt", "LICENSE.md", "CHANGELOG.md", "README.zh.md"])
def test_texts_about_data_are_no_data_beside_records(name: str, tmp_path: Path):
    write(tmp_path / "data" / "a.jsonl.gz", gzip.compress(LINE.encode()))
    write(tmp_path / name, "a card")
    write(tmp_path / "notes.txt", "a text")
    files, found = found_in(tmp_path)
    assert files == ["data/a.jsonl.gz", "notes.txt"]
    assert found.left_out["about the data"] == [name]


def test_texts_alone_are_read_but_the_hub_s_card(tmp_path: Path):
    for name in ("README.md", "docs/README.md", "LICENSE.txt"):
        write(tmp_path / name, "a page")
    assert len(found_in(tmp_path)[0]) == 3
    write(tmp_path / "README.md", "---\nlicense: mit\n---\n# A card\n")
    assert found_in(tmp_path)[0] == ["LICENSE.txt", "docs/README.md"]


def test_what_is_no_regular_file_is_said_and_not_opened(tmp_path: Path):
    write(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "b.jsonl")
    files, found = found_in(tmp_path)
    assert files == ["a.jsonl"]
    assert found.left_out == {"not regular files": ["b.jsonl"]}
    for place in (tmp_path / "b.jsonl", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is a (FIFO|device): "):
            find_files([str(place)])
        with pytest.raises(ConfigError, match=r"is a (FIFO|device): "):
            texts_of(place)


def test_all_kinds_are_counted(tmp_path: Path):
    for name in ("a.txt", "b.TXT", "c.ndjson", "d.csv", "e.json", "f", "cache-1.arrow", "cache-notes.txt"):
        write(tmp_path / name)
    files, found = found_in(tmp_path)
    assert files == ["a.txt", "b.TXT", "c.ndjson", "cache-notes.txt"]
    assert found.read == {".txt": 3, ".ndjson": 1}
    assert found.left_out == {
        ".csv": ["d.csv"],
        ".json": ["e.json"],
        "without an ending": ["f"],
        "caches of `datasets`": ["cache-1.arrow"],
    }
    assert found_in(tmp_path, only_records=True)[0] == ["c.ndjson"]
    named = Found()
    find_files([str(write(tmp_path / "g.html", "<p>")), str(tmp_path / "e.json")], named)
    assert named.read == {".html, as text": 1, ".json": 1}
    with pytest.raises(ConfigError, match=r"d\.csv is a table"):
        find_files([str(tmp_path / "d.csv")])


def test_a_folder_without_data_says_what_it_holds(tmp_path: Path):
    write(tmp_path / "train.json")
    (tmp_path / "part2").symlink_to("/etc")
    with pytest.raises(ConfigError, match=r"has no file.*left out: .*1 \.json.*part2|has no file.*part2.*1 \.json"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonlines", "a.ldjson", "a.json", "a.json.gz", "a.NDJSON.gz"])
def test_json_lines_are_records_whatever_their_name(name: str, tmp_path: Path):
    raw = (LINE * 3).encode()
    path = write(tmp_path / name, gzip.compress(raw) if name.endswith(".gz") else raw)
    assert texts_of(path) == ["a text"] * 3
    assert [value["n"] for _, value, _ in records(path, ("text",))] == [1] * 3


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_list_in_a_json_file_is_records(layout: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "READ_CHARACTERS", 7)
    said = [{"text": f"text {number}, [or] {{not}}"} for number in range(count)]
    path = write(tmp_path / "a.json", json.dumps(said, **layout))
    assert texts_of(path) == [each["text"] for each in said]
    path = write(tmp_path / "b.json", "\n".join(json.dumps(each, **layout) for each in said))
    assert texts_of(path) == [each["text"] for each in said]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"data": [{"text": "x"}]}', r"value 1: no text in 'text'.*found: data"),
        ('[{"text": "x"}, nonsense]', "value 2 is not JSON"),
        ('[{"text": "x"}', "value 2 is not JSON: it ends too early"),
        ('{"text": "x"', "value 1 is not JSON"),
        ("[[1]]", "value 1: no text"),
        ("[" * 100_000, "value 1: .*recursion"),
        ('{"text": "' + "x" * 4000, "value 1 is not JSON, or longer than"),
    ],
)
def test_a_json_file_that_is_no_records_is_named(content: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 2000)
    monkeypatch.setattr(sources, "READ_CHARACTERS", 100)
    with pytest.raises(ConfigError, match=sentence):
        texts_of(write(tmp_path / "a.json", content))


def test_records_under_the_name_of_a_text_are_refused(tmp_path: Path):
    for name in ("a.txt", "dump", "a.log"):
        with pytest.raises(ConfigError, match=r"JSON lines.*\.jsonl"):
            texts_of(write(tmp_path / name, "\n" + LINE * 2))
    assert texts_of(write(tmp_path / "b.txt", '{\n  "text": "code"\n}\n'))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md"])
def test_a_byte_order_mark_is_no_part_of_a_text(name: str, tmp_path: Path):
    raw = MARK + b"one\r\n" + MARK + "zwei ä\n".encode()  # as `cat` joins two such files
    assert texts_of(write(tmp_path / name, gzip.compress(raw) if name.endswith(".gz") else raw)) == ["one\r\nzwei ä\n"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_text_of_windows_in_utf_16_is_read(encoding: str, tmp_path: Path):
    assert texts_of(write(tmp_path / "a.txt", "\ufeffzwei ä\n".encode(encoding))) == ["zwei ä\n"]
    assert texts_of(write(tmp_path / "a.jsonl", f"\ufeff{LINE}".encode(encoding))) == ["a text"]


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path):
    marked = json.dumps({"text": "\ufeffa text"}, ensure_ascii=False) + "\n"
    path = write(tmp_path / "a.jsonl", MARK + LINE.encode() + MARK + marked.encode() + MARK + b"\n")
    assert texts_of(path) == ["a text", "a text"]
    assert texts_of(write(tmp_path / "a.json", MARK + f"[{LINE}]".encode())) == ["a text"]


def table_of(path: Path, texts: Any, **writing: Any) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **writing)
    else:
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_row_of_a_table_is_bounded_and_large_ones_are_read_one_by_one(name: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 5000)
    monkeypatch.setattr(sources, "TABLE_BYTES", 20_000)
    large = [str(number) * 4000 for number in range(9)]
    assert texts_of(table_of(tmp_path / name, ["small", *large, None, "small"])) == ["small", *large, "small"]
    path = table_of(tmp_path / name, ["small", "x" * 6000, "small"])
    found = documents(path, "text")
    with pytest.raises(ConfigError, match=r"row 2: longer than"):
        list(found)


def test_a_cell_that_repeats_is_not_held_as_often(tmp_path: Path):
    """Check Parquet, which stores it once, in a dictionary of its group."""
    pytest.importorskip("pyarrow")
    import pyarrow as arrow

    cells = arrow.DictionaryArray.from_arrays([0] * 64, ["x" * (40 << 20)])
    path = table_of(tmp_path / "a.parquet", cells, dictionary_pagesize_limit=1 << 30, compression="zstd", store_schema=False)
    del cells
    assert path.stat().st_size < 1 << 20
    before = arrow.total_allocated_bytes()
    largest = 0
    for text, _ in islice(documents(path, "text"), 3):
        largest = max(largest, arrow.total_allocated_bytes() - before)
        assert len(text) == 40 << 20
    assert 40 << 20 < largest < 1200 << 20, "of 2,560 MiB"


@pytest.mark.parametrize("kind", ["dictionary", "view", "nested dictionary"])
def test_what_rows_share_does_not_make_each_too_long(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pyarrow")
    import pyarrow as arrow

    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 5000)
    texts = [f"{number} " + "x" * 1000 for number in range(20)]
    if kind == "view":
        column = arrow.array(texts, arrow.string_view())
    else:
        column = arrow.DictionaryArray.from_arrays(list(range(20)), texts)
    if kind.startswith("nested"):
        column = arrow.StructArray.from_arrays([column], ["content"])
        read = [row["text"]["content"] for _, row, _ in records(table_of(tmp_path / "a.arrow", column), ("text",))]
        assert read == texts
    else:
        assert texts_of(table_of(tmp_path / "a.arrow", column)) == texts
        long = column if kind == "view" else column.dictionary
        path = table_of(tmp_path / "b.arrow", arrow.array([*long.to_pylist(), "y" * 6000], long.type))
        with pytest.raises(ConfigError, match="row 21: longer than"):
            texts_of(path)
