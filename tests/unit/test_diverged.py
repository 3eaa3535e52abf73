"""Tests of a worker whose loss is no number, or one that no peer accepts: it reports this at that step, not at the end of
a long phase."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from dilocox.node.training.worker.worker import Worker
from dilocox.node.workers.environment import WorkerSettings
from dilocox.protocol.errors import Diverged
from dilocox.protocol.member import phase
from dilocox.protocol.pb import worker_pb2 as pb
from tests.corpora import corpus_of, words
from tests.helpers import Table, identity, manifest


class Link:
    """Daemon that stops the worker that reports a step."""

    def __init__(self) -> None:
        self.wake, self.sent = threading.Event(), list[pb.WorkerEvent]()
        self.stopping = False

    def send(self, event: pb.WorkerEvent) -> None:
        self.sent.append(event)

    def next_command(self) -> pb.WorkerCommand | None:
        heard = any(event.step.total_steps for event in self.sent)
        self.stopping, before = heard, self.stopping
        return pb.WorkerCommand(stop=pb.Stop()) if heard and not before else None


@pytest.mark.parametrize("spoil", [lambda tensor: tensor.fill_(float("nan")), lambda tensor: tensor.mul_(1e9)])
def test_a_loss_that_no_peer_takes_ends_the_worker_before_anybody_hears_it(
    process_group: None, tmp_path: Path, spoil: Callable[[Tensor], Tensor]
):
    text, cluster = corpus_of(tmp_path / "text", words(40, 60)), identity(0).peer
    run = manifest(data={"name": text.name, "digest": text.digest})
    settings = WorkerSettings(
        "", tmp_path / "m", tmp_path / "blobs", tmp_path / "stages", cluster, "cpu", 1, 1, (), text.folder, 0
    )
    link = Link()
    worker = Worker(settings, run, 0, 1, link)  # type: ignore[arg-type]
    worker.state = phase.begin(run, cluster, Table(run).genesis().head)
    worker.trainer.load_initial()
    for _, stage in worker.trainer.live_stages():
        for tensor in worker.trainer.live(stage):
            spoil(tensor)
    with pytest.raises(Diverged, match=r"the loss is (nan|[0-9.e+]+) nats per token: training diverged on this node"):
        worker.run()
    assert all(event.step.loss == 0 for event in link.sent)
