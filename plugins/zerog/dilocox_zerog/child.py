"""The process in which 0G's SDK runs: a task on stdin, an answer on stdout, all that it prints on stderr. Nothing imports this."""

import json
import sys
from pathlib import Path
from typing import Any

from core.file import AbstractFile, ZgFile
from core.indexer import Indexer

from dilocox.transport.process.parent_pipe import exit_with_parent
from dilocox_settlement.keys import read_key
from dilocox_zerog.merkle import segment_root

__all__ = ["main"]

UPLOAD = {"tags": b"\x00", "finalityRequired": True, "taskSize": 10, "expectedReplica": 1, "skipTx": True, "fee": 0}
"""Options of an upload. `skipTx`: an object that is stored already is not paid for again."""


def _segment_root(segment: bytes, empty_chunks_padded: int = 0) -> str:
    """Return the SDK's root of a whole segment, twice as fast."""
    assert not empty_chunks_padded, "only present for its old callers"
    return f"0x{segment_root(segment).hex()}"


def put(task: dict[str, Any]) -> dict[str, Any]:
    account, indexer = read_key(Path(task["key"])), Indexer(task["indexer"])
    said, error = indexer.upload(ZgFile.from_file_path(task["path"]), task["rpc"], account, {**UPLOAD, "account": account})
    if error is not None:
        return {"error": str(error)}
    if said["rootHash"] != task["root"]:
        return {"error": f"the SDK stored {said['rootHash']}, which is not the root of the file"}
    nodes, error = indexer.select_nodes(1)
    if error is not None:
        return {"error": str(error)}
    found = [info for node in nodes if (info := node.get_file_info(task["root"], True)) is not None]
    if not any(info.get("finalized") for info in found):
        return {"error": "no storage node reports the file: run the command again, stored parts are not paid again"}
    return {"transaction": said["txHash"]}


def get(task: dict[str, Any]) -> dict[str, Any]:
    error = Indexer(task["indexer"]).download(task["root"], task["path"], True)
    return {"error": str(error)} if error is not None else {}


def main() -> None:
    exit_with_parent()
    answer, sys.stdout = sys.stdout, sys.stderr
    AbstractFile.segment_root = staticmethod(_segment_root)
    task = json.load(sys.stdin)
    try:
        said = {"put": put, "get": get}[task["do"]](task)
    except Exception as error:  # any exception of a foreign library
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), file=answer)


if __name__ == "__main__":
    main()
