"""Merit: what each account's work came to, as a contract can check it (plugins/settlement).

Of a commit a cluster earns its weight: the tokens that counted, as weighed (counting.py); an account earns what the clusters that
named it on the roster of that round earned. Merit only grows, so whoever pays out pays the difference to what was paid before, and
a proof of an older root can earn nobody more.

    leaf    SHA-256(0 ‖ account, 20 bytes ‖ merit, 32 bytes big-endian)

Leaves stand in the order of their accounts, in a tree (tree.py) whose proofs need no directions.
"""

from collections.abc import Iterable, Mapping, Sequence

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.payload import merkle

__all__ = ["earned", "holds", "leaf", "proof", "root"]

LARGEST = (1 << 64) - 1
"""Of an account: what a field of the commit holds. 2**31 rounds of 2**32 tokens."""


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


def root(merits: Mapping[bytes, int]) -> bytes:
    """32 bytes; of nobody's merit, the hash of nothing."""
    return merkle.root(_leaves(merits))


def proof(merits: Mapping[bytes, int], account: bytes) -> list[bytes]:
    """The siblings on the way from this account's leaf to the root. Raises KeyError for an account that earned nothing."""
    if account not in merits:
        raise KeyError(account)
    return merkle.proof(_leaves(merits), sorted(merits).index(account))


def holds(root: bytes, account: bytes, merit: int, proof: Sequence[bytes]) -> bool:
    """Whether this proof shows it: what the contract computes."""
    return merkle.climb(leaf(account, merit), proof) == root


def _leaves(merits: Mapping[bytes, int]) -> list[bytes]:
    return [leaf(account, merits[account]) for account in sorted(merits)]
