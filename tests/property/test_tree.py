"""Merkle trees: each leaf, and each blob of a contribution, has its way to the root, and another has none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload import data_root, merkle
from dilocox.protocol.pb import messages_pb2 as pb


@given(st.integers(1, 70), st.integers(0))
def test_a_leaf_is_in_its_tree(count: int, index: int):
    leaves = [sha256(b"%d" % number) for number in range(count)]
    proof = merkle.proof(leaves, index % count)
    assert merkle.climb(leaves[index % count], proof) == merkle.root(leaves)
    assert merkle.climb(sha256(b"another"), proof) != merkle.root(leaves)


@given(listed=st.booleans(), there=st.lists(st.booleans(), min_size=1, max_size=9))
def test_each_blob_of_a_contribution_has_its_way_to_the_root(listed: bool, there: list[bool]):
    leaves = [pb.Leaf(stage=n, shares=sha256(b"root", b"%d" % n) if here else b"") for n, here in enumerate(there)]
    first = sha256(b"listed") if listed else b""
    root = data_root.work_root(first, leaves)
    for blob, way in zip([first, *(leaf.shares for leaf in leaves)], data_root.ways(first, leaves), strict=True):
        assert (merkle.climb(blob, way) == root) if blob else not way
    data_root.check_work(pb.Contribution(shares=root), first, leaves)
    leaves[-1].shares = sha256(b"another")
    with pytest.raises(RemoteError) as refused:
        data_root.check_work(pb.Contribution(shares=root), first, leaves)
    assert refused.value.reason == pb.REASON_SHARES
