"""Tests of `dilocox init --from`: a folder, data and a run file that fit each other, or an error sentence and no file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from dilocox.cli.main import app
from dilocox.node.data.tokenizers import open_encoder, train_tokenizer
from dilocox.node.training.hf.hf_import import Weights, read_model
from dilocox.node.training.model.model import FAMILIES
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import weights_library
from tests.corpora import corpus_of, words
from tests.helpers import manifest

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}


@pytest.fixture(autouse=True)
def library_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))


def hub(folder: Path, family: str = "llama", vocabulary: int = 320, **changes: Any) -> Path:
    config = FAMILIES[family].config(vocab_size=vocabulary, max_position_embeddings=96, **{**SHAPE, **changes})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tokenized(folder: Path, tokenizer: Path | None) -> str:
    """Make a corpus; return its name for `--data`."""
    encoder = open_encoder(str(tokenizer)) if tokenizer else None
    text = corpus_of(folder, words(600, 60), encoder)
    return f"text={text.folder}"


def init(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["init", str(folder / "run.toml"), *options])


def test_a_run_file_of_a_folder_says_all_of_it(tmp_path: Path):
    rope = {**LLAMA3, "original_max_position_embeddings": 32}
    model = hub(tmp_path / 'a "model" #1', "qwen3", head_dim=16, rope_parameters=rope, tie_word_embeddings=True)
    (model / "tokenizer.json").write_text(train_tokenizer(words(50, 20), 300))
    data = tokenized(tmp_path / "text", model / "tokenizer.json")
    done = init(tmp_path, "--data", data, "--from", str(model), "--stages", "4")
    assert done.exit_code == 0, (done.output, done.exception)
    text = (tmp_path / "run.toml").read_text()
    run = Manifest.from_toml(text)
    assert (
        run.model.config.model_type,
        run.model.config.head_dim,
        run.model.stages,
        run.model.config.max_position_embeddings,
    ) == ("qwen3", 16, 4, 96)
    assert run.model.config.rope_parameters.model_dump(exclude_none=True) == rope
    assert run.model.sequence_length == 96, "the preset's 128 are more than it can"
    store = BlobStore(weights_library())
    assert all(store.verify(digest) for digest in (run.model.root, *store.stage_digests(run.model.root)))
    assert len(store.stage_digests(run.model.root)) == 4
    assert "[training]" in text
    assert "A byte-level model" not in text
    assert (run.compression.codec, run.outer.momentum, run.rounds.lead_weight) == ("topk-int2", 0.0, 0.5)


def test_what_a_config_calls_its_keys_does_not_become_lines_of_the_run_file(tmp_path: Path):
    key = "original_max_position_embeddings = 32 }\nseed = 7\n#"
    model = hub(tmp_path / "model", rope_parameters={**LLAMA3, key: 1})
    refused = init(tmp_path, "--data", tokenized(tmp_path / "text", None), "--from", str(model))
    assert "model.config.rope_parameters.original_max_position_embeddings = 32 }" in str(refused.exception)
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[" * 100_000, "recursion"),
        (json.dumps({"model_type": "llama", "rms_norm_eps": float("nan")}), "rms_norm_eps = nan"),
        ('{"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e999}}', "rope_theta = inf"),
    ],
)
def test_a_config_that_is_none_is_named(content: str, sentence: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json.*{sentence}"):
        read_model(tmp_path)


def test_an_index_that_is_none_is_named(tmp_path: Path):
    model = manifest().model
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="recursion"):
        Weights(tmp_path, model, False)


@pytest.mark.parametrize("arguments", [["check", "FILE"], ["coordinator", "FILE"]])
def test_a_device_and_a_fifo_are_refused_before_they_are_opened(arguments: list[str], tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for file, kind in (("/dev/zero", "a device"), (str(tmp_path / "fifo"), "a FIFO")):
        done = CliRunner().invoke(app, [each.replace("FILE", file) for each in arguments])
        assert isinstance(done.exception, ConfigError)
        assert f"{file} is {kind}" in str(done.exception)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_fifo_in_a_model_s_folder_is_refused(name: str, tmp_path: Path):
    model = hub(tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    if name.endswith(".index.json"):
        (model / "model.safetensors").unlink()
    os.mkfifo(model / name)
    refused = init(tmp_path, "--data", tokenized(tmp_path / "text", None), "--from", str(model))
    assert isinstance(refused.exception, ConfigError)
    assert f"{name} is a FIFO" in str(refused.exception)


@pytest.mark.parametrize(
    ("vocabulary", "own_tokenizer", "options", "sentence"),
    [
        (320, True, [], "the data's tokens are bytes, and the model's are of"),
        (200, False, [], "256 tokens, but model.config.vocab_size is 200"),
        (320, False, ["--sequence-length", "97"], "sequence_length 97 is above config.max_position_embeddings 96"),
        (320, False, ["--stages", "6"], "6 stages, but 3 layers"),
        (320, False, ["--from", "nowhere"], "cannot read nowhere/config.json"),
    ],
)
def test_what_does_not_fit_is_a_sentence_and_nothing_is_written(
    vocabulary: int, own_tokenizer: bool, options: list[str], sentence: str, tmp_path: Path
):
    model = hub(tmp_path / "model", vocabulary=vocabulary)
    if own_tokenizer:
        (model / "tokenizer.json").write_text(train_tokenizer(words(50, 20), 300))
    data = tokenized(tmp_path / "text", None)
    refused = init(tmp_path, "--data", data, "--from", str(model), *options)
    assert sentence in str(refused.exception)
    assert not (tmp_path / "run.toml").exists()
    assert not (tmp_path / "run.key").exists()
    assert not weights_library().exists()
