"""Tests of 0G's SDK, in its process, against a stand-in of its network."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

for needed in ("Crypto", "eth_account"):
    pytest.importorskip(needed, reason="pip install ./plugins/zerog")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("core") is None, reason="pip install ./plugins/zerog"),
]

from zerog_standin import PRICE, storage

from dilocox.protocol.errors import RemoteError
from dilocox_settlement.keys import make_key
from dilocox_zerog.network import Network, root_of


def say(*words: object) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("dilocox"), "zerog", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_archive_goes_through_the_sdk_and_comes_back(tmp_path: Path):
    make_key(tmp_path / "key")
    there = tmp_path / "archive"
    objects = {"heads/000000000001": b"head", "blobs/ab/index": b"index", "blobs/ab/000000": bytes(range(256)) * 3000}
    objects["archive.json"] = json.dumps({"format": "dilocox-archive-1", "run": "ab" * 32, "check": ""}).encode()
    for name, data in objects.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(data)
    with storage() as network:
        place = ["--indexer", network.url]
        said = say(
            "store",
            there,
            "--record",
            tmp_path / "record",
            *place,
            "--rpc",
            network.url,
            "--key",
            tmp_path / "key",
            "--send",
        )
        [file] = network.files
        assert file.paid == PRICE * file.sectors
        assert file.root[2:] in said
        say("restore", file.root, tmp_path / "again", *place)
        found = {
            p.relative_to(tmp_path / "again").as_posix(): p.read_bytes() for p in (tmp_path / "again").rglob("*") if p.is_file()
        }
        assert found == objects


def test_a_network_that_loses_or_lies_is_found_out(tmp_path: Path):
    make_key(tmp_path / "key")
    path = tmp_path / "file"
    path.write_bytes(b"some bytes" * 1000)
    with storage() as standin:
        network, root = Network(standin.url), root_of(path)
        assert network.put(path, root, standin.url, tmp_path / "key").startswith("0x")
        assert network.put(path, root, standin.url, tmp_path / "key") == "", "it is there, and not paid for twice"
        assert len(standin.files) == 1
        network.get(root, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
        standin.lies = True
        with pytest.raises(RemoteError, match="root"):
            network.get(root, tmp_path / "lied")
        assert not (tmp_path / "lied").exists()
        with pytest.raises(RemoteError, match="not found"):
            network.get(bytes(32), tmp_path / "none")
