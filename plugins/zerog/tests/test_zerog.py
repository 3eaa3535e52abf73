"""Tests of 0G's networks as stores of a run, against doubles; test_zerog_e2e.py runs the SDK itself."""

import asyncio
import io
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("Crypto", reason="pip install ./plugins/zerog")

from zerog_standin import DisperserStandIn, disperser

from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.wire.messages import seal
from dilocox.transport.archive.storage import FolderStorage
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.files import whole_folder
from dilocox_zerog import commands as zerog
from dilocox_zerog import volume
from dilocox_zerog.merkle import CHUNK_BYTES, SEGMENT_BYTES, file_root, padded_bytes
from dilocox_zerog.network import Network, root_of
from dilocox_zerog.pb import disperser_pb2 as pb
from dilocox_zerog.volume import fill, read_header, split, write_volume
from tests.archived import OWNER
from tests.helpers import COORDINATOR, Table, dilocox, manifest

RUN = manifest(run={"owner": OWNER.key.hex()}, rounds={"count": 200})
SIGNED = seal(OWNER, wire.KIND_MANIFEST, RUN.run_id, RUN.canonical_bytes()).envelope

# Trees

ROOTS = {
    1: "5afb32bc24865da0f2074a5cf609f75284e0685ce39f4daa3da19154fe5f80a7",
    256: "282fa219976d5930e15dd9d40f768fa151dc2e72a639f05f0678b3bbd5d0545e",
    257: "1ea3c1941823ed5c30ff56f5363e4870232aef3e7b8b04503867dabbadc25aed",
    4097: "9ff3c6bc4235fba61ae288a6d8c82b0d85ce52bbf142262d06f10b3aeca6d1f0",
    262144: "d0cd79da1591d1f5b3ac0d1eff184989de0ae1b9ad50325cbe4a2230e9c0cb06",
    262145: "23db0c4d0a233cd96bc71f4db802e0233d4f121dfde822595be830119da7dbcf",
    300000: "55f648da07123a4eb0f9d039ddaf0246747adf9fc425c34fe45bf4e577967a1e",
    786432: "dfdd5f2447aeae4a45c12b041e7ba3532e69a402bf52300ad36f889897d09496",
    1500000: "7fcde30ac3fbc8cfa32f08e0d677421fc3dfe952e02b8fd622d873ddb80a55e0",
}
"""Roots by the number of random bytes of seed 1, read in sequence, as 0g-storage-sdk 0.4.0 makes them."""


def test_a_file_has_the_root_that_the_sdk_gives_it():
    source = random.Random(1)
    for size, root in ROOTS.items():
        assert file_root(io.BytesIO(source.randbytes(size)), size).hex() == root, size


def test_files_are_filled_up_to_a_sixteenth_of_the_next_power_of_two():
    assert padded_bytes(1) == CHUNK_BYTES
    assert padded_bytes(CHUNK_BYTES + 1) == 2 * CHUNK_BYTES
    assert padded_bytes(17 * CHUNK_BYTES) == 18 * CHUNK_BYTES
    assert padded_bytes(SEGMENT_BYTES) == SEGMENT_BYTES
    assert padded_bytes(SEGMENT_BYTES + 1) == SEGMENT_BYTES + 128 * CHUNK_BYTES


# Volumes

OBJECTS = {
    "archive.json": b"{}",
    "heads/000000000003": b"a head",
    "blobs/ab01/index": b"",
    "blobs/ab01/000000": b"x" * 3000,
    "blobs/cd/index": b"y" * 10,
}


@pytest.fixture
def archive(tmp_path: Path) -> FolderStorage:
    storage = FolderStorage(tmp_path / "archive")
    for name, data in OBJECTS.items():
        storage.put(name, data)
    return storage


def test_a_volume_holds_what_it_names_and_the_root_before(archive: FolderStorage, tmp_path: Path):
    names = list(OBJECTS)
    write_volume(archive, names, b"\x01" * 32, tmp_path / "volume")
    with (tmp_path / "volume").open("rb") as file:
        header = read_header(file, (tmp_path / "volume").stat().st_size)
        assert header.before == "01" * 32
        (tmp_path / "again").mkdir()
        (tmp_path / "again/archive.json").write_bytes(b"newer")  # of a later volume
        fill(file, header, tmp_path / "again")
    found = {
        path.relative_to(tmp_path / "again").as_posix(): path.read_bytes()
        for path in (tmp_path / "again").rglob("*")
        if path.is_file()
    }
    assert found == {**OBJECTS, "archive.json": b"newer"}


def test_heads_come_in_the_last_volume(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(volume, "VOLUME_BYTES", 3000)
    sizes = {name: len(data) for name, data in OBJECTS.items()}
    found = list(split(sizes))
    assert sorted(name for names in found for name in names) == sorted(OBJECTS)
    assert [sum(sizes[name] for name in names) <= 3000 for names in found] == [True] * len(found)
    assert {"archive.json", "heads/000000000003"} <= set(found[-1])


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"before": None, "objects": [["../../outside", 1]]}, "match"),
        ({"before": None, "objects": [["/outside", 1]]}, "match"),
        ({"before": None, "objects": [["blobs/..", 1]]}, "match"),
        ({"before": None, "objects": [["a", -1]]}, "greater"),
        ({"before": None, "objects": [["a", 5]]}, "size"),
        ({"before": "no root", "objects": []}, "match"),
        ({"before": None, "objects": [], "more": 1}, "Extra"),
    ],
)
def test_what_is_no_volume_is_refused(header: dict[str, Any], why: str):
    raw = json.dumps(header).encode()
    data = b"dilocox-volume-1\n" + len(raw).to_bytes(4, "big") + raw + b"x"
    with pytest.raises(RemoteError, match=why):
        read_header(io.BytesIO(data), len(data))


@pytest.mark.parametrize(
    "data", [b"", b"dilocox-volume-1\n", b"something else entirely, of some length", b"dilocox-volume-1\n\xff\xff\xff\xff"]
)
def test_what_is_cut_short_or_too_large_is_refused(data: bytes):
    with pytest.raises(RemoteError, match=r"^malformed: .*volume"):
        read_header(io.BytesIO(data), len(data))


def test_an_object_that_went_while_it_was_read_is_said(archive: FolderStorage, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="heads/000000000009"):
        write_volume(archive, ["archive.json", "heads/000000000009"], None, tmp_path / "volume")


# Verbs

Say = Callable[..., tuple[int, str]]
"""Words -> exit code, and the output, in one line."""
StandIn = tuple[DisperserStandIn, str]
"""A disperser of the tests and its URL."""
MARKER = json.dumps({"format": "dilocox-archive-1", "run": "ab" * 32, "check": ""}).encode()
"""The first object of an archive."""


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*arguments: object) -> tuple[int, str]:
        code = dilocox(monkeypatch, "zerog", *map(str, arguments))
        said = capsys.readouterr()
        return code, (said.out + said.err).replace("\n", " ")

    return run


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Return a network's files by root, in memory."""
    kept: dict[bytes, bytes] = {}

    def put(self: Network, path: Path, root: bytes, rpc: str, key: Path) -> str:
        assert root == root_of(path)
        kept[root] = path.read_bytes()
        return "0x01"

    def get(self: Network, root: bytes, path: Path) -> None:
        path.write_bytes(kept[root])

    monkeypatch.setattr(Network, "put", put)
    monkeypatch.setattr(Network, "get", get)
    monkeypatch.setattr(zerog, "find_spec", lambda name: name)
    return kept


def objects_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_is_stored_as_it_grows_and_restored_from_one_root(
    say: Say,
    network: dict[bytes, bytes],
    archive: FolderStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    archive.put("archive.json", MARKER)
    monkeypatch.setattr(volume, "VOLUME_BYTES", 3000)
    there = tmp_path / "archive"
    asking = (
        "store",
        there,
        "--record",
        tmp_path / "record",
        "--indexer",
        "http://i",
        "--rpc",
        "http://r",
        "--key",
        tmp_path / "key",
    )
    code, said = say(*asking)
    assert code == 0
    assert "nothing was sent" in said
    assert not network
    assert not (tmp_path / "record").exists()
    code, said = say(*asking, "--send")
    assert code == 0, said
    assert len(network) == 2
    before = set(network)
    assert "nothing new" in say(*asking, "--send")[1]
    archive.put("blobs/ef/index", b"new")
    assert "nothing new" in say(*asking, "--send")[1], "no head names it yet"
    archive.put("heads/000000000004", b"the next head")
    code, said = say(*asking, "--send")
    assert code == 0
    [last] = set(network) - before
    assert last.hex() in said
    assert b"x" * 3000 not in network[last], "it is in a volume before"
    code, said = say("restore", last.hex(), tmp_path / "again", "--indexer", "http://i")
    assert code == 0, said
    assert objects_in(tmp_path / "again") == objects_in(there)
    assert say("restore", last.hex(), tmp_path / "again", "--indexer", "http://i")[0] == 2, "it is there"
    assert say("restore", "12", tmp_path / "other", "--indexer", "http://i")[0] == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_call_had_paid_for_is_not_paid_for_again(
    say: Say,
    network: dict[bytes, bytes],
    archive: FolderStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    archive.put("archive.json", MARKER)
    asking = ("store", tmp_path / "archive", "--record", tmp_path / "record", "--indexer", "i", "--rpc", "r", "--key", "k")
    put = Network.put

    def killed(self: Network, path: Path, root: bytes, rpc: str, key: Path) -> str:
        put(self, path, root, rpc, key)
        raise KeyboardInterrupt

    monkeypatch.setattr(Network, "put", killed)
    assert say(*asking, "--send")[0] != 0
    [paid] = network
    monkeypatch.setattr(Network, "put", put)
    archive.put("heads/000000000009", b"a later head")
    archive.put("blobs/" + "cd" * 32 + "/0", b"more")
    code, said = say(*asking, "--send")
    assert code == 0, said
    assert len(network) == 2
    assert paid in network, "the same volume was sent again, which costs nothing"
    assert say("restore", said.rpartition("root is ")[2].strip(), tmp_path / "again", "--indexer", "i")[0] == 0
    assert objects_in(tmp_path / "again") == objects_in(tmp_path / "archive")
    assert "nothing new" in say(*asking, "--send")[1]


@pytest.mark.parametrize("names", [["a", "a/b"], ["a/b", "a"]])
def test_a_volume_whose_names_are_a_file_s_and_a_folder_s_is_refused(names: list[str], tmp_path: Path):
    header = volume.Header(before=None, objects=[(name, 1) for name in names])
    with pytest.raises(RemoteError, match=r"^malformed: .*volume"):
        fill(io.BytesIO(b"xy"), header, tmp_path)


def test_nothing_is_paid_for_where_no_record_of_it_can_be_written(
    say: Say, network: dict[bytes, bytes], archive: FolderStorage, tmp_path: Path
):
    archive.put("archive.json", MARKER)
    paying = ("--indexer", "i", "--rpc", "r", "--key", "k", "--send")
    code, said = say("store", tmp_path / "archive", "--record", tmp_path / "none" / "record", *paying)
    assert code == 2
    assert "existing folder" in said
    assert not network
    code, said = say("disperse", "--record", tmp_path, "--da", "grpc://127.0.0.1:1", "--home", tmp_path / "node", "--send")
    assert code == 2
    assert "existing folder" in said


def test_what_lies_half_fetched_is_gone_once_it_is_restored(
    say: Say,
    network: dict[bytes, bytes],
    archive: FolderStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    write_volume(archive, list(OBJECTS), None, tmp_path / "volume")
    root = root_of(tmp_path / "volume")
    network[root] = (tmp_path / "volume").read_bytes()
    whole = Network.get
    seen: list[Path] = []

    def get(self: Network, root: bytes, path: Path) -> None:
        seen.append(path)
        whole(self, root, path)

    monkeypatch.setattr(Network, "get", get)
    assert say("restore", root.hex(), tmp_path / "again", "--indexer", "i")[0] == 0
    assert tmp_path / ".again.dilocox-part" in seen[0].parents, "which the next call clears, should this one be killed"
    assert objects_in(tmp_path / "again") == OBJECTS


def test_what_others_say_of_an_error_reaches_no_terminal_as_control(
    say: Say, network: dict[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def get(self: Network, root: bytes, path: Path) -> None:
        raise RemoteError(wire.REASON_UNAVAILABLE, "0G Storage: \x1b]0;title\x07\x1b[2J")

    monkeypatch.setattr(Network, "get", get)
    code, said = say("restore", "ab" * 32, tmp_path / "again", "--indexer", "i")
    assert code != 0
    assert "0G Storage" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("lie", [{"root": None, "objects": ["a"]}, {"root": "ab" * 32, "objects": []}])
def test_a_record_whose_objects_lie_in_no_volume_is_refused(
    lie: dict[str, object],
    say: Say,
    network: dict[bytes, bytes],
    archive: FolderStorage,
    tmp_path: Path,
):
    archive.put("archive.json", MARKER)
    (tmp_path / "record").write_text(json.dumps({"format": "dilocox-stored-1", "run": "ab" * 32, **lie}))
    asking = ("store", tmp_path / "archive", "--record", tmp_path / "record", "--indexer", "i", "--rpc", "r", "--key", "k")
    code, said = say(*asking, "--send")
    assert code == 2
    assert "not a record of what was stored" in said
    assert not network


def test_a_record_of_another_run_is_refused(say: Say, network: dict[bytes, bytes], archive: FolderStorage, tmp_path: Path):
    archive.put("archive.json", MARKER)
    asking = (
        "store",
        tmp_path / "archive",
        "--record",
        tmp_path / "record",
        "--indexer",
        "i",
        "--rpc",
        "r",
        "--key",
        "k",
        "--send",
    )
    (tmp_path / "record").write_text(json.dumps({"format": "dilocox-stored-1", "run": "cd" * 32, "root": None, "objects": []}))
    code, said = say(*asking)
    assert code == 2
    assert "belongs to the run cdcd" in said
    (tmp_path / "record").write_text("nonsense")
    assert "not a record of what was stored" in say(*asking)[1]
    assert not network


def test_without_the_sdk_the_verbs_say_what_to_install(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zerog, "find_spec", lambda name: None)
    code, said = say("restore", "ab" * 32, tmp_path / "x", "--indexer", "i")
    assert code == 2
    assert "plugins/zerog" in said


def test_a_folder_is_whole_or_not_there(tmp_path: Path):
    def half() -> None:
        with whole_folder(tmp_path / "deep" / "target") as scratch:
            (scratch / "half").write_text("half")
            raise LocalError("it broke")

    with pytest.raises(LocalError):
        half()
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "deep" / "target") as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "file").write_text("whole")
        assert not (tmp_path / "deep" / "target").exists()
    assert objects_in(tmp_path / "deep") == {"target/sub/file": b"whole"}
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "deep" / "target"):
        pass


def test_a_folder_that_another_writes_is_left_to_it_and_one_of_a_crash_is_written_anew(tmp_path: Path):
    ours = tmp_path / ".target.part"  # a file of the operator
    ours.mkdir()
    crashed = tmp_path / ".target.dilocox-part"
    (crashed / "sub").mkdir(parents=True)
    (crashed / "sub" / "half").write_text("half")
    with whole_folder(tmp_path / "target") as scratch:
        (scratch / "file").write_text("whole")
        with pytest.raises(FileExistsError, match="another process writes"), whole_folder(tmp_path / "target"):
            pass
        assert objects_in(scratch) == {"file": b"whole"}
    assert objects_in(tmp_path / "target") == {"file": b"whole"}
    assert ours.is_dir()
    assert not crashed.exists()


def test_where_a_link_leads_nothing_is_cleared(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    (tmp_path / ".target.dilocox-part").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError), whole_folder(tmp_path / "target"):  # noqa: PT011
        pass
    assert objects_in(tmp_path / "theirs") == {"file": b"theirs"}


SDK = """
import os, time
from pathlib import Path
class AbstractFile: pass
class ZgFile: pass
class Indexer:
    def __init__(self, url): pass
    def download(self, root, path, proof):
        Path(path).write_text(str(os.getpid()))
        time.sleep(3600)
"""


def test_the_sdk_s_process_ends_with_ours_however_that_ends(tmp_path: Path):
    (tmp_path / "core").mkdir()
    for name in ("__init__", "file", "indexer"):
        (tmp_path / "core" / f"{name}.py").write_text(SDK)
    got = tmp_path / "got"
    asking = f"Network('i').get(bytes(32), Path({str(got)!r}))"
    code = f"from pathlib import Path; from dilocox_zerog.network import Network; {asking}"
    ours = subprocess.Popen([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        while not got.exists() or not got.read_text():
            assert ours.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int(got.read_text()))
    finally:
        ours.kill()
        ours.wait()
    child.wait(60)


# Data availability


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DisperserStandIn, str]]:
    """Run the stand-in on a separate loop, as if it were on another machine."""
    monkeypatch.setattr(zerog, "LOOK_SECONDS", 0.0)
    double, loop, urls = DisperserStandIn(), asyncio.new_event_loop(), list[str]()
    up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with disperser(double) as url:
            urls.append(url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    up.wait()
    yield double, urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def chain_in(home: Path, table: Table) -> None:
    folder = home / "runs" / RUN.run_id.hex()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with closing(ChainFile(folder / "chain.db", RUN)) as kept:
        kept.keep_signed_manifest(SIGNED)
        for commit in table.commits[kept.length :]:
            kept.write(initial_head(COORDINATOR.peer, RUN.model.root), commit)


def test_a_chain_is_dispersed_as_it_grows_and_comes_back_verified(say: Say, standin: StandIn, tmp_path: Path):
    double, url = standin
    table = Table(RUN).genesis().train(70)
    chain_in(tmp_path / "node", table)
    asking = ("disperse", "--record", tmp_path / "record", "--da", url, "--home", tmp_path / "node")
    code, said = say(*asking)
    assert code == 0, said
    assert "nothing was sent" in said
    assert not double.blobs
    code, said = say(*asking, "--send")
    assert code == 0, said
    assert len(double.blobs) == 2, "64 commits in one"
    assert "0 commits" in say(*asking, "--send")[1]
    table.train(3)
    chain_in(tmp_path / "node", table)
    assert say(*asking, "--send")[0] == 0
    assert len(double.blobs) == 3
    code, said = say("retrieve", tmp_path / "record", "--da", url, "--home", tmp_path / "other")
    assert code == 0, said
    path = tmp_path / "other" / "runs" / RUN.run_id.hex()[:16] / "chain.db"
    with ChainFile.for_reading(path) as found:
        assert [commit.digest for commit in found.verify()] == [commit.digest for commit in table.commits]
    assert say("retrieve", tmp_path / "record", "--da", url, "--home", tmp_path / "other")[0] == 0, "it is all there"


def test_what_a_disperser_gives_back_is_what_was_dispersed_or_refused(say: Say, standin: StandIn, tmp_path: Path):
    double, url = standin
    chain_in(tmp_path / "node", Table(RUN).genesis().train(2))
    assert say("disperse", "--record", tmp_path / "record", "--da", url, "--home", tmp_path / "node", "--send")[0] == 0
    [root] = double.blobs
    double.blobs[root] += b"more"
    code, said = say("retrieve", tmp_path / "record", "--da", url, "--home", tmp_path / "other")
    assert code != 0
    assert "were dispersed" in said
    double.blobs.clear()
    code, said = say("retrieve", tmp_path / "record", "--da", url, "--home", tmp_path / "other")
    assert code != 0
    assert "not_found" in said


@pytest.mark.parametrize(("status", "why"), [(pb.FAILED, "it failed"), (pb.INSUFFICIENT_SIGNATURES, "too few nodes signed")])
def test_a_blob_that_is_given_up_is_not_recorded(
    status: pb.BlobStatus,
    why: str,
    say: Say,
    standin: StandIn,
    tmp_path: Path,
):
    double, url = standin
    double.becomes = [pb.PROCESSING, status]
    chain_in(tmp_path / "node", Table(RUN).genesis().train(2))
    asking = ("disperse", "--record", tmp_path / "record", "--da", url, "--home", tmp_path / "node", "--send")
    code, said = say(*asking)
    assert code != 0
    assert why in said
    assert not (tmp_path / "record").exists()
    double.becomes = [pb.FINALIZED]
    assert say(*asking)[0] == 0


def test_one_that_is_never_final_is_given_up(say: Say, standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    double, url = standin
    double.becomes = [pb.CONFIRMED]
    monkeypatch.setattr(zerog, "FINAL_SECONDS", 0)
    chain_in(tmp_path / "node", Table(RUN).genesis().train(2))
    code, said = say("disperse", "--record", tmp_path / "record", "--da", url, "--home", tmp_path / "node", "--send")
    assert code != 0
    assert "not final" in said


def test_commits_that_the_owner_gave_up_are_dispersed_anew(say: Say, standin: StandIn, tmp_path: Path):
    double, url = standin
    chain_in(tmp_path / "node", Table(RUN).genesis().train(2))
    record = tmp_path / "record"
    assert say("disperse", "--record", record, "--da", url, "--home", tmp_path / "node", "--send")[0] == 0
    chain_in(tmp_path / "fork", Table(RUN).genesis().train(1))
    said = json.loads(record.read_text())
    said["batches"][0]["last"] = "ab" * 32
    record.write_text(json.dumps(said))
    assert say("disperse", "--record", record, "--da", url, "--home", tmp_path / "fork", "--send")[0] == 0
    assert len(double.blobs) == 2
    assert [batch["count"] for batch in json.loads(record.read_text())["batches"]] == [2]


@pytest.mark.parametrize("url", ["http://h:1", "grpc://", "h:1", "grpcs://h:1/path"])
def test_what_is_no_disperser_s_url_is_refused(url: str, say: Say, tmp_path: Path):
    chain_in(tmp_path / "node", Table(RUN).genesis().train(1))
    code, said = say("disperse", "--record", tmp_path / "record", "--da", url, "--home", tmp_path / "node", "--send")
    assert code == 2
    assert "grpcs://HOST:PORT" in said


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "{}",
        json.dumps(
            {
                "format": "dilocox-dispersed-1",
                "run": "ab" * 32,
                "batches": [
                    {"first": 1, "count": 1, "last": "0" * 64, "sha256": "0" * 64, "root": "0" * 64, "epoch": 0, "quorum": 0}
                ],
            }
        ),
        json.dumps({"format": "dilocox-dispersed-1", "run": "ab" * 32, "batches": []}),
    ],
)
def test_what_is_no_record_is_refused(text: str, say: Say, tmp_path: Path):
    (tmp_path / "record").write_text(text)
    assert say("retrieve", tmp_path / "record", "--da", "grpc://127.0.0.1:1", "--home", tmp_path / "other")[0] == 2
