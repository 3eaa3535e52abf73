"""Merit: what each account's work came to, as a contract can check it (around/settlement).

Of a commit a cluster earns its weight: the tokens that counted, as weighed (counting.py); an account earns what the clusters that
named it on the roster of that round earned. Merit only grows, so whoever pays out pays the difference to what was paid before, and
a proof of an older root can earn nobody more.

    leaf    SHA-256(0 ‖ account, 20 bytes ‖ merit, 32 bytes big-endian)
    node    SHA-256(1 ‖ the smaller child ‖ the larger child)

Leaves stand in the order of their accounts; where a level is odd its last one goes up as it is. Leaves and nodes hash different
lengths after different bytes, so none passes for the other; children are in order, so a proof needs no directions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError

__all__ = ["earned", "holds", "leaf", "node", "parse_account", "proof", "root"]

LARGEST = (1 << 64) - 1
"""Of an account: what a field of the commit holds. 2**31 rounds of 2**32 tokens."""


def parse_account(text: str) -> bytes:
    """20 bytes. Raises ConfigError, also for the account that nobody has."""
    if not re.fullmatch(r"0x[0-9a-fA-F]{40}", text) or not int(text, 16):
        raise ConfigError(f"{text!r} is no account: 0x and 40 hexadecimal digits, as a wallet shows it")
    return bytes.fromhex(text[2:])


def earned(before: Mapping[bytes, int], weights: Iterable[tuple[bytes, int]]) -> dict[bytes, int]:
    """Cumulative merit by account, in order, after a commit that counted these (account, weight); no account: nothing is earned.

    None that is known is ever forgotten: what it earned is money. A new one finds no room after `limits.ACCOUNTS`.
    """
    after = dict(before)
    for account, weight in weights:
        if account and (account in after or len(after) < limits.ACCOUNTS):
            after[account] = min(LARGEST, after.get(account, 0) + weight)
    return dict(sorted(after.items()))


def leaf(account: bytes, merit: int) -> bytes:
    return sha256(b"\0", account, merit.to_bytes(32, "big"))


def node(one: bytes, other: bytes) -> bytes:
    return sha256(b"\1", min(one, other), max(one, other))


def root(merits: Mapping[bytes, int]) -> bytes:
    """32 bytes; of nobody's merit, the hash of nothing."""
    return _levels(merits)[-1][0] if merits else sha256()


def proof(merits: Mapping[bytes, int], account: bytes) -> list[bytes]:
    """The siblings on the way from this account's leaf to the root. Raises KeyError for an account that earned nothing."""
    index, found = sorted(merits).index(account) if account in merits else -1, list[bytes]()
    if index < 0:
        raise KeyError(account)
    for level in _levels(merits)[:-1]:
        if index ^ 1 < len(level):
            found.append(level[index ^ 1])
        index //= 2
    return found


def holds(root: bytes, account: bytes, merit: int, proof: Sequence[bytes]) -> bool:
    """Whether this proof shows it: what the contract computes."""
    digest = leaf(account, merit)
    for sibling in proof:
        digest = node(digest, sibling)
    return digest == root


def _levels(merits: Mapping[bytes, int]) -> list[list[bytes]]:
    """From the leaves to the root."""
    levels = [[leaf(account, merits[account]) for account in sorted(merits)]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([node(*below[at : at + 2]) if at + 1 < len(below) else below[at] for at in range(0, len(below), 2)])
    return levels
