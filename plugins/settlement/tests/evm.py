"""EVM in this process with the interface of a chain's node: the contract's own code runs."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from eth_account import Account
from eth_account.signers.local import LocalAccount
from eth_tester import EthereumTester, PyEVMBackend
from eth_tester.exceptions import TransactionFailed, TransactionNotFound

from dilocox.protocol.errors import LocalError
from dilocox_settlement.contract import Contract, deployment, prepare, receipt, send

GAS_PRICE = 10**10
ETHER = 10**18


class EvmRpc:
    def __init__(self) -> None:
        self.tester = EthereumTester(backend=PyEVMBackend())
        self.chain_id: int = self.tester.backend.chain.chain_id

    @property
    def now(self) -> int:
        return self.tester.get_block_by_number("latest")["timestamp"]

    def travel(self, seconds: int) -> None:
        self.tester.time_travel(self.now + seconds)
        self.tester.mine_block()  # what is read is read at the newest block

    def account(self, number: int) -> LocalAccount:
        """Return an account with a hundred ether."""
        key = Account.from_key((1000 + number).to_bytes(32, "big"))
        if not self.tester.get_balance(key.address):
            rich = self.tester.get_accounts()[0]
            self.tester.send_transaction({"from": rich, "to": key.address, "value": 100 * ETHER, "gas": 21_000})
        return key

    def balance(self, address: str) -> int:
        return self.tester.get_balance(address)

    def __call__(self, method: str, parameters: Sequence[Any]) -> Any:
        try:
            return getattr(self, method)(*parameters)
        except TransactionFailed as error:
            raise LocalError(f"the chain's node refuses {method}: {error}") from error

    def eth_chainId(self) -> str:
        return hex(self.chain_id)

    def eth_gasPrice(self) -> str:
        return hex(GAS_PRICE)

    def eth_getTransactionCount(self, address: str, _block: str) -> str:
        return hex(self.tester.get_nonce(address))

    def eth_estimateGas(self, call: dict[str, Any]) -> str:
        return hex(self.tester.estimate_gas({**call, "value": int(call["value"], 16)}))

    def eth_call(self, call: dict[str, Any], _block: str) -> str:
        return self.tester.call({"from": self.tester.get_accounts()[0], **call})

    def eth_sendRawTransaction(self, raw: str) -> str:
        return self.tester.send_raw_transaction(raw)

    def eth_getTransactionReceipt(self, digest: str) -> dict[str, Any] | None:
        try:
            found = self.tester.get_transaction_receipt(digest)
        except TransactionNotFound:
            return None
        return {
            "status": hex(found["status"]),
            "gasUsed": hex(found["gas_used"]),
            "blockNumber": hex(found["block_number"]),
            "contractAddress": found["contract_address"],
        }


@contextmanager
def served(rpc: EvmRpc) -> Iterator[str]:
    """Yield the URL at which this EVM answers as a node of a chain does: JSON-RPC over HTTP, one request at a time."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
            try:
                answer["result"] = rpc(asked["method"], asked["params"])
            except LocalError as error:
                answer["error"] = {"code": 3, "message": str(error.__cause__ or error)}
            raw = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: object) -> None: ...

    server = TCPServer(("127.0.0.1", 0), Handler)  # http.server's class would first resolve its name
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def at_once() -> None:
    raise AssertionError("a transaction is in a block once it is sent")


def deploy(rpc: EvmRpc, sponsor: LocalAccount, *arguments: Any, value: int) -> Contract:
    prepared = prepare(rpc, rpc.chain_id, sponsor.address, deployment(*arguments), value, to=None)
    digest = rpc("eth_sendRawTransaction", ["0x" + sponsor.sign_transaction(prepared.transaction).raw_transaction.hex()])
    return Contract(rpc, rpc.eth_getTransactionReceipt(digest)["contractAddress"].lower(), rpc.chain_id)  # type: ignore[index]


def act(contract: Contract, key: LocalAccount, name: str, *arguments: Any, value: int = 0) -> int:
    """Call the contract; return the gas. Raises LocalError if the contract rejects it."""
    digest = send(contract.rpc, key, contract.prepare(key.address, name, *arguments, value=value))
    return int(receipt(contract.rpc, digest, at_once)["gasUsed"], 16)
