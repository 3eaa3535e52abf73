"""Calls of the contract in settlement.vy."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from eth_abi import decode, encode
from eth_abi.exceptions import DecodingError
from eth_account.signers.local import LocalAccount
from eth_utils import keccak, to_checksum_address

from dilocox.protocol.errors import LocalError
from dilocox_settlement.rpc import Rpc

__all__ = ["Contract", "Prepared", "Root", "artifact", "deployment", "prepare", "receipt", "send"]

SPARE_GAS = 5
"""A transaction may use a fifth more than it was estimated at: the chain moves between the two."""


@cache
def artifact() -> dict[str, Any]:
    """Return ABI and bytecode, as `python -m dilocox_settlement.compile` wrote them."""
    return json.loads(files("dilocox_settlement").joinpath("settlement.json").read_text())


class Root(NamedTuple):
    """The contract's struct."""

    root: bytes
    total: int
    round: int
    digest: bytes
    posted: int
    """Seconds since 1970; 0: there is none."""
    last: bool


@dataclass(frozen=True)
class Prepared:
    """Transaction that the chain reports as acceptable."""

    transaction: dict[str, Any]

    @property
    def largest_cost(self) -> int:
        """Return the wei of gas, beside the amount that it sends."""
        return self.transaction["gas"] * self.transaction["gasPrice"]


@dataclass(frozen=True)
class Contract:
    rpc: Rpc
    address: str
    chain_id: int

    def read(self, name: str, *arguments: Any) -> Any:
        """Return a view's result: a value, or for several a tuple. Raises LocalError."""
        data = call_data(name, *arguments)
        raw = self.rpc("eth_call", [{"to": to_checksum_address(self.address), "data": data}, "latest"])
        try:
            found = decode([_type(output) for output in _entry(name)["outputs"]], bytes.fromhex(str(raw)[2:]))
        except (DecodingError, ValueError) as error:
            raise LocalError(f"{self.address} is not a settlement contract: it does not answer {name}") from error
        return found[0] if len(found) == 1 else found

    def current(self) -> Root:
        """Return the root that claims are proved against."""
        return Root(*self.read("current"))

    def prepare(self, sender: str, name: str, *arguments: Any, value: int = 0) -> Prepared:
        """Prepare a transaction. Raises LocalError: with the contract's reason if it would reject it, and for another
        chain."""
        return prepare(self.rpc, self.chain_id, sender, call_data(name, *arguments), value, to=self.address)

    def pending(self) -> Root:
        """Return the last posted root, until a veto, or until a call after its window."""
        return Root(*self.read("pending"))


def send(rpc: Rpc, key: LocalAccount, prepared: Prepared) -> str:
    """Send a transaction; return its hash when the node accepted it."""
    return rpc("eth_sendRawTransaction", ["0x" + key.sign_transaction(prepared.transaction).raw_transaction.hex()])


def receipt(rpc: Rpc, digest: str, wait: Callable[[], None]) -> dict[str, Any]:
    """Return the receipt when it is in a block. `wait`: called between two checks; it raises to end them. Raises
    LocalError for a failed transaction."""
    while (found := rpc("eth_getTransactionReceipt", [digest])) is None:
        wait()
    if not int(found["status"], 16):
        raise LocalError(f"the contract refused {digest}: another transaction came first; run this again without --send")
    return found


def prepare(rpc: Rpc, chain_id: int, sender: str, data: str, value: int, to: str | None) -> Prepared:
    told = int(rpc("eth_chainId", []), 16)
    if told != chain_id:
        raise LocalError(f"--rpc is a node of chain {told}, but the run settles on chain {chain_id}")
    call = {"from": sender, "data": data, "value": hex(value), **({"to": to_checksum_address(to)} if to else {})}
    gas = int(rpc("eth_estimateGas", [call]), 16)
    return Prepared(
        {
            "chainId": chain_id,
            "nonce": int(rpc("eth_getTransactionCount", [sender, "pending"]), 16),
            "gas": gas + gas // SPARE_GAS,
            "gasPrice": int(rpc("eth_gasPrice", []), 16),
            "value": value,
            "data": data,
            **({"to": to_checksum_address(to)} if to else {}),
        }
    )


def deployment(*arguments: Any) -> str:
    """Return the data of the transaction that creates a contract, whose address its receipt has; arguments as in the
    source."""
    makes = next(entry for entry in artifact()["abi"] if entry["type"] == "constructor")
    return artifact()["bytecode"] + encode([_type(each) for each in makes["inputs"]], arguments).hex()


def call_data(name: str, *arguments: Any) -> str:
    types = [_type(each) for each in _entry(name)["inputs"]]
    return "0x" + (keccak(text=f"{name}({','.join(types)})")[:4] + encode(types, arguments)).hex()


def _entry(name: str) -> dict[str, Any]:
    return next(entry for entry in artifact()["abi"] if entry["type"] == "function" and entry["name"] == name)


def _type(field: dict[str, Any]) -> str:
    """Return the type as in signatures: for a struct the types of its fields."""
    if not field["type"].startswith("tuple"):
        return field["type"]
    return f"({','.join(_type(each) for each in field['components'])}){field['type'][5:]}"
