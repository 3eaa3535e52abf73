"""Exports as readers older than transformers 5 read them: transformers 4, what bundles it, converters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dilocox.node.data.chat import FATES
from dilocox.node.data.tokenizers import byte_tokenizer
from dilocox.node.training.hf.export import Vocabulary, export_model
from dilocox.node.training.hf.hf_import import read_model
from dilocox.node.training.model.model import FAMILIES
from dilocox.node.training.model.trainer import initial_state
from dilocox.protocol.run.corpus import TEMPLATE_DATE, Chat
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import manifest

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "attention_factor": 1.2,
        "truncate": False,
    },
}
KEYS = {
    "llama": {"attention_bias", "mlp_bias", "head_dim", "pretraining_tp"},
    "mistral": {"sliding_window", "head_dim"},
    "qwen2": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "head_dim"},
}
"""Keys that the configuration classes of transformers 4 read, by family, beside OF_ALL."""
OF_ALL = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "torch_dtype",
    "attention_dropout",
    "tie_word_embeddings",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
OLD = ("transformers==4.57.6", "huggingface-hub<1", "tokenizers>=0.22,<0.23")
NEEDED = ("requests", "urllib3", "idna", "certifi", "charset-normalizer")
COMPUTE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
for folder in sys.argv[2:]:
    tokens = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens, use_cache=False).logits
    assert logits.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"
    torch.save(logits, folder + "/logits.pt")
"""


def exported(folder: Path, family: str, scaling: str) -> Path:
    """Return an export with attention strong enough that a wrong frequency changes the logits."""
    model = {
        "model_type": family,
        "rope_parameters": {**(SCALINGS[scaling] or {}), "rope_theta": 5e5},
        "max_position_embeddings": 128,
    }
    if family == "qwen3":
        model["head_dim"] = 8
    run, store = manifest(model=model), BlobStore(folder.with_name(folder.name + "-blobs"))
    digests = []
    for number in range(run.model.stages):
        state = initial_state(run, number)
        for spec, values in state.views(state.parameters):
            if len(spec.shape) > 1:
                values.mul_(8.0)
        digests.append(store.put([state.state_bytes()]))
    export_model(run, digests, store, folder, Vocabulary(byte_tokenizer().encode(), 0), "", lambda stage: None)
    return folder


def logits(folder: Path) -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(tokens, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_export_says_what_older_readers_look_for(family: str, scaling: str, tmp_path: Path):
    folder = exported(tmp_path / "model", family, scaling)
    said = json.loads((folder / "config.json").read_text())
    assert said.keys() >= OF_ALL | KEYS[family]
    assert (said["rope_theta"], said["torch_dtype"]) == (5e5, "float32")
    older, expected = said["rope_scaling"], SCALINGS[scaling]
    assert older == (None if expected is None else {**expected, "type": expected["rope_type"]})
    newer = {**(expected or {"rope_type": "default"}), "rope_theta": 5e5}
    assert said["rope_parameters"] == newer
    assert AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters.items() >= newer.items()
    assert read_model(folder)[0]["rope_parameters"] == newer


def test_an_export_names_its_special_tokens_where_older_readers_look(tmp_path: Path):
    run, store = manifest(), BlobStore(tmp_path / "blobs")
    digests = [store.put([initial_state(run, number).state_bytes()]) for number in range(run.model.stages)]
    said: dict[str, Any] = dict.fromkeys(("trained", *FATES), 0)
    said |= {"sequence_length": 8, "template": "{{ x }}", "date": TEMPLATE_DATE}
    chat = Chat.model_validate({**said, "special_tokens": {"bos_token": "a", "eos_token": "b"}})
    vocabulary = Vocabulary(byte_tokenizer().encode(), 0, chat)
    export_model(run, digests, store, tmp_path / "model", vocabulary, "", lambda stage: None)
    special = json.loads((tmp_path / "model" / "special_tokens_map.json").read_text())
    assert special == {"bos_token": "a", "eos_token": "<|endoftext|>"}


@pytest.mark.thorough
def test_transformers_4_computes_what_transformers_5_does(tmp_path: Path):
    old = tmp_path / "old"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(old), *OLD, *NEEDED]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"transformers 4 cannot be installed here: {installed.stderr.strip()[-200:]}")
    folders = [exported(tmp_path / f"{family}-{scaling}", family, scaling) for family in FAMILIES for scaling in SCALINGS]
    done = subprocess.run([sys.executable, "-c", COMPUTE, str(old), *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for folder in folders:
        torch.testing.assert_close(torch.load(folder / "logits.pt"), logits(folder), atol=0, rtol=0)
    kinds = [logits(tmp_path / f"llama-{scaling}") for scaling in ("default", "linear", "llama3", "yarn")]
    assert all(float((kinds[0] - other).abs().max()) > 1e-3 for other in kinds[1:]), "or any frequencies would do"
