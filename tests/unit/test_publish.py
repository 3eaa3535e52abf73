"""Tests of `export --every` beside a node: the newest available state, and the cost of a check for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dilocox.cli.model.publish import Held
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import seal
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.archived import OWNER, RealTable, real_run
from tests.helpers import COORDINATOR


class Node:
    """Folder of a node in a run that continues."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all, self.store = BlobStore(folder / "all"), BlobStore(folder / "blobs")
        self.table = RealTable(real_run(self.all), self.all)
        self.table.genesis()
        self.chain = ChainFile(folder / "chain.db", self.table.run)
        self.reads, self.opened = 0, list[int]()
        """Reads of the chain, and of its commits."""
        self.follow()
        self.export = Held(folder / "chain.db")
        open_chain, open_commits = ChainFile.for_reading, ChainFile.commits

        @contextmanager
        def for_reading(path: Path) -> Iterator[ChainFile]:
            self.reads += 1
            with open_chain(path) as chain:
                yield chain

        def commits(chain: ChainFile, first: int = 0) -> Iterator[object]:
            for commit in open_commits(chain, first):
                self.opened.append(commit.body.round)
                yield commit

        monkeypatch.setattr(ChainFile, "for_reading", for_reading)
        monkeypatch.setattr(ChainFile, "commits", commits)

    def follow(self) -> None:
        for commit in self.table.commits[self.chain.length :]:
            self.chain.append(commit.envelope)

    def train(self, rounds: int) -> None:
        self.table.train(rounds)
        self.follow()

    def state(self, round: int) -> list[bytes]:
        """Return the state's blobs."""
        root = self.chain.state_before(round)
        return [root, *self.all.stage_digests(root)]

    def have(self, round: int) -> None:
        for digest in self.state(round):
            self.store.put([self.all.read(digest)])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path, monkeypatch)
    yield made
    made.chain.close()


def test_the_newest_whole_state_is_to_be_had(node: Node):
    assert node.export.newest_state() == (0, False)
    node.train(4)
    node.have(2)
    assert node.export.newest_state() == (2, False)
    node.have(3)
    assert node.export.newest_state() == (3, False), "what is written after its commit"
    node.store.remove(node.state(3)[-1])
    assert node.export.newest_state() == (2, False), "what the node gave up"


def test_a_look_at_a_chain_that_stands_still_reads_nothing_of_it(node: Node):
    node.train(3)
    node.export.newest_state()
    node.reads, node.opened = 0, []
    for _ in range(3):
        node.export.newest_state()
    assert (node.reads, node.opened) == (0, [])
    node.train(1)
    node.have(4)
    assert node.export.newest_state() == (4, False)
    assert (node.reads, node.opened) == (1, [4])


def test_where_the_owner_names_another_commit_what_was_read_is_forgotten(node: Node):
    node.train(4)
    node.have(3)
    node.have(4)
    assert node.export.newest_state()[0] == 4
    named = node.chain.commit(3)
    assert named is not None
    body = pb.Appointment(term=1, coordinator=COORDINATOR.peer, round=4, head=named.digest, state=b"")
    node.chain.appoint(seal(OWNER, pb.KIND_APPOINTMENT, node.table.run.run_id, body).envelope)
    assert node.export.newest_state()[0] == 3
