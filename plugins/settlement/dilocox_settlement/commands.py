"""`dilocox settlement account | stake | settle | claim | contract`: pay for a run's work on its chain. Nothing is sent without
--send."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilocox.cli.common import HomeOption, ReadOption, console
from dilocox.cli.progress import Working, working
from dilocox.cli.sources import reading
from dilocox.node.exchange.forks import check_forks
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.ids import parse_account
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.chain_file import ChainFile

if TYPE_CHECKING:
    from eth_account.signers.local import LocalAccount

    from dilocox_settlement.contract import Contract, Prepared
    from dilocox_settlement.rpc import Rpc

__all__ = ["KeyOption", "Ran", "RpcOption", "SendOption", "act", "act_on", "app", "read_run"]

app = typer.Typer(help="Pay for a run's work on an EVM chain.", no_args_is_help=True)

RECEIPT_SECONDS = 600
"""After which a transaction is left to the chain: it may still be taken."""
LOOK_SECONDS = 1.0
ETHER = 10**18

KeyOption = Annotated[Path, typer.Option("--key", metavar="FILE", help="The account's key, readable by this user only.")]
RpcOption = Annotated[str, typer.Option("--rpc", metavar="URL", help="JSON-RPC URL of a node of the chain.")]
SendOption = Annotated[
    bool, typer.Option("--send", help="Send the transaction; without this it is only printed, with its cost.")
]


@dataclass(frozen=True)
class Ran:
    """A run that settles, read and verified."""

    manifest: Manifest
    commits: list[Statement[pb.Commit]]

    def contract(self, url: str, bound: bool = True) -> "Contract":
        """Return the contract. Raises LocalError if it is bound to another run, or to any run before it should be."""
        from dilocox_settlement.contract import Contract
        from dilocox_settlement.rpc import HttpRpc

        assert self.manifest.settlement is not None
        found = Contract(HttpRpc(url), self.manifest.settlement.contract, self.manifest.settlement.chain_id)
        if (run := found.read("run")) != (self.manifest.run_id if bound else bytes(32)):
            which = (
                f"the run {run.hex()}" if any(run) else "no run yet: its sponsor must run `dilocox settlement contract bind`"
            )
            raise LocalError(f"the contract {found.address} settles {which}")
        return found


def read_run(home: Path | None, join: str | None) -> Ran:
    """Return the only run that settles. Raises ConfigError if there is not exactly one; RemoteError if its chain is
    invalid."""

    async def nothing(_: Any) -> int:
        return 0

    with reading(join, home, None, nothing) as (chains, _), working("checking the chain") as bar:
        found = [ran for path in chains if (ran := _settling(path, bar)) is not None]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} runs with settlement on this disk: pass --join LINK, or the --home of its daemon")
    return found[0]


def _settling(path: Path, bar: Working) -> Ran | None:
    with ChainFile.for_reading(path) as chain:
        if chain.manifest.settlement is None:
            return None
        check_forks(chain)
        return Ran(chain.manifest, list(bar.each("checking the commits", chain.verify(), chain.length)))


def act_on(contract: "Contract", key: Path, send: bool, says: str, name: str, *arguments: Any, value: int = 0) -> None:
    from dilocox_settlement.keys import read_key

    signer = read_key(key)
    act(contract.rpc, signer, send, says, contract.prepare(signer.address, name, *arguments, value=value))


def act(rpc: "Rpc", signer: "LocalAccount", send: bool, says: str, prepared: "Prepared") -> dict[str, Any] | None:
    """Print the transaction, and with `send` send it; return its receipt."""
    from dilocox_settlement import contract as contracts

    gas, cost = prepared.transaction["gas"], prepared.largest_cost / ETHER
    console.print(f"{says}\nby {signer.address}: at most {gas:,} gas, {cost:.6g} of the chain's coin", highlight=False)
    if not send:
        console.print("nothing was sent; use --send to send it", highlight=False)
        return None
    digest = contracts.send(rpc, signer, prepared)
    console.print(f"sent {digest}", highlight=False, soft_wrap=True)
    receipt = contracts.receipt(rpc, digest, _patience(digest))
    console.print(f"in block {int(receipt['blockNumber'], 16)}: {int(receipt['gasUsed'], 16):,} gas", highlight=False)
    return receipt


def _patience(digest: str) -> Callable[[], None]:
    until = time.monotonic() + RECEIPT_SECONDS

    def wait() -> None:
        if time.monotonic() > until:
            raise LocalError(f"{digest} is in no block after {RECEIPT_SECONDS} s: search for it before you send another")
        time.sleep(LOOK_SECONDS)

    return wait


@app.command()
def account(key: KeyOption) -> None:
    """Print the account of a key, and make the key if the file does not exist."""
    from dilocox_settlement.keys import make_key, read_key

    made = read_key(key) if key.exists() else make_key(key)
    console.print(made.address, highlight=False)


@app.command()
def settle(rpc: RpcOption, key: KeyOption, home: HomeOption = None, join: ReadOption = None, send: SendOption = False) -> None:
    """Post the newest commit's merit to the run's contract, with the coordinator's account."""
    from dilocox_settlement.due import posted

    ran = read_run(home, join)
    if not ran.commits:
        raise ConfigError("the run has no commit yet: nothing to settle")
    said = posted(ran.commits[-1])
    says = f"settle round {said.round}, {said.total:,} merit, root {said.root.hex()}" + ", the run's last" * said.last
    act_on(ran.contract(rpc), key, send, says, "settle", *said)


@app.command()
def claim(
    rpc: RpcOption,
    key: KeyOption,
    whose: Annotated[
        str | None, typer.Argument(metavar="[ACCOUNT]", help="Account to pay (default: the key's account).")
    ] = None,
    home: HomeOption = None,
    join: ReadOption = None,
    send: SendOption = False,
) -> None:
    """Pay an account for its merit, less earlier payments. Any key may send it, and pays the gas."""
    from dilocox_settlement.due import claim_of
    from dilocox_settlement.keys import read_key

    paid = parse_account(whose or read_key(key).address)
    ran = read_run(home, join)
    contract = ran.contract(rpc)
    root = contract.current()
    if not root.posted:
        raise LocalError("nothing is settled yet: the coordinator must post a root, which is valid after its window")
    commit = next((each for each in ran.commits if each.digest == root.digest), None)
    if commit is None or commit.body.merit_root != root.root:
        raise LocalError(f"the contract's root of round {root.round} differs from this chain: report it to the arbiter")
    try:
        due = claim_of(commit.body, paid)
    except KeyError:
        raise LocalError(f"0x{paid.hex()} earned nothing up to round {root.round}") from None
    act_on(contract, key, send, f"claim for {due.account}: {due.merit:,} merit up to round {root.round}", "claim", *due)


@app.command()
def stake(
    rpc: RpcOption,
    key: KeyOption,
    amount: Annotated[int, typer.Argument(min=0, help="Amount in the chain's smallest unit (wei).")] = 0,
    leave: Annotated[
        bool, typer.Option("--leave", help="Begin to withdraw: the stake can leave after the contract's delay.")
    ] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw, after the delay.")] = False,
    home: HomeOption = None,
    join: ReadOption = None,
    send: SendOption = False,
) -> None:
    """Stake on the run's contract. Accounts below the least stake are not paid. An account that signs two statements for one
    slot loses its stake."""
    if (amount > 0) + leave + withdraw != 1:
        raise ConfigError("pass one of: AMOUNT, --leave, --withdraw")
    contract = read_run(home, join).contract(rpc)
    if amount:
        says = (
            f"stake {amount / ETHER:.6g} of the chain's coin, which can be withdrawn {contract.read('DELAY'):,} s after --leave"
        )
        act_on(contract, key, send, says, "stake", value=amount)
    elif leave:
        act_on(contract, key, send, "begin to withdraw the stake", "unstake")
    else:
        act_on(contract, key, send, "withdraw the stake", "withdraw")
