"""Tests of an archive's content: blobs and heads, in a folder and in a double of S3, plain and sealed."""

import os
import shutil
import threading
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.archive import storage
from dilocox.transport.archive.archive import Archive, create_archive, open_archive
from dilocox.transport.archive.chain import some_head
from dilocox.transport.archive.index import ArchiveHead, Segment, Snapshot, covered, cut, due, joined
from dilocox.transport.archive.sealing import make_key
from dilocox.transport.archive.storage import BucketStorage, FolderStorage, Storage, open_storage
from dilocox.transport.store.blobs import BlobStore
from tests.ceph import ceph_bucket
from tests.helpers import digest
from tests.s3_double import s3_double

RUN = digest("run")
SIZES = (0, 1, limits.CHUNK_BYTES, limits.CHUNK_BYTES + 1, 3 * limits.CHUNK_BYTES)


@contextmanager
def moto_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run moto's S3, an independent double, which is no dependency of ours; yield the name of a new bucket, because it
    remembers them."""
    bucket = f"bucket-{os.urandom(8).hex()}"
    reason = "moto's double of S3 is not here: pip install 'moto[server]'"
    server = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {
            "ENDPOINT_URL": f"http://{host}:{port}",
            "REGION": "us-east-1",
            "ACCESS_KEY_ID": "x",
            "SECRET_ACCESS_KEY": "x",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{bucket}", method="PUT")).close()
        yield bucket
    finally:
        server.stop()


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with ceph_bucket(tmp_path_factory.mktemp("ceph")) as bucket:
        yield bucket


PLACES = ("folder", "sealed folder", "S3 double", "sealed S3 double", "moto", "bucket", "sealed bucket")


@pytest.fixture(params=[*PLACES, *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ceph", "sealed ceph"))])
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Archive]]:
    """Open the archive again each time."""
    key = None
    if "sealed" in request.param:
        key = tmp_path / "archive.key"
        make_key(key)
    if "bucket" in request.param:
        if REAL_BUCKET not in os.environ:
            pytest.skip(f"no real bucket: name one in {REAL_BUCKET}, and who asks in AWS_…, as docs/how-to/archive.md says")
        url = f"s3://{os.environ[REAL_BUCKET]}/{os.urandom(8).hex()}"
        yield lambda: create_archive(url, RUN, key)
        storage = open_storage(url)
        for name in storage.sizes(""):
            storage.delete(name)
    elif "ceph" in request.param:
        bucket, environment = request.getfixturevalue("ceph")
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        url = f"{bucket}/{os.urandom(8).hex()}"
        yield lambda: create_archive(url, RUN, key)
    elif request.param == "moto":
        with moto_double(monkeypatch) as bucket:
            yield lambda: create_archive(f"s3://{bucket}/some/prefix", RUN, key)
    elif "S3" in request.param:
        with s3_double():
            yield lambda: create_archive("s3://bucket/some/prefix", RUN, key)
    else:
        yield lambda: create_archive(str(tmp_path / "archive"), RUN, key)


REAL_BUCKET = "DILOCOX_TEST_BUCKET"


def content(size: int) -> bytes:
    return bytes(size) if size < 2 else b"\1" + bytes(size - 2) + b"\2"


def head(archive: Archive, **changes: object) -> ArchiveHead:
    values = {"sequence": 0, "run": archive.run_id.hex(), "manifest": "00" * 32, **changes}
    return ArchiveHead.model_validate(values)


@pytest.mark.parametrize("size", SIZES)
def test_a_blob_comes_back_as_it_was(fresh: Callable[[], Archive], tmp_path: Path, size: int):
    store, other = BlobStore(tmp_path / "one"), BlobStore(tmp_path / "other")
    blob = store.put([content(size)])
    assert blob not in fresh()
    assert fresh().put(store, blob) == size
    assert blob in fresh()
    assert fresh().put(store, blob) == 0, "once is enough"
    assert fresh().fetch(blob, other, limits.BLOB_BYTES) == size
    assert other.read(blob) == content(size)
    assert fresh().read(blob, limits.BLOB_BYTES) == content(size)
    assert fresh().write(content(size)) == blob
    archive = fresh()
    archive.drop(blob)
    assert blob not in archive
    assert set(archive.storage.sizes("")) == {"archive.json"}, "nothing of it is left"


def test_what_it_does_not_hold_is_a_sentence(fresh: Callable[[], Archive], tmp_path: Path):
    archive = fresh()
    with pytest.raises(RemoteError, match=digest("none").hex()[:16]) as caught:
        archive.fetch(digest("none"), BlobStore(tmp_path / "one"), 10)
    assert caught.value.reason == pb.REASON_UNAVAILABLE
    blob = archive.write(b"more than four")
    for read in (lambda: archive.read(blob, 4), lambda: archive.fetch(blob, BlobStore(tmp_path / "one"), 4)):
        with pytest.raises(RemoteError, match=r"14 bytes.* 4$") as caught:
            read()
        assert caught.value.reason == pb.REASON_OVERSIZE


def test_the_newest_head_counts_and_two_are_kept(fresh: Callable[[], Archive]):
    archive = fresh()
    assert archive.head() is None
    for round in range(4):
        written = archive.publish(head(archive, snapshots=(Snapshot(round=round, root="11" * 32),)))
        assert fresh().head() == written
        assert (written.sequence, list(written.states)) == (round, [round])
    assert sorted(archive.storage.sizes("heads")) == ["000000000002", "000000000003"]


def test_heads_that_are_all_damaged_are_not_taken_for_none(fresh: Callable[[], Archive]):
    archive = fresh()
    with pytest.raises(LocalError, match="empty"):
        some_head(archive)
    archive.publish(head(archive))
    [name] = archive.storage.sizes("heads")
    archive.storage.delete(f"heads/{name}")
    archive.storage.put(f"heads/{name}", b"junk")
    with pytest.raises(RemoteError, match=r"^digest-mismatch: .*damaged"):
        some_head(fresh())
    again = fresh()
    again.head()
    assert again.publish(head(again)).sequence == 1, "who writes goes on"
    assert some_head(fresh()).sequence == 1


def test_two_who_write_find_out(fresh: Callable[[], Archive]):
    one, other = fresh(), fresh()
    assert one.head() is other.head() is None
    one.publish(head(one))
    with pytest.raises(RemoteError, match=r"^unavailable: .*process"):
        other.publish(head(other))
    assert other.head() is not None
    other.publish(head(other, data=True))
    found = fresh().head()
    assert found is not None
    assert found.data


def test_damage_is_found_and_the_head_before_is_read(fresh: Callable[[], Archive], tmp_path: Path):
    archive, store = fresh(), BlobStore(tmp_path / "one")
    small, large = store.put([b"small"]), store.put([content(2 * limits.CHUNK_BYTES)])
    for blob in (small, large):
        archive.put(store, blob)
    archive.head()
    first = archive.publish(head(archive))
    archive.publish(head(archive, data=True))
    for name in archive.storage.sizes(""):
        if name != "archive.json" and not name.endswith(f"heads/{first.sequence:012}"):
            raw = archive.storage.get(name, 1 << 30)
            archive.storage.put(name, raw[:-1] + bytes([raw[-1] ^ 1]))
    again = BlobStore(tmp_path / "again")
    for blob in (small, large):
        with pytest.raises(RemoteError):
            archive.fetch(blob, again, limits.BLOB_BYTES)
        assert blob not in again
        with pytest.raises(RemoteError):
            archive.read(blob, limits.BLOB_BYTES)
    assert fresh().head() == first
    after = fresh()
    after.head()
    assert after.publish(head(after)).sequence == 2, "the damaged one's number is taken"


def test_a_size_that_an_index_only_claims_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1 << 16)  # hashes of the largest blob would be half a gigabyte
    archive = create_archive(str(tmp_path / "archive"), digest(1), None)
    blob = archive.write(b"short")
    archive.storage.put(f"{archive.folder(blob)}/index", limits.BLOB_BYTES.to_bytes(8, "big"))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError, match=r"^digest-mismatch: .*damaged"):
            archive.read(blob, limits.BLOB_BYTES)
        assert tracemalloc.get_traced_memory()[1] < limits.MIB
    finally:
        tracemalloc.stop()


def test_a_transfer_that_was_cut_goes_on(fresh: Callable[[], Archive], tmp_path: Path):
    """Check that present chunks are not sent, nor fetched, again."""
    archive, store, other = fresh(), BlobStore(tmp_path / "one"), BlobStore(tmp_path / "other")
    blob = store.put([content(6 * limits.CHUNK_BYTES)])
    cut = Counting(archive.storage, fails_at=3)
    archive.storage = cut
    with pytest.raises(RemoteError, match="the line was cut"):
        archive.put(store, blob)
    again = fresh()
    again.storage = counted = Counting(again.storage)
    assert blob not in again
    assert again.put(store, blob) < 6 * limits.CHUNK_BYTES
    assert counted.puts + cut.puts == 7, "six chunks and an index"
    again.storage = Counting(counted.inner, lost_from=3)
    with pytest.raises(RemoteError, match="the line was cut"):
        again.fetch(blob, other, limits.BLOB_BYTES)
    assert blob not in other
    received = fresh().fetch(blob, other, limits.BLOB_BYTES)
    assert received == 3 * limits.CHUNK_BYTES, "what came before the cut stayed, whichever was asked for first"
    assert other.sound(blob)


class Counting:
    """Storage that fails after a number of puts and gets, or at chunks from a number on: several run at once, in any
    order."""

    def __init__(self, inner: Storage, fails_at: int | None = None, lost_from: int | None = None) -> None:
        self.inner, self.url, self._fails_at, self._lost_from = inner, inner.url, fails_at, lost_from
        self.puts = self.calls = 0
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
            if self._fails_at is not None and self.calls > self._fails_at:
                raise RemoteError(pb.REASON_UNAVAILABLE, "the line was cut")

    def get(self, name: str, most: int) -> bytes:
        self._count()
        chunk = name.rpartition("/")[2]
        if self._lost_from is not None and chunk.isdecimal() and int(chunk) >= self._lost_from:
            raise RemoteError(pb.REASON_UNAVAILABLE, "the line was cut")
        return self.inner.get(name, most)

    def put(self, name: str, data: bytes) -> None:
        self._count()
        self.inner.put(name, data)
        with self._lock:
            self.puts += 1

    def put_new(self, name: str, data: bytes) -> bool:
        self._count()
        return self.inner.put_new(name, data)

    def sizes(self, folder: str) -> dict[str, int]:
        return self.inner.sizes(folder)

    def size(self, name: str) -> int | None:
        return self.inner.size(name)

    def delete(self, name: str) -> None:
        self._count()
        self.inner.delete(name)


# Rejections


def test_a_place_that_no_archive_made_is_left_alone(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="photos contains files"):
        create_archive(str(tmp_path / "photos"), RUN, None)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["one.jpg"]
    with pytest.raises(LocalError, match=r"no archive in .*none\."):
        open_archive(str(tmp_path / "none"), None)


def test_another_run_and_another_key_are_refused(tmp_path: Path):
    key, wrong = tmp_path / "a.key", tmp_path / "b.key"
    make_key(key)
    make_key(wrong)
    create_archive(str(tmp_path / "plain"), RUN, None)
    create_archive(str(tmp_path / "sealed"), RUN, key)
    with pytest.raises(ConfigError, match=RUN.hex()):
        create_archive(str(tmp_path / "plain"), digest("another"), None)
    with pytest.raises(ConfigError, match="--archive-key FILE"):
        open_archive(str(tmp_path / "sealed"), None)
    with pytest.raises(ConfigError, match="remove --archive-key"):
        open_archive(str(tmp_path / "plain"), key)
    with pytest.raises(ConfigError, match=r"b.key is not the key"):
        open_archive(str(tmp_path / "sealed"), wrong)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_archive(str(tmp_path / "sealed"), key)
    wrong.write_text("not a key")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        open_archive(str(tmp_path / "sealed"), wrong)
    with pytest.raises(FileExistsError):
        make_key(key)


def test_a_sealed_archive_says_neither_content_nor_digests(tmp_path: Path):
    key = tmp_path / "a.key"
    make_key(key)
    archive, secret = create_archive(str(tmp_path / "sealed"), RUN, key), b"a sentence that stays in the house"
    blob = archive.write(secret)
    archive.head()
    archive.publish(head(archive, snapshots=(Snapshot(round=3, root=blob.hex()),)))
    for path in (tmp_path / "sealed").rglob("*"):
        assert blob.hex() not in str(path)
        if path.is_file():
            assert secret not in path.read_bytes()
            assert blob.hex().encode() not in path.read_bytes()


def test_an_object_in_anothers_place_does_not_open(tmp_path: Path):
    """Check it also for an old head under a new number."""
    key = tmp_path / "a.key"
    make_key(key)
    archive = create_archive(str(tmp_path / "sealed"), RUN, key)
    archive.head()
    for _ in range(2):
        archive.publish(head(archive))
    raw = archive.storage.get("heads/000000000000", 1 << 20)
    archive.storage.put("heads/000000000007", raw)
    found = archive.head()
    assert found is not None
    assert found.sequence == 1


@pytest.mark.parametrize("url", ["ftp://host/folder", "s3://", "file://host/folder", "s3://bucket?x=1", "s3://key@bucket/x"])
def test_an_address_that_is_none_is_a_sentence(url: str):
    with pytest.raises(ConfigError, match="use a folder"):
        open_storage(url)


@pytest.mark.parametrize(
    "url", ["s3://[::", "file://[a/x", "/a\0b", "file:///a%00b", "a" * 5000, "/srv/\ud800", "/tmp/" + "b" * 300]
)
def test_archive_that_no_path_or_url_can_name_is_refused_shortly(url: str):
    with pytest.raises(ConfigError) as refused:
        open_storage(url)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def test_addresses(tmp_path: Path):
    for text in (str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        storage = open_storage(text)
        assert isinstance(storage, FolderStorage)
        assert storage.url == tmp_path.as_uri()
    with s3_double():
        assert isinstance(open_storage("s3://bucket/prefix/"), BucketStorage)


def test_a_file_is_no_archive_and_nothing_lies_in_it(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ConfigError, match="is a file"):
            open_storage(str(path))
    with pytest.raises(ConfigError, match="no archive"):
        open_archive(str(tmp_path / "new"), None)


def test_a_folder_that_a_kill_left_half_written_goes_whole(tmp_path: Path):
    """Check a killed write: its temporary name is reserved, and files of others stay."""
    archive, store = create_archive(str(tmp_path / "archive"), RUN, None), BlobStore(tmp_path / "one")
    blob, other = store.put([content(2 * limits.CHUNK_BYTES)]), store.put([b"other"])
    for each in (blob, other):
        archive.put(store, each)
        (tmp_path / "archive" / archive.folder(each) / ".000001.4711.tmp").write_bytes(b"half")
    (tmp_path / "archive" / archive.folder(other) / "notes.txt").write_bytes(b"mine")
    for each in (blob, other):
        archive.drop(each)
    left = sorted(path.name for path in (tmp_path / "archive" / "blobs").rglob("*"))
    assert left == sorted([other.hex(), ".000001.4711.tmp", "notes.txt"])


def test_a_storage_that_does_not_answer_is_a_sentence(tmp_path: Path):
    with s3_double() as server:
        archive = create_archive("s3://bucket/x", RUN, None)
        server.objects.clear()
        with pytest.raises(LocalError, match="no archive in s3://bucket/x"):
            open_archive("s3://bucket/x", None)
        nobodys = BucketStorage("nobodys", "")
        for put in (nobodys.put, nobodys.put_new):
            with pytest.raises(RemoteError, match="s3://nobodys: no such bucket"):
                put("x", b"")
        assert archive.head() is None
        server.down = True
        with pytest.raises(RemoteError, match="archive s3://bucket/x: "):
            archive.head()
    gone = create_archive(str(tmp_path / "folder"), RUN, None)
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_bytes(b"a file")
    with pytest.raises(RemoteError, match="cannot use"):
        gone.write(b"x")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"sequence": 1}',
        head(Archive(FolderStorage(Path("x")), None, RUN)).model_dump_json().replace("0000", "zzzz", 1).encode(),  # type: ignore[arg-type]
    ],
)
def test_a_head_that_is_none_is_refused(raw: bytes):
    with pytest.raises(RemoteError):
        ArchiveHead.parse(raw)


def test_a_head_with_a_gap_is_refused():
    segments = (
        Segment(first=0, count=2, blob="0" * 64, last="0" * 64),
        Segment(first=3, count=1, blob="0" * 64, last="0" * 64),
    )
    whole = ArchiveHead(sequence=0, run="0" * 64, manifest="0" * 64, segments=segments[:1])
    assert ArchiveHead.parse(whole.model_dump_json().encode()) == whole
    with pytest.raises(RemoteError, match=r"^malformed: .*gap"):
        ArchiveHead.parse(whole.model_copy(update={"segments": segments}).model_dump_json().encode())


# Objects to archive


def test_one_state_in_so_many_rounds_is_due():
    empty = ArchiveHead(sequence=0, run="0" * 64, manifest="0" * 64)
    some = empty.model_copy(update={"snapshots": (Snapshot(round=4, root="1" * 64), Snapshot(round=7, root="1" * 64))})
    agreed = dict.fromkeys((3, 6, 8, 9, 11, 10), b"")
    assert due(empty, agreed, 5) == [11, 10, 9, 8, 6, 3]
    assert due(some, agreed, 5) == [11, 10], "7 stands for 5 … 9"
    assert due(some, agreed, 1) == [11, 10, 9, 8]
    assert due(some, {}, 5) == []


def test_spans_of_rounds():
    spans: tuple[tuple[int, int], ...] = ()
    for round in (1, 2, 5, 4, 9, 9):
        spans = joined(spans, round)
    assert spans == ((1, 2), (4, 5), (9, 9))
    assert joined(spans, 3) == ((1, 5), (9, 9))
    assert [round for round in range(11) if covered(spans, round)] == [1, 2, 4, 5, 9]
    assert cut(spans, 2, 8) == ((2, 2), (4, 5))
    assert cut(spans, 0, -1) == ()


def test_a_bucket_that_overwrites_what_it_is_told_not_to_is_refused():
    """Check a server as `rclone serve s3`, which overwrites and reports success."""
    with s3_double() as server:
        server.overwrites = True
        with pytest.raises(ConfigError, match="If-None-Match"):
            create_archive("s3://bucket/run", RUN, None)
        server.overwrites = False
        create_archive("s3://bucket/run", RUN, None)


def test_a_conflict_of_two_who_write_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """Check error 409: S3 rejects one of two puts at once, and may reject both. Then no object exists, despite the error."""
    monkeypatch.setattr(storage, "CONFLICT_SECONDS", 0.001)
    with s3_double() as server:
        bucket = open_storage("s3://bucket/run")
        server.conflicts = 2
        assert bucket.put_new("one", b"ours")
        assert server.objects == {"run/one": b"ours"}
        server.conflicts = 1
        assert not bucket.put_new("one", b"theirs"), "there is one"
        server.conflicts = 1 << 30
        with pytest.raises(RemoteError, match=r"^unavailable: .*write"):
            bucket.put_new("other", b"ours")
