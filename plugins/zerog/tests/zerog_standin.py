"""Stand-ins for 0G's networks. One is a disperser with its published interface. The other is one storage node with its
indexer and a chain with one contract, which answer the calls of 0G's SDK. They are not 0G: they store everything in
memory, and accept any payment."""

import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc.aio

from dilocox.protocol.crypto import sha256
from dilocox_zerog.pb import disperser_pb2 as pb
from dilocox_zerog.pb import disperser_pb2_grpc as rpc

__all__ = ["DisperserStandIn", "StorageStandIn", "disperser", "storage"]


class DisperserStandIn(rpc.DisperserServicer):
    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        """Blobs by their root in this stand-in."""
        self.becomes = [pb.PROCESSING, pb.CONFIRMED, pb.FINALIZED]
        """States of every blob, request by request; the last one stays."""
        self._looks: dict[bytes, int] = {}

    async def DisperseBlob(self, request: pb.DisperseBlobRequest, context: Any) -> pb.DisperseBlobReply:
        root = sha256(b"stand-in", request.data)
        self.blobs[root], self._looks[root] = request.data, 0
        return pb.DisperseBlobReply(result=pb.PROCESSING, request_id=root)

    async def GetBlobStatus(self, request: pb.BlobStatusRequest, context: Any) -> pb.BlobStatusReply:
        root = request.request_id
        status = self.becomes[min(self._looks[root], len(self.becomes) - 1)]
        self._looks[root] += 1
        header = pb.BlobHeader(storage_root=root, epoch=7, quorum_id=1) if status == pb.FINALIZED else pb.BlobHeader()
        return pb.BlobStatusReply(status=status, info=pb.BlobInfo(blob_header=header))

    async def RetrieveBlob(self, request: pb.RetrieveBlobRequest, context: Any) -> pb.RetrieveBlobReply:
        if (request.epoch, request.quorum_id) != (7, 1) or request.storage_root not in self.blobs:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such blob")
        return pb.RetrieveBlobReply(data=self.blobs[request.storage_root])


@asynccontextmanager
async def disperser(standin: DisperserStandIn) -> AsyncIterator[str]:
    """Run the stand-in; yield its URL."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26)])
    rpc.add_DisperserServicer_to_server(standin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(None)


FLOW, MARKET = "0x" + "11" * 20, "0x" + "22" * 20
SUBMISSION = "((uint256,bytes,(bytes32,uint256)[]),address)"
DATA = "(uint256,bytes,(bytes32,uint256)[])"
SUBMIT_EVENT = f"Submit(address,bytes32,uint256,uint256,uint256,{DATA})"
PRICE = 3
"""Price of a sector."""
CHUNK, SEGMENT = 256, 1024


@dataclass
class File:
    """File that a client paid for."""

    size: int
    first: int
    """Number of its first chunk in the whole flow."""
    paid: int
    sectors: int
    segments: dict[int, bytes] = field(default_factory=dict)
    root: str = ""
    """Root, when all of it is present and matches the announced root."""


class StorageStandIn(ThreadingHTTPServer):
    """Node, indexer and chain at one address."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: list[File] = []
        self.receipts: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        self.loses = False
        """True: it accepts segments, and stores none."""
        self.lies = False
        """True: it serves false data."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    # The indexer

    def indexer_getShardedNodes(self) -> dict[str, Any]:
        shard = {"numShard": 1, "shardId": 0}
        return {"trusted": [{"url": self.url, "config": shard, "latency": 1, "since": 0}], "discovered": []}

    def indexer_getFileLocations(self, root: str) -> list[dict[str, Any]] | None:
        return self.indexer_getShardedNodes()["trusted"]

    # The node

    def zgs_getStatus(self) -> dict[str, Any]:
        return {"logSyncHeight": 1, "networkIdentity": {"flowAddress": FLOW, "chainId": 1}}

    def zgs_getShardConfig(self) -> dict[str, int]:
        return {"numShard": 1, "shardId": 0}

    def _info(self, number: int) -> dict[str, Any]:
        file = self.files[number]
        return {
            "tx": {"seq": number, "size": file.size, "startEntryIndex": file.first},
            "finalized": bool(file.root),
            "uploadedSegNum": len(file.segments),
        }

    def zgs_getFileInfo(self, root: str, available: bool) -> dict[str, Any] | None:
        return next((self._info(number) for number, file in enumerate(self.files) if file.root == root), None)

    def zgs_getFileInfoByTxSeq(self, number: int) -> dict[str, Any] | None:
        return self._info(number) if number < len(self.files) else None

    def zgs_uploadSegmentsByTxSeq(self, segments: list[dict[str, Any]], number: int) -> int:
        from dilocox_zerog.merkle import file_root

        file = self.files[number]
        if self.loses:
            return 0
        for segment in segments:
            file.segments[segment["index"]] = base64.b64decode(segment["data"])
        whole = b"".join(data for _, data in sorted(file.segments.items()))[: file.size]
        if len(whole) == file.size and f"0x{file_root(io.BytesIO(whole), file.size).hex()}" == segments[0]["root"]:
            file.root = segments[0]["root"]
        return 0

    def zgs_downloadSegmentByTxSeq(self, number: int, start: int, stop: int) -> str:
        data = self.files[number].segments[start // SEGMENT]
        if self.lies:
            data = bytes(len(data))
        return base64.b64encode(data).decode()

    # The chain

    def eth_chainId(self) -> str:
        return "0x1"

    def eth_gasPrice(self) -> str:
        return "0x1"

    def eth_getTransactionCount(self, address: str, block: str) -> str:
        return hex(len(self.receipts))

    def eth_estimateGas(self, *call: Any) -> str:
        return hex(500_000)

    def eth_call(self, call: dict[str, str], *block: Any) -> str:
        return "0x" + (MARKET[2:].rjust(64, "0") if call["to"].lower() == FLOW else hex(PRICE)[2:].rjust(64, "0"))

    def eth_sendRawTransaction(self, raw: str) -> str:
        import rlp
        from eth_abi import decode, encode
        from eth_account import Account
        from eth_utils import keccak

        _, _, _, to, value, data, *_ = rlp.decode(bytes.fromhex(raw[2:]))
        assert f"0x{to.hex()}" == FLOW
        (submission,) = decode([SUBMISSION], data[4:])
        (size, tags, nodes), _ = submission
        with self.lock:
            number, first = len(self.files), SEGMENT * sum(-(-file.size // (CHUNK * SEGMENT)) for file in self.files)
            self.files.append(File(size, first, int.from_bytes(value, "big"), sum(1 << height for _, height in nodes)))
        sender, digest = Account.recover_transaction(raw), "0x" + keccak(hexstr=raw).hex()
        said = encode(["uint256", "uint256", "uint256", DATA], [number, first, size, (size, tags, nodes)])
        topics = ["0x" + keccak(text=SUBMIT_EVENT).hex(), "0x" + sender[2:].lower().rjust(64, "0"), "0x" + "00" * 32]
        where = {"blockHash": "0x" + "01" * 32, "blockNumber": "0x1", "transactionHash": digest, "transactionIndex": "0x0"}
        self.receipts[digest] = {
            **where,
            "status": "0x1",
            "gasUsed": "0x1",
            "cumulativeGasUsed": "0x1",
            "from": sender,
            "to": FLOW,
            "contractAddress": None,
            "logsBloom": "0x" + "00" * 256,
            "logs": [
                {**where, "address": FLOW, "topics": topics, "data": "0x" + said.hex(), "logIndex": "0x0", "removed": False}
            ],
        }
        return digest

    def eth_getTransactionReceipt(self, digest: str) -> dict[str, Any] | None:
        return self.receipts.get(digest)


class _Handler(BaseHTTPRequestHandler):
    server: StorageStandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
        try:
            said["result"] = getattr(self.server, asked["method"])(*asked.get("params", []))
        except Exception as error:
            said["error"] = {"code": -32000, "message": f"{type(error).__name__}: {error}"}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def storage() -> Iterator[StorageStandIn]:
    with StorageStandIn() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
