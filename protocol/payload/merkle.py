"""Merkle tree whose proofs need no directions, as contracts verify them: for merit and for erasure shards.

    node    SHA-256(1 ‖ the smaller child ‖ the larger child)

Leaves are 32 bytes: hashes of data that does not begin with a 1, or is not 65 bytes long, so none can pass for a node.
On a level with an odd number of nodes the last one moves up unchanged. If the position of a leaf matters, the leaf
contains it.
"""

from collections.abc import Sequence

from dilocox.protocol.crypto import sha256

__all__ = ["Tree", "climb", "node", "proof", "root"]


def node(one: bytes, other: bytes) -> bytes:
    return sha256(b"\1", min(one, other), max(one, other))


class Tree:
    """Tree for many proofs."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = _levels(leaves)

    @property
    def root(self) -> bytes:
        """32 bytes; of no leaves, the hash of nothing."""
        return self._levels[-1][0] if self._levels[0] else sha256()

    def proof(self, index: int) -> list[bytes]:
        """Return the siblings between this leaf and the root."""
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
    """Return the siblings between this leaf and the root."""
    return Tree(leaves).proof(index)


def climb(leaf: bytes, proof: Sequence[bytes]) -> bytes:
    """Return the root of the tree in which the proof is valid for the leaf."""
    digest = leaf
    for sibling in proof:
        digest = node(digest, sibling)
    return digest


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return the levels, from the leaves to the root."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([node(*below[at : at + 2]) if at + 1 < len(below) else below[at] for at in range(0, len(below), 2)])
    return levels
