"""`dilocox settlement contract deploy | bind | fund | veto | slash | refund`: control the contract as its sponsor and its arbiter.

Nothing is sent without --send.
"""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dilocox.cli.common import HomeOption, ReadOption, console
from dilocox.protocol.errors import LocalError
from dilocox.protocol.ids import parse_account
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement
from dilocox_settlement.commands import KeyOption, RpcOption, SendOption, act, act_on, read_run

if TYPE_CHECKING:
    from dilocox_settlement.contract import Root

__all__ = ["app"]

app = typer.Typer(help="Commands for the sponsor and the arbiter of a run with settlement.", no_args_is_help=True)

DAY_SECONDS = 86_400


def _account(said: str) -> str:
    return "0x" + parse_account(said).hex()


@app.command()
def deploy(
    rpc: RpcOption,
    key: KeyOption,
    chain_id: Annotated[int, typer.Option("--chain-id", help="Id of the chain of --rpc.")],
    coordinator: Annotated[str, typer.Option("--coordinator", metavar="ACCOUNT", help="Account that posts roots.")],
    arbiter: Annotated[str, typer.Option("--arbiter", metavar="ACCOUNT", help="Account that vetoes roots and slashes stakes.")],
    price: Annotated[int, typer.Option("--price", min=0, help="Price of a million merit, in the chain's smallest unit (wei).")],
    least_stake: Annotated[int, typer.Option("--least-stake", min=0, help="Smallest stake of a paid account, in wei.")],
    pool: Annotated[int, typer.Option("--pool", min=0, help="Amount from which accounts are paid, in wei.")] = 0,
    window: Annotated[int, typer.Option("--window", min=1, help="Seconds in which a root can be vetoed.")] = DAY_SECONDS,
    delay: Annotated[int, typer.Option("--delay", min=1, help="Seconds until a stake can be withdrawn.")] = 7 * DAY_SECONDS,
    days: Annotated[int, typer.Option("--days", min=1, help="Days after which the sponsor can take the rest.")] = 180,
    send: SendOption = False,
) -> None:
    """Make the contract of a run, with the key's account as sponsor. Write its address into the run file, then use `bind`."""
    from dilocox_settlement.contract import deployment, prepare
    from dilocox_settlement.keys import read_key
    from dilocox_settlement.rpc import HttpRpc

    line, signer, closes = HttpRpc(rpc), read_key(key), int(time.time()) + days * DAY_SECONDS
    data = deployment(_account(coordinator), _account(arbiter), price, window, delay, least_stake, closes)
    says = f"make a contract with a pool of {pool:,} wei, {price:,} wei per million merit, that closes after {days} days"
    receipt = act(line, signer, send, says, prepare(line, chain_id, signer.address, data, pool, to=None))
    if receipt is not None:
        lines = ("[settlement]", f"chain_id = {chain_id}", f'contract = "{str(receipt["contractAddress"]).lower()}"')
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command()
def bind(rpc: RpcOption, key: KeyOption, home: HomeOption = None, join: ReadOption = None, send: SendOption = False) -> None:
    """Bind the contract, once, to the run that it settles. Only its sponsor may do it."""
    ran = read_run(home, join)
    says = f"bind it to the run {ran.manifest.run_id.hex()}"
    act_on(ran.contract(rpc, bound=False), key, send, says, "bind", ran.manifest.run_id)


@app.command()
def veto(rpc: RpcOption, key: KeyOption, home: HomeOption = None, join: ReadOption = None, send: SendOption = False) -> None:
    """Veto the last posted root, if it differs from this chain. Only the arbiter may do it, within the window."""
    ran = read_run(home, join)
    contract = ran.contract(rpc)
    root = contract.pending()
    if not root.posted:
        raise LocalError("no root waits for its window to end: nothing to veto")
    if _of_chain(root, ran.commits):
        raise LocalError(f"the root of round {root.round} matches this chain: nothing to veto")
    says = f"veto the root of round {root.round}, {root.total:,} merit: it differs from this chain"
    act_on(contract, key, send, says, "veto")


def _of_chain(root: "Root", commits: list[Statement[pb.Commit]]) -> bool:
    from dilocox_settlement.due import posted

    said = (root.root, root.total, root.round, root.digest, root.last)
    return any(posted(commit) == said for commit in commits if commit.body.round == root.round)


@app.command()
def slash(rpc: RpcOption, key: KeyOption, home: HomeOption = None, join: ReadOption = None, send: SendOption = False) -> None:
    """Burn the stakes of clusters that, as the chain proves, signed two statements for one slot. Only the arbiter may do it."""
    from dilocox_settlement.due import equivocations

    ran = read_run(home, join)
    contract, done = ran.contract(rpc), set[bytes]()
    for proof in equivocations(ran.commits):
        account = "0x" + proof.account.hex()
        if not proof.account or proof.account in done or contract.read("used", proof.digest):
            continue
        if contract.read("stakes", account):
            done.add(proof.account)
            says = f"burn the stake of {account}: it signed two statements in round {proof.round}"
            act_on(contract, key, send, says, "slash", account, proof.digest)
    if not done:
        raise LocalError("the chain has no unpunished proof against an account with a stake")


@app.command()
def fund(
    amount: Annotated[int, typer.Argument(min=1, help="Wei.")],
    rpc: RpcOption,
    key: KeyOption,
    home: HomeOption = None,
    join: ReadOption = None,
    send: SendOption = False,
) -> None:
    """Add to the pool from which the run pays. Any account may do it; the sponsor gets the rest at the end."""
    act_on(read_run(home, join).contract(rpc), key, send, f"add {amount:,} wei to the pool", "fund", value=amount)


@app.command()
def refund(rpc: RpcOption, key: KeyOption, home: HomeOption = None, join: ReadOption = None, send: SendOption = False) -> None:
    """Return the funds that no account can claim any more: after the run's last root was valid, or when the contract has
    closed."""
    act_on(read_run(home, join).contract(rpc), key, send, "take back the rest", "refund")
