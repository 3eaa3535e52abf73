"""Tests of adapters: what a run trains, stores, exchanges and exports, and its agreement with LoRA elsewhere."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from dilocox.node.data.imported_weights import import_weights
from dilocox.node.data.tokenizers import byte_tokenizer
from dilocox.node.outer.state import StageState
from dilocox.node.planning import memory_model
from dilocox.node.planning.step_model import flops_per_token
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.training.hf.export import Vocabulary, export_adapter, export_model
from dilocox.node.training.hf.hf_import import Weights, read_model
from dilocox.node.training.model.inner import BETAS
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.model import FAMILIES
from dilocox.node.training.model.trainer import Trainer, initial_state
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.payload.payload import Form
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest, RunFileError
from dilocox.protocol.run.model import Model
from dilocox.protocol.run.tensors import (
    imported_bytes,
    parameter_count,
    stage_tensors,
    stage_units,
    stage_weights,
    trained_count,
)
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.helpers import Table, manifest

RANK, ALPHA = 4, 12.0
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256}


def hub_at(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(3)
    given = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}
    config = FAMILIES[family].config(**given) if family != "llama" else LlamaConfig(**given)
    if family == "mistral":
        config.sliding_window = None
    if family == "qwen3":
        config.head_dim = 8
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def adapted(hub: Path, store: BlobStore, stages: int = 2, lora: dict[str, Any] | None = None, **sections: Any) -> Manifest:
    """Return a run on adapters of the model there, whose frozen weights are put into the store."""
    config, tied = read_model(hub)
    said = {"rank": RANK, "alpha": ALPHA, "base": "00" * 32, **(lora or {})}
    fields = {"config": config, "sequence_length": 16, "stages": stages, "lora": said}
    root = Weights(hub, Model.model_validate(fields), tied).put_into(store)
    base = manifest(compression={"codec": "int4"}, **sections).model_dump(mode="json")
    return Manifest.model_validate({**base, "model": {**fields, "lora": {**said, "base": root.hex()}}})


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def trainer_of(run: Manifest, store: BlobStore) -> Trainer:
    trainer = Trainer(run)
    trainer.load_frozen(store)
    trainer.load_initial()
    return trainer


def batch(run: Manifest, seed: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (size, run.model.sequence_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Reference(nn.Module):
    """LoRA as its paper writes it, beside a frozen matrix of any model."""

    def __init__(self, frozen: nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.frozen, self.down, self.up = frozen, nn.Parameter(down.clone()), nn.Parameter(up.clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.frozen(hidden) + ALPHA / RANK * (hidden @ self.down.T @ self.up.T)


def reference_of(hub: Path, run: Manifest) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return transformers' model with the run's initial adapters, and these by name."""
    model = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    adapters: dict[str, nn.Parameter] = {}
    model.requires_grad_(False)
    begin = {spec.name: view for n in range(run.model.stages) for spec, view in initial_views(run, n)}
    for name in [name.removesuffix(".lora_A.weight") for name in begin if name.endswith("lora_A.weight")]:
        parent, _, last = name.rpartition(".")
        down, up = (begin[f"{name}.lora_{part}.weight"] for part in "AB")
        reference = Reference(model.get_submodule(name), down, up)
        setattr(model.get_submodule(parent), last, reference)
        adapters |= {f"{name}.lora_A.weight": reference.down, f"{name}.lora_B.weight": reference.up}
    return model, adapters


def initial_views(run: Manifest, stage: int) -> list[tuple[Any, torch.Tensor]]:
    state = initial_state(run, stage)
    return list(state.views(state.parameters))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")])
def test_training_is_plain_lora(family: str, targets: tuple[str, ...], tmp_path: Path, store: BlobStore):
    """Compare losses, and every adapter after five steps, with transformers' model, a textbook LoRA and torch's AdamW."""
    hub = hub_at(tmp_path / "hub", family)
    run = adapted(hub, store, lora={"targets": targets}, training={"weight_decay": 0.05})
    trainer = trainer_of(run, store)
    model, adapters = reference_of(hub, run)
    assert set(adapters) == {spec.name for stage in range(2) for spec in stage_tensors(run.model, stage)}
    training = run.training
    optimizer = torch.optim.AdamW(adapters.values(), lr=training.learning_rate, betas=BETAS, weight_decay=0.05)
    frozen = {
        name: p.clone() for _, stage in trainer.live_stages() for name, p in stage.named_parameters() if not p.requires_grad
    }
    for step in range(5):
        inputs, targets_ = batch(run, step)
        logits = model(inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets_.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(adapters.values(), training.gradient_clip)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * (
                0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 100)).item())
            )
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step(inputs, targets_).loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for _, stage in trainer.live_stages():
        for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
            # AdamW divides by a gradient's size: if it is nearly 0, rounding moves an element by part of a step of 1e-2
            torch.testing.assert_close(parameter.data, adapters[spec.name].data, atol=5e-4, rtol=1e-3)
            if spec.name.endswith("lora_B.weight"):
                assert parameter.data.abs().max() > 1e-3, "it moved"
        for name, parameter in stage.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameter, frozen[name]), "and the weights did not"
                assert parameter.grad is None


def test_it_begins_as_the_imported_model(tmp_path: Path, store: BlobStore):
    hub = hub_at(tmp_path / "hub", dtype=torch.bfloat16)
    run = adapted(hub, store, 3)
    inputs, targets = batch(run)
    theirs = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(inputs, use_cache=False).logits
        expected = float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert trainer_of(run, store).evaluate(inputs, targets) == pytest.approx(expected, rel=1e-6)


def test_what_is_exchanged_and_agreed_on_are_the_adapters(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store)
    names = [spec.name for stage in range(2) for spec in stage_tensors(run.model, stage)]
    assert len(names) == 3 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert trained_count(run.model) < parameter_count(run.model) / 3
    state = StageState(run, 0)
    assert all(tensor.form == Form.INT4 for tensor in state.layout().tensors)
    assert not run.model.root, "the state of round 1 follows from the seed, as of any run"
    state = initial_state(run, 0)
    for spec, view in state.views(state.parameters):
        if spec.name.endswith("lora_B.weight"):
            assert not view.any()
            assert not torch.signbit(view).any(), "nor minus zero"
        else:
            assert float(view.abs().max()) == pytest.approx(spec.shape[1] ** -0.5, rel=0.1), "peft's kaiming_uniform(5 ** 0.5)"


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (2, 2), (3, 2), (5, 3), (5, 5)])
def test_every_stage_has_adapters_and_all_weights_a_stage(layers: int, stages: int):
    lora = {"rank": 2, "alpha": 2.0, "base": "00" * 32}
    run = manifest(
        model={"num_hidden_layers": layers, "stages": stages, "lora": lora, "vocab_size": 4096}, compression={"codec": "int4"}
    )
    plain = manifest(model={"num_hidden_layers": layers, "stages": 1, "vocab_size": 4096}).model
    assert all(stage_tensors(run.model, stage) for stage in range(stages))
    split = [spec for stage in range(stages) for spec in stage_weights(run.model, stage)]
    assert split == list(stage_weights(plain, 0))
    units = stage_units(run.model)
    assert units[0][0] == 0
    assert units[-1][1] == layers + 2
    assert all(before[1] == after[0] for before, after in itertools.pairwise(units))


@pytest.mark.parametrize(
    ("model", "compression", "sentence"),
    [
        ({"initial": "11" * 32}, {}, "remove initial"),
        ({"stages": 4}, {}, "4 stages, but 3 layers: with lora each stage"),
        ({"lora": {"rank": 17}}, {}, "lora.rank 17 is above"),
        ({"lora": {"targets": ["q_proj", "q_proj"]}}, {}, "names a matrix twice"),
        ({"lora": {"targets": ["lm_head"]}}, {}, "Input should be 'q_proj'"),
        ({"lora": {"targets": []}}, {}, "at least 1 item"),
        ({"lora": {"alpha": 0.0}}, {}, "greater than 0"),
        ({}, {"codec": "lowrank-int4", "rank": 8}, 'adapters are of low rank already; set compression.codec = "int4"'),
    ],
)
def test_what_a_run_file_cannot_say_of_adapters(model: dict[str, Any], compression: dict[str, Any], sentence: str):
    lora = {"rank": 2, "alpha": 2.0, "base": "00" * 32, **model.pop("lora", {})}
    with pytest.raises(ValueError, match=sentence):
        manifest(model={**model, "lora": lora}, compression={"codec": "int4", **compression})


def test_frozen_weights_lie_in_half_the_bytes_where_all_of_them_were_so(tmp_path: Path, store: BlobStore):
    for dtype, which in ((torch.float32, 0), (torch.bfloat16, 1)):
        run = adapted(hub_at(tmp_path / str(dtype), dtype=dtype), store)
        sizes = [store.size(digest) for digest in store.stage_digests(run.model.imported)]
        assert sizes == [imported_bytes(run.model, stage)[which] for stage in range(2)]


def test_without_the_frozen_weights_nothing_is_trained(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store)
    with pytest.raises(LocalError, match=f"the weights {run.model.imported.hex()} that adapters are added to are not here"):
        Trainer(run).load_frozen(BlobStore(tmp_path / "empty"))


def test_one_round_of_two_clusters_moves_the_adapters_alike(tmp_path: Path, store: BlobStore):
    """Encode, apply and rebase, as a commit does: both end with the same bits of Θ."""
    run = adapted(hub_at(tmp_path / "hub"), store)
    trainers = [trainer_of(run, store) for _ in range(2)]
    payloads = []
    for number, trainer in enumerate(trainers):
        trainer.step(*batch(run, number))
        trainer.end_phase(1, restart=False)
        payloads.append([memoryview(encoded.raw) for encoded in trainer.encode(f"c{number}", 1, 0)])
    for trainer in trainers:
        for state in trainer.states:
            state.apply([each[state.stage] for each in payloads], [64, 64])
        trainer.rebase()
    first, second = ([state.committed for state in trainer.states] for trainer in trainers)
    assert all(map(torch.equal, first, second))
    assert any(bool(state.committed[0].ne(initial_state(run, state.stage).committed[0]).any()) for state in trainers[0].states)


def spoken(run: Manifest) -> tuple[list[StageState], Vocabulary]:
    """Return adapters that change the outputs."""
    states = [initial_state(run, stage) for stage in range(run.model.stages)]
    for state in states:
        state.parameters.add_(0.05 * torch.randn(state.size, generator=torch.Generator().manual_seed(state.stage)))
    return states, Vocabulary(byte_tokenizer().encode(), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_has_the_adapters_merged(dtype: torch.dtype, tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub", dtype=dtype), store)
    states, vocabulary = spoken(run)
    digests = [store.put([state.state_bytes()]) for state in states]
    export_model(run, digests, store, tmp_path / "model", vocabulary, "# A card", lambda stage: None)
    trainer = trainer_of(run, store)
    for state, spoken_ in zip(trainer.states, states, strict=True):
        state.committed.copy_(spoken_.committed)
    trainer.reset_to_committed()
    inputs, targets = batch(run)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(inputs, use_cache=False).logits
    loss = float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert trainer.evaluate(inputs, targets) == pytest.approx(loss, rel=1e-5)
    assert loss != pytest.approx(trainer_of(run, store).evaluate(inputs, targets), rel=1e-3), "they change something"


def test_an_adapter_folder_is_as_peft_writes_it(tmp_path: Path, store: BlobStore):
    hub = hub_at(tmp_path / "hub")
    run = adapted(hub, store)
    states, vocabulary = spoken(run)
    export_adapter(run, [store.put([s.state_bytes()]) for s in states], store, tmp_path / "adapter", vocabulary, "# A card")
    says = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (says["peft_type"], says["r"], says["lora_alpha"]) == ("LORA", RANK, ALPHA)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{spec.name}" for s in range(2) for spec in stage_tensors(run.model, s)}
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (RANK, 32)
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    export_model(
        run, [store.put([s.state_bytes()]) for s in states], store, tmp_path / "model", vocabulary, "", lambda stage: None
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    inputs, _ = batch(run)
    with torch.no_grad():
        torch.testing.assert_close(theirs(inputs).logits, merged(inputs).logits, atol=2e-5, rtol=2e-5)


class Kept:
    """Bytes that autograd stores, each storage once; parameters are none."""

    def __init__(self, trainer: Trainer) -> None:
        self.weights = {p.untyped_storage().data_ptr() for _, stage in trainer.live_stages() for p in stage.parameters()}
        self.sizes: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_memory_is_that_of_adapters_and_of_weights_once(family: str, tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub", family), store, stages=1, training={"microbatches": 1})
    trainer = trainer_of(run, store)
    held = memory_model.stage_bytes(run, [0], half=False)
    parameters = [parameter for _, stage in trainer.live_stages() for parameter in stage.parameters()]
    assert held.weights == 4 * sum(parameter.numel() for parameter in parameters)
    kept = Kept(trainer)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        trainer.step(*batch(run))
    assert held.gradients == 4 * sum(parameter.grad.numel() for parameter in parameters if parameter.grad is not None)
    assert held.moments == 2 * held.gradients
    assert memory_model.host_bytes(run, [0]) == (4 + 2) * held.gradients
    most = memory_model.held_bytes(run, 0, half=False)
    assert 0.6 * most < sum(kept.sizes.values()) <= most
    narrow = memory_model.stage_bytes(run, [0], half=True)
    assert narrow.weights < 0.75 * held.weights
    assert flops_per_token(run) < flops_per_token(manifest(**whole(run)))


def whole(run: Manifest) -> dict[str, Any]:
    model = run.model.model_dump(exclude_none=True)
    del model["lora"]
    return {"model": model}


def test_on_half_precision_the_frozen_matrices_are_held_so(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store, training={"precision": "bf16"})
    trainer = Trainer(run, Mesh())
    trainer.load_frozen(store)
    trainer.load_initial()
    for _, stage in trainer.live_stages():
        for name, parameter in stage.named_parameters():
            frozen_matrix = not parameter.requires_grad and parameter.dim() == 2 and "embed" not in name
            assert parameter.dtype == (torch.bfloat16 if frozen_matrix else torch.float32), name
    inputs, targets = batch(run)
    exact = trainer_of(adapted(tmp_path / "hub", store), store).evaluate(inputs, targets)
    assert trainer.evaluate(inputs, targets) == pytest.approx(exact, rel=1e-2)
    before = trainer.evaluate(inputs, targets)
    for _ in range(20):
        trainer.step(inputs, targets)
    assert trainer.evaluate(inputs, targets) < before


def test_run_files_of_adapters_are_read(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store)
    assert Manifest.from_canonical(run.canonical_bytes()) == run
    with pytest.raises((RunFileError, ConfigError), match="did you mean"):
        Manifest.from_toml("[model]\nlora = { rnk = 2 }\n")


class Peers:
    """Exchange with peers that have the blobs of `store`."""

    def __init__(self, store: BlobStore, to: BlobStore, stages: range) -> None:
        self.hosted, self.fetched = HostedStages(stages), list[bytes]()
        self._store, self._to, self.store = store, to, to

    async def fetch(
        self, digest: bytes, providers: list[str], most: int = 1 << 40, stage: int | None = None, by: object = None
    ) -> None:
        if digest not in self._to:
            assert self._store.size(digest) <= most
            assert providers
            self.fetched.append(digest)
            self._to.put([self._store.view(digest)])


def starts_of(
    run: Manifest, table: Table, there: BlobStore, folder: Path, stages: range
) -> tuple[ResumePlanner, BlobStore, Peers]:
    here = BlobStore(folder / "here")
    chain = ChainFile(folder / "chain.db", run)
    for commit in table.commits:
        chain.append(commit.envelope)
    peers = Peers(there, here, stages)
    return ResumePlanner(run, chain, peers, peers, peers.hosted), here, peers  # type: ignore[arg-type]


async def test_a_node_fetches_the_frozen_weights_of_its_stages_and_keeps_them(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store, rounds={"count": 40, "snapshot_every": 2})
    table = Table(run).genesis().train(12)
    starts, here, peers = starts_of(run, table, store, tmp_path, range(1, 2))
    said: list[str] = []
    await starts.have_frozen(said.append)
    root = run.model.imported
    second = store.stage_digests(root)[1]
    assert peers.fetched == [root, second]
    assert said == ["fetching the frozen weights, stage 2 of 2"]
    assert starts.oldest_kept() > 1
    assert {root, second} <= starts.worth_keeping(), "rounds later than anybody begins at the beginning"
    assert second in here


async def test_a_node_with_a_copy_of_the_model_takes_the_frozen_weights_from_it(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store)
    here, path = BlobStore(tmp_path / "mine"), tmp_path / "manifest.json"
    path.write_bytes(run.canonical_bytes())
    await import_weights(run.model, path, tmp_path / "hub", here, tmp_path)
    assert here.stage_digests(run.model.imported) == store.stage_digests(run.model.imported)
    assert all(map(here.verify, here.stage_digests(run.model.imported)))


async def test_frozen_weights_of_another_model_end_a_node(tmp_path: Path, store: BlobStore):
    run = adapted(hub_at(tmp_path / "hub"), store)
    other = store.put([canonical(pb.StageStates(digests=[store.put([b"short"]), store.put([b"shorter"])]))])
    sections = run.model_dump(mode="json")
    sections["model"]["lora"]["base"] = other.hex()
    run = Manifest.model_validate(sections)
    starts, _, _ = starts_of(run, Table(run).genesis(), store, tmp_path, range(2))
    with pytest.raises(ConfigError, match=r"model\.lora\.base"):
        await starts.have_frozen(lambda text: None)
