"""A Hugging Face folder into a run: the same logits as transformers computes, the same bytes on any machine, nothing dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dilocox.node.outer.state import StageState
from dilocox.node.training.hf.hf_import import Weights, read_model
from dilocox.node.training.model.model import FAMILIES, Chain, build_chain
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import manifest

LENGTH = 24
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama, llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 5e5}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied, all heads": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biased": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "mistral": ("mistral", {"head_dim": 12, "sliding_window": 32}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": None}),
}


def made(folder: Path, family: str, changes: dict[str, Any], **saving: Any) -> Any:
    """Save a transformers model in the folder, with weights that differ from any initialisation."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES[family].config(**{**SHAPE, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saving)
    return model.eval()


def run_of(folder: Path, stages: int = 3, length: int = LENGTH) -> tuple[Manifest, Weights]:
    fields, tied = read_model(folder)
    base = manifest().model_dump()
    run = Manifest.model_validate({**base, "model": {"config": fields, "stages": stages, "sequence_length": length}})
    return run, Weights(folder, run.model, tied)


def chain_of(run: Manifest, store: BlobStore, root: bytes) -> Chain:
    """Build a chain of stages from the blobs, as a worker does."""
    digests = store.stage_digests(root)
    chain = build_chain(run.model, list(range(run.model.stages)), torch.device("cpu"))
    for stage, digest in zip(chain, digests, strict=True):
        state = StageState(run, digests.index(digest))
        state.load_state(store.view(digest))
        assert not state.committed[1].any(), "no momentum"
        for (_, theta), parameter in zip(state.views(state.parameters), stage.tensors(), strict=True):
            parameter.data.copy_(theta)
    return chain


@pytest.mark.parametrize("case", CASES)
def test_the_stages_compute_what_transformers_computes(case: str, tmp_path: Path):
    theirs = made(tmp_path / "hub", *CASES[case])
    run, weights = run_of(tmp_path / "hub")
    assert Manifest.from_canonical(run.canonical_bytes()) == run
    store = BlobStore(tmp_path / "store")
    ours = chain_of(run, store, weights.put_into(store))
    tokens = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        assert expected.std() > 0.1, "or any weights would do"
        spread = 2e-6 if run.model.config.sliding_window else 0.0  # theirs masks what it does not reach, with another kernel
        torch.testing.assert_close(ours(tokens), expected, atol=spread, rtol=spread)


def test_a_split_a_shard_and_a_tie_do_not_change_a_byte(tmp_path: Path):
    model = made(tmp_path / "one", "llama", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    untied = load_file(tmp_path / "one/model.safetensors")
    (tmp_path / "untied").mkdir()
    save_file({**untied, "lm_head.weight": untied["model.embed_tokens.weight"].clone()}, tmp_path / "untied/model.safetensors")
    config = json.loads((tmp_path / "one/config.json").read_text())
    (tmp_path / "untied/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    roots = []
    for name in ("one", "shards", "untied"):
        _, weights = run_of(tmp_path / name)
        roots.append(weights.put_into(BlobStore(tmp_path / "store")))
    assert len(set(roots)) == 1
    assert run_of(tmp_path / "one", stages=2)[1].put_into(BlobStore(tmp_path / "store")) != roots[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_exactly(dtype: torch.dtype, tmp_path: Path):
    made(tmp_path / "hub", "qwen2", {})
    path = tmp_path / "hub/model.safetensors"
    halves = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(halves, path)
    run, weights = run_of(tmp_path / "hub")
    store = BlobStore(tmp_path / "store")
    for stage in chain_of(run, store, weights.put_into(store)):
        for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
            assert torch.equal(parameter, halves[spec.name].float())


def test_numbers_that_machines_treat_differently_begin_as_zero(tmp_path: Path):
    made(tmp_path / "hub", "llama", {})
    path = tmp_path / "hub/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][:4] = torch.tensor([1e-40, -1e-40, 2.0**-126, 1.0])
    save_file(tensors, path)
    run, weights = run_of(tmp_path / "hub", stages=1)
    store = BlobStore(tmp_path / "store")
    [stage] = chain_of(run, store, weights.put_into(store))
    assert stage.model.norm.weight[:4].tolist() == [0.0, 0.0, 2.0**-126, 1.0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "of type gpt2; what can be trained here: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu; the layers here compute silu"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"logit_scale": 2.0}, "logit_scale = 2.0, and a run's manifest cannot"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "theirs.py"}}, "auto_map"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"layer_types": [{}]}, "is no configuration of a llama"),
        ({"hidden_size": "32"}, 'says hidden_size = "32"'),
        ({"num_attention_heads": 0}, "says num_attention_heads = 0"),
        ({"rope_theta": "x", "rope_parameters": None}, "says rope_theta"),
        ({"rope_scaling": [], "rope_parameters": None}, "says rope_scaling"),
        ({"rope_parameters": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two types in rope_parameters"),
        ({"dtype": "os.system"}, "is no configuration of a llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of each head"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(changes: dict[str, Any], sentence: str, tmp_path: Path):
    made(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as refused:
        read_model(tmp_path)
    assert sentence in str(refused.value)


def test_what_says_nothing_of_the_mathematics_is_no_reason_to_refuse(tmp_path: Path):
    made(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    more = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {},
        "eos_token_id": [1, 2],
        "new": None,
    }
    path.write_text(json.dumps({**said, **more}))
    assert run_of(tmp_path)[0].model.config.model_type == "llama"


def test_an_old_config_says_the_same(tmp_path: Path):
    """Check the format before transformers 5: rope_theta beside rope_scaling, whose type is called `type`."""
    made(tmp_path, "llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 5e5}})
    fields, _ = read_model(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    rope = said.pop("rope_parameters")
    said["rope_theta"] = rope.pop("rope_theta")
    said["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    path.write_text(json.dumps(said))
    assert read_model(tmp_path)[0] == fields


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mistral", {"sliding_window": 8}, "sliding_window 8 is shorter than sequence_length 24"),
        ("llama", {"max_position_embeddings": 16}, "sequence_length 24 is above config.max_position_embeddings 16"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "finetuned": True}}, "finetuned"),
    ],
)
def test_what_no_run_of_it_could_be_is_refused(family: str, changes: dict[str, Any], sentence: str, tmp_path: Path):
    made(tmp_path, family, changes)
    with pytest.raises(ValueError, match=sentence):
        run_of(tmp_path)


def test_a_window_of_qwen_that_is_not_used_is_none(tmp_path: Path):
    made(tmp_path, "qwen2", {"use_sliding_window": False, "sliding_window": 8})
    run_of(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "use_sliding_window": True, "sliding_window": 8}))
    with pytest.raises(ConfigError, match="use_sliding_window = True"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks lm_head.weight"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            "q_norm.weight, and a llama",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight is F32 of 31; wanted: 32"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight is I8"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("nan")), "numbers that are not finite"),
    ],
)
def test_weights_that_are_not_the_model_s_are_refused(spoil: Any, sentence: str, tmp_path: Path):
    made(tmp_path / "hub", "llama", {})
    path = tmp_path / "hub/model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path / "hub")[1].put_into(BlobStore(tmp_path / "store"))
    assert sentence in str(refused.value)
    assert not any(path.name.endswith(".tmp") for path in (tmp_path / "store").glob("*"))


def test_an_index_that_names_what_is_not_in_its_file_is_a_sentence(tmp_path: Path):
    made(tmp_path, "llama", {})
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"part.safetensors holds no .*, though the index says so"):
        run_of(tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_a_head_that_is_not_the_tied_embedding_is_refused_and_one_that_is_imported(shards: bool, tmp_path: Path):
    """Check such a head: transformers 5 uses it and transformers 4 drops it, so one folder would be two models."""
    made(tmp_path, "llama", {"tie_word_embeddings": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    if shards:  # of which the index names only the tensors that a tied model has
        path.unlink()
        path = tmp_path / "part.safetensors"
        index = {"weight_map": dict.fromkeys(tensors, path.name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    run, store = manifest(), BlobStore(tmp_path / "store")
    roots = []
    for head in ({}, {"lm_head.weight": embedding.clone()}):
        save_file({**tensors, **head}, path)
        run, weights = run_of(tmp_path)
        roots.append(weights.put_into(store))
    assert len(set(roots)) == 1
    assert run.model.config.model_type == "llama"
    last = embedding.clone()
    last[-1, -1] += 1e-3
    for other in (embedding * 2, last, embedding[:-1].clone(), embedding.to(torch.float64)):
        save_file({**tensors, "lm_head.weight": other}, path)
        with pytest.raises(ConfigError, match=r"tie_word_embeddings = true, and lm_head\.weight is not"):
            run_of(tmp_path)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}}, "original_max_position"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "high_freq_factor"),
    ],
)
def test_a_config_that_says_two_frequencies_is_refused(said: dict[str, Any], key: str, tmp_path: Path):
    made(tmp_path, "llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 5e5}})
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, **said}))
    with pytest.raises(ConfigError, match=f"says {key}.*rope_parameters.*remove the wrong one"):
        read_model(tmp_path)
    same = {"rope_theta": 500_000, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16, "type": "llama3"}}
    path.write_text(json.dumps({**whole, **same}))
    assert read_model(tmp_path)[0]["rope_parameters"]["factor"] == 8.0


@pytest.mark.parametrize("index", [None, "[]", '{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}'])
def test_a_folder_without_weights_says_so(index: str | None, tmp_path: Path):
    made(tmp_path, "llama", {})
    (tmp_path / "model.safetensors").unlink()
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"holds neither model.safetensors nor a good"):
        run_of(tmp_path)
