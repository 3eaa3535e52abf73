"""Tests of a run that begins with imported weights: its manifest has the state of round 1, no peer begins with another,
and a peer without it receives it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from bench.sections import toml_value
from dilocox.cli.main import app
from dilocox.cli.run.init import render_preset
from dilocox.coordinator import daemon
from dilocox.node.data.imported_weights import import_weights
from dilocox.node.data.tokenizers import byte_tokenizer
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.training.hf.export import Vocabulary, export_model
from dilocox.node.training.model.seed_state import seed_state
from dilocox.node.training.model.trainer import Trainer, initial_state
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.run.manifest import Manifest, RunFileError
from dilocox.protocol.run.model import Model
from dilocox.protocol.run.tensors import stage_tensors, trained_count
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.process.tasks import Stopped, Tasks
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import weights_library, weights_shelf
from tests.corpora import corpus_of, words
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

ELSEWHERE = digest("another model")


def put_state(store: BlobStore, run: Manifest) -> bytes:
    """Store a state that no seed makes; return its root."""
    states = pb.StageStates()
    for stage in range(run.model.stages):
        size = sum(spec.elements for spec in stage_tensors(run.model, stage))
        state = torch.stack([torch.full((size,), 0.25 + stage), torch.zeros(size)])
        states.digests.append(store.put([state.numpy().data.cast("B")]))
    return store.put([canonical(states)])


def run_with(root: bytes) -> Manifest:
    return manifest(model={"initial": root.hex()})


def test_nobody_founds_the_run_on_another_state():
    run = run_with(digest("imported"))
    table = Table(run)
    for number in (3, 4, 5):
        judged = table.submit(table.claim(number, state=ELSEWHERE))
        assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_WRONG_BASE)
    table.genesis().train(2)
    assert table.commits[0].body.state == run.model.root
    assert sorted(table.roster()) == [0, 1, 2]
    table.verify()


def test_a_coordinator_that_founds_it_on_another_state_is_caught():
    run = run_with(digest("imported"))
    table = Table(run)
    table.state = round_machine.start(run, initial_head(COORDINATOR.peer), table.now)  # its machine accepts this
    for number in range(3):
        table.submit(table.claim(number, state=ELSEWHERE))
    [genesis] = table.commits
    assert genesis.body.state == ELSEWHERE
    with pytest.raises(RemoteError):
        chain.extend(run, initial_head(COORDINATOR.peer, run.model.root), genesis.envelope)
    chain.extend(run, initial_head(COORDINATOR.peer), genesis.envelope)  # that alone was wrong


@pytest.mark.parametrize("lora", [False, True])
def test_seed_state_is_the_state_that_every_node_makes(lora: bool):
    adapters = {"rank": 4, "alpha": 8.0, "base": digest("base").hex()}
    run = manifest(model={"lora": adapters, "num_hidden_layers": 4}, compression={"codec": "int4"}) if lora else manifest()
    stages = [digest_of([initial_state(run, stage).state_bytes()]) for stage in range(run.model.stages)]
    hashed: list[int] = []
    assert seed_state(run.model, hashed.append) == digest_of([canonical(pb.StageStates(digests=stages))])
    assert sum(hashed) == 8 * trained_count(run.model)


def test_seed_state_ends_with_what_its_progress_raises():
    def progress(count: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        seed_state(manifest().model, progress)


@pytest.mark.parametrize("at_once", [True, False])
async def test_coordinator_ends_where_the_manifest_names_another_state_than_its_seed_makes(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
):
    monkeypatch.setattr(daemon, "AT_ONCE_PARAMETERS", 10**9 if at_once else 0)
    made = seed_state(manifest().model).hex()
    right, wrong = (manifest(model={"seed_state": root}).model for root in (made, digest("changed").hex()))
    async with AsyncExitStack() as closing:
        tasks = Tasks()
        closing.push_async_callback(tasks.close)
        await daemon.verify_initial_state(right, seed_state, tasks, closing)
        verifying = daemon.verify_initial_state(wrong, seed_state, tasks, closing)
        if not at_once:
            await verifying  # a large model's start is not delayed
            verifying = tasks.wait()
        with pytest.raises(ConfigError, match=made):
            await verifying


async def test_coordinator_that_closes_ends_the_computation_of_an_initial_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon, "AT_ONCE_PARAMETERS", 0)
    began, ended = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def compute(model: Model, progress: Callable[[int], None], threads: int | None = None) -> bytes:
        try:
            while True:
                progress(1)
                began.set()
        finally:
            loop.call_soon_threadsafe(ended.set)

    async with AsyncExitStack() as closing:
        tasks = Tasks()
        closing.push_async_callback(tasks.close)
        await daemon.verify_initial_state(manifest().model, compute, tasks, closing)
        await asyncio.to_thread(began.wait)
    await ended.wait()


def test_claim_of_another_state_is_rejected_where_the_manifest_names_what_the_seed_makes():
    run = manifest(model={"seed_state": digest("state", 0).hex()})
    table = Table(run)
    for number in (3, 4, 5):
        judged = table.submit(table.claim(number, state=ELSEWHERE))
        assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_WRONG_BASE)
    table.genesis()
    assert table.commits[0].body.state == run.model.root
    assert sorted(table.roster()) == [0, 1, 2]


def test_genesis_seats_only_the_founders_that_an_open_run_names():
    founders = [identity(number).peer for number in range(3)]
    table = Table(manifest(admission={"allow": founders}))
    for number in (3, 4, 5):
        table.submit(table.claim(number, state=ELSEWHERE))
    assert not table.commits
    table.genesis()
    assert sorted(table.roster()) == [0, 1, 2]


def test_manifest_of_an_open_run_with_fewer_founders_than_start_clusters_is_refused():
    text = render_preset("tiny", "t", "00" * 32, machines=3)

    def naming(*numbers: int, policy: str = "open") -> str:
        names = ", ".join(f'"{identity(number).peer}"' for number in numbers)
        return f'{text}\n[admission]\npolicy = "{policy}"\nallow = [{names}]\n'

    for few in (naming(0), naming(0, 1), naming(0, 1, 1)):
        with pytest.raises(RunFileError, match="start_clusters") as refused:
            Manifest.from_toml(few)
        assert "3 clusters" in str(refused.value)
    Manifest.from_toml(naming(0, 1, 2))
    Manifest.from_toml(naming(0, policy="allow-list"))  # which `dilocox hire` fills name by name
    arrived = json.loads(Manifest.from_toml(naming(0, 1, 2)).canonical_bytes())
    arrived["admission"]["allow"].pop()
    with pytest.raises(RemoteError, match="start_clusters") as foreign:
        Manifest.from_canonical(json.dumps(arrived, sort_keys=True, separators=(",", ":")).encode())
    assert foreign.value.reason == pb.REASON_MALFORMED


def test_node_halts_where_its_seed_makes_another_state_than_the_manifest_names():
    run = manifest(model={"seed_state": digest("named").hex()})
    state = member.start(run, identity(0).peer, initial_head(COORDINATOR.peer, run.model.root))
    _, effects = member.step(state, member_io.StateReady(0, digest("made"), None), 0)
    [halt] = [effect for effect in effects if isinstance(effect, member_io.Halt)]
    assert digest("named").hex() in halt.why
    assert digest("made").hex() in halt.why
    _, effects = member.step(state, member_io.StateReady(0, digest("named"), None), 0)
    assert not [effect for effect in effects if isinstance(effect, member_io.Halt)]


def test_a_chain_file_begins_with_what_the_manifest_says(tmp_path: Path):
    run = run_with(digest("imported"))
    for _ in range(2):
        file = ChainFile(tmp_path / "chain.db", run)
        assert file.head.state == run.model.root
        file.close()


class Served:
    """Exchange with one peer that has everything."""

    def __init__(self, store: BlobStore, into: BlobStore) -> None:
        self._store, self._into, self.store = store, into, into
        self.asked: set[str] = set()
        self.most: dict[bytes, int] = {}
        """Bytes that were allowed of each."""

    async def fetch(
        self, digest: bytes, providers: Iterable[str], max_size: int = 0, stage: int | None = None, by: object = None
    ) -> None:
        self.asked |= set(providers)
        self.most[digest] = max_size
        self._into.put([self._store.view(digest)])


async def test_who_lacks_the_state_is_given_it_and_keeps_it_for_others(tmp_path: Path):
    theirs, ours = BlobStore(tmp_path / "theirs"), BlobStore(tmp_path / "ours")
    root = put_state(theirs, manifest())
    run = run_with(root)
    kept, peers = ChainFile(tmp_path / "chain.db", run), Served(theirs, ours)
    starts = ResumePlanner(run, kept, peers, peers, HostedStages(range(2)))  # type: ignore[arg-type]
    [candidate] = starts.candidates([worker.Hello(rank=0, stages=[0, 1])], False)
    start = await starts.complete(candidate)
    assert await starts.have(start, lambda why: None) == []
    assert peers.asked == {run.coordinator}
    assert all(peers.most[digest] == theirs.size(digest) for digest in theirs.stage_digests(root)), "or it fills the disk"
    assert [state.digest for state in start.states] == theirs.stage_digests(root)
    assert (start.origin, start.round) == (worker.Start.ORIGIN_SNAPSHOT, 0)
    assert starts.worth_keeping() == {root, *theirs.stage_digests(root)}
    assert ours.digests() == starts.worth_keeping()
    kept.close()


def test_a_folder_of_many_states_is_served_only_in_part(tmp_path: Path):
    store = BlobStore(tmp_path)
    run = manifest()
    root, private = put_state(store, run), store.put([b"of another run"])
    shelf = weights_shelf(store, root)
    assert all(shelf.holds(digest) for digest in (root, *store.stage_digests(root)))
    assert not shelf.holds(private)


@pytest.mark.usefixtures("process_group")
def test_a_trainer_begins_with_it_or_not_at_all(tmp_path: Path):
    store = BlobStore(tmp_path)
    run = run_with(put_state(store, manifest()))
    trainer = Trainer(run)
    trainer.load_initial(store)
    for state, stage in trainer.pairs():
        assert all(bool((tensor == 0.25 + state.stage).all()) for tensor in trainer.live(stage))
    for lacking in (None, BlobStore(tmp_path / "empty")):
        with pytest.raises(LocalError, match=f"begins with the state {run.model.initial}, which is not here"):
            trainer.load_initial(lacking)


def copy_of_a_model(folder: Path) -> bytes:
    """Make a run's model as a Hugging Face folder; return the root of its state."""
    run = manifest(model={"model_type": "llama"})
    store = BlobStore(folder / "elsewhere")
    digests = [store.put([initial_state(run, stage).state_bytes()]) for stage in range(run.model.stages)]
    export_model(run, digests, store, folder / "hub", Vocabulary(byte_tokenizer().encode(), 0), "", lambda stage: None)
    return store.put([canonical(pb.StageStates(digests=digests))])


async def test_a_node_with_a_copy_of_the_model_takes_the_state_from_it(tmp_path: Path):
    root = copy_of_a_model(tmp_path)
    store, path = BlobStore(tmp_path / "blobs"), tmp_path / "manifest.json"

    async def begin(initial: bytes | None, source: str = "hub") -> None:
        changed = manifest(model={"model_type": "llama", "initial": initial and initial.hex()})
        path.write_bytes(changed.canonical_bytes())
        await import_weights(changed.model, path, tmp_path / source, store, tmp_path)

    with pytest.raises(ConfigError, match=f"{root.hex()}.*{ELSEWHERE.hex()}"):
        await begin(ELSEWHERE)
    assert store.digests() == set(), "nothing of it stays"
    with pytest.raises(ConfigError, match="begins with its seed"):
        await begin(None)
    await begin(root)
    assert store.digests() == {root, *store.stage_digests(root)}
    await begin(root, "nowhere")  # a restart has it
    assert not list(tmp_path.glob("parent-*"))


async def test_who_waits_for_the_model_hears_of_every_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Check that the page and `status` report it at once, and the log after some time."""
    run = manifest(model={"model_type": "llama", "initial": copy_of_a_model(tmp_path).hex()})
    path, told, times = tmp_path / "manifest.json", list[str](), iter([0.0, 1.9, 2.0, 2.0])
    path.write_bytes(run.canonical_bytes())
    with caplog.at_level("INFO", logger="dilocox.node.data.imported_weights"):
        store = BlobStore(tmp_path / "blobs")
        await import_weights(run.model, path, tmp_path / "hub", store, tmp_path, told.append, lambda: next(times))
    what = f"importing the run's weights from {tmp_path / 'hub'}"
    assert told == [f"{what}: 1 of 2 stages", f"{what}: 2 of 2 stages"]
    assert [record.getMessage() for record in caplog.records] == [what, f"{what}: 2 of 2 stages"]


def coordinator(tmp_path: Path, run_file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["coordinator", str(run_file), "--home", str(tmp_path / "c"), "--no-dht", *options])


@pytest.mark.parametrize(
    ("stages", "weights", "sentence"),
    [
        (2, "empty", "not in .*/empty: .*`dilocox init --from`"),
        (3, "weights", "model in 3 stages"),
    ],
)
def test_a_coordinator_serves_no_state_that_is_not_the_run_s(
    stages: int, weights: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    text = corpus_of(tmp_path / "text", words(200, 20))
    run = manifest(
        model={"stages": stages, "initial": put_state(BlobStore(weights_library()), manifest()).hex()}, data=text.settings
    )
    path = tmp_path / "run.toml"
    path.write_text(_toml(run))
    result = coordinator(tmp_path, path, "--data", f"text={text.folder}", "--weights", str(tmp_path / weights))
    with pytest.raises(ConfigError, match=sentence):
        raise result.exception  # type: ignore[misc]


def _toml(run: Manifest) -> str:
    """Return a manifest as a run file."""
    lines = []
    for name, section in run.model_dump(mode="json", exclude_defaults=True).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in section.items()]
    return "\n".join(lines)
