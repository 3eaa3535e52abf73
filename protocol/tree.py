"""A Merkle tree whose proofs need no directions, as contracts check them: merit (merit.py), shares of blobs (shares.py).

    node    SHA-256(1 ‖ the smaller child ‖ the larger child)

Leaves are 32 bytes, hashes of what does not begin with a 1, or has not 65 bytes: so none passes for a node. Where a level is odd
its last one goes up as it is. Where the place of a leaf matters, the leaf says it.
"""

from collections.abc import Sequence

from dilocox.protocol.crypto import sha256

__all__ = ["Tree", "climb", "node", "proof", "root"]


def node(one: bytes, other: bytes) -> bytes:
    return sha256(b"\1", min(one, other), max(one, other))


class Tree:
    """For who asks it for many proofs."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = _levels(leaves)

    @property
    def root(self) -> bytes:
        """32 bytes; of no leaves, the hash of nothing."""
        return self._levels[-1][0] if self._levels[0] else sha256()

    def proof(self, index: int) -> list[bytes]:
        """The siblings on the way from this leaf to the root."""
        found = list[bytes]()
        for level in self._levels[:-1]:
            if index ^ 1 < len(level):
                found.append(level[index ^ 1])
            index //= 2
        return found


def root(leaves: Sequence[bytes]) -> bytes:
    """32 bytes; of no leaves, the hash of nothing."""
    return Tree(leaves).root


def proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The siblings on the way from this leaf to the root."""
    return Tree(leaves).proof(index)


def climb(leaf: bytes, proof: Sequence[bytes]) -> bytes:
    """The root of the tree in which the proof stands for the leaf."""
    digest = leaf
    for sibling in proof:
        digest = node(digest, sibling)
    return digest


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """From the leaves to the root."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([node(*below[at : at + 2]) if at + 1 < len(below) else below[at] for at in range(0, len(below), 2)])
    return levels
