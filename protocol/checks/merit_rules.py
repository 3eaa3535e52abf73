"""Merit: each account's earnings, as a contract can verify them (plugins/settlement).

A cluster earns its weight in a commit: the counted tokens, as weighted (weighting.py). An account earns what the
clusters that named it on that round's roster earned. Merit only grows, so a payer pays the difference to the amount
paid before, and a proof of an older root earns no more.

    leaf    SHA-256(0 ‖ account, 20 bytes ‖ merit, 32 bytes big-endian)

Leaves are ordered by account, in a tree (merkle.py) whose proofs need no directions.
"""

from collections.abc import Iterable, Mapping, Sequence

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.payload import merkle

__all__ = ["earned", "holds", "leaf", "proof", "root"]

LARGEST = (1 << 64) - 1
"""Largest merit of an account, the limit of the commit's field: 2**31 rounds of 2**32 tokens."""


def earned(before: Mapping[bytes, int], weights: Iterable[tuple[bytes, int]]) -> dict[bytes, int]:
    """Return the cumulative merit by account, in order, after a commit that counted these (account, weight); without an
    account nothing is earned.

    Known accounts are never forgotten, because merit is money. A new one has no space after `limits.ACCOUNTS`.
    """
    after = dict(before)
    for account, weight in weights:
        if account and (account in after or len(after) < limits.ACCOUNTS):
            after[account] = min(LARGEST, after.get(account, 0) + weight)
    return dict(sorted(after.items()))


def leaf(account: bytes, merit: int) -> bytes:
    return sha256(b"\0", account, merit.to_bytes(32, "big"))


def root(merits: Mapping[bytes, int]) -> bytes:
    """Return the root, 32 bytes; without merit, the hash of nothing."""
    return merkle.root(_leaves(merits))


def proof(merits: Mapping[bytes, int], account: bytes) -> list[bytes]:
    """Return the siblings between this account's leaf and the root. Raises KeyError for an account without merit."""
    if account not in merits:
        raise KeyError(account)
    return merkle.proof(_leaves(merits), sorted(merits).index(account))


def holds(root: bytes, account: bytes, merit: int, proof: Sequence[bytes]) -> bool:
    """Return whether this proof shows the merit, as the contract computes it."""
    return merkle.climb(leaf(account, merit), proof) == root


def _leaves(merits: Mapping[bytes, int]) -> list[bytes]:
    return [leaf(account, merits[account]) for account in sorted(merits)]
