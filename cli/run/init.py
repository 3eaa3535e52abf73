"""`dilocox init RUN.toml`: the owner's key and a commented run file from a preset."""

import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from dilocox.cli.common import beside, check_place, errors, fail
from dilocox.cli.exit_codes import Exit
from dilocox.cli.progress import working
from dilocox.cli.run.init_like import fitted
from dilocox.cli.run.seed_state import compute_with_bar
from dilocox.node.data.build import build_stdlib
from dilocox.node.data.finding import STDLIB
from dilocox.node.data.verify import check_whole
from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import BYTES, Corpus, check_fits
from dilocox.protocol.run.manifest import NAME, RUN_NAME, Manifest
from dilocox.protocol.run.model import Target
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.corpus_store import last_built, library, parse_folders, weights_library
from dilocox.transport.store.data_directory import format_identity, load_identity
from dilocox.transport.store.files import read_at_most, write_new

__all__ = ["averaging", "init", "preset_names", "render_preset"]


VOCABULARY_UNIT = 64
MACHINES = 2
"""Machines that begin a run, without another number."""
QUORUM = 2
"""Clusters that a round needs to count anybody, where so many begin the run."""
CHAT = "loss_mask = true          # conversations: what is answered is trained on, and evaluated"
ADAPTERS = """[compression]
codec = "int4"            # adapters are of low rank already

"""
AVERAGING = (
    (
        r"^learning_rate = 1\.0[36] .*\nmomentum = 0\.\d.*\n",
        "learning_rate = 1.0       # plain averaging; presets go as far as was measured from random weights on one text\n"
        "momentum = 0.0\n",
    ),
    (r"^lead_weight = 1\.0", "lead_weight = 0.5"),
    (r"^muon_momentum = 0\.9\n", ""),
    (r"^muon_learning_rate = 0\.008 .*\n", ""),
    (
        r'^codec = "int2" .*\n',
        'codec = "topk-int2"\n'
        "k = 760                   # values kept of every 4,096 (they compete over the whole stage)\n"
        "entropy_coding = true\n",
    ),
)
"""Lines of presets that belong together, and their replacement for models that were not measured."""
PRIVATE = "private = true            # each cluster brings its own: dilocox node --private DIR"


def preset_names() -> list[str]:
    return sorted(
        item.name.removesuffix(".toml") for item in files("dilocox.node.presets").iterdir() if item.name.endswith(".toml")
    )


def render_preset(
    preset: str,
    name: str,
    owner: str,
    coordinator: str | None = None,
    data: str = STDLIB,
    digest: bytes = bytes(32),
    machines: int | None = None,
) -> str:
    """Return the run file's text. `coordinator`: its peer id, unless it is the owner's. `digest`: of the corpus `data`; zeros where
    only the sizes matter. `machines`: clusters that begin the run (default: the preset's number)."""
    text = (files("dilocox.node.presets") / f"{preset}.toml").read_text()
    named = f'"{owner}"'
    if coordinator is not None:
        named += f'\n# Who signs the commits: `dilocox id --home` with its folder.\ncoordinator = "{coordinator}"'
    text = text.replace("{data}", data).replace("{digest}", digest.hex())
    if machines is not None:
        text = _set_count(_set_count(text, "start_clusters", machines), "min_clusters", min(QUORUM, machines))
    return text.replace("{name}", name).replace('"{owner}"', named)


def _set_count(text: str, key: str, count: int) -> str:
    """Replace the number of a key; its comment stays in its column."""
    return re.sub(rf"^{key} = \d+", f"{key} = {count}", text, count=1, flags=re.MULTILINE)


def _ask_machines() -> int:
    """Return how many machines begin the run: asked on a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return MACHINES
    question = "How many machines will begin this run? It starts when so many nodes are here"
    number: int = typer.prompt(question, default=MACHINES, value_proc=_machines, err=True)
    return number


def _machines(text: str) -> int:
    """Parse an answer. Raises BadParameter, upon which it is asked again."""
    if text.isascii() and text.isdigit() and 1 <= int(text) <= limits.CLUSTERS:
        return int(text)
    raise typer.BadParameter(f"{text!r} is not a number from 1 to {limits.CLUSTERS:,}")


def init(
    run_file: Annotated[Path, typer.Argument(help="The run file to write, such as RUN.toml.")],
    preset: Annotated[str, typer.Option(help="Which preset to start from.")] = "tiny",
    machines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.CLUSTERS,
            help="How many machines begin the run: the first round opens when so many are here (default: asked on a terminal, "
            f"else {MACHINES}).",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: the file's).")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="PEER", help="Who signs the commits: `dilocox id --home` there (default: the owner)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|NAME=DIR", help="A corpus that `dilocox data build` made (default: the standard library's text)."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Each cluster trains on text of its own; --data is what all evaluate on.")
    ] = False,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Begin with the model in this Hugging Face folder: config.json and safetensors."
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="With --from: into how many to split it (default: the preset's).")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="With --from: of training (default: the preset's).")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(min=1, metavar="RANK", help="With --from: train adapters of this rank, and freeze the weights."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINES", help='Write stages, codec, H and deadlines for clusters of such machines: "8xh100 @1gbit".'
        ),
    ] = None,
) -> None:
    """Make the owner's key and a commented run file; by default on the text of Python's standard library."""
    if preset not in preset_names():
        fail(f"no preset {preset}", Exit.USAGE, f"one of: {', '.join(preset_names())}")
    key = beside(run_file, ".key")
    if key == run_file:
        fail(f"{run_file} is where the owner's key goes", Exit.USAGE, f"name the run file {beside(run_file, '.toml')}")
    called = name or run_file.stem
    if not re.fullmatch(RUN_NAME, called):
        does = "--name NAME: up to 64 letters of English, digits, dots, dashes and underscores"
        fail(f"no run can be called {called}", Exit.USAGE, does)
    if run_file.exists():
        fail(f"{run_file} exists already", Exit.USAGE, "choose another name, or remove it")
    check_place(run_file)
    machines = machines or _ask_machines()
    fits: list[str] = []
    secret = None if key.exists() else os.urandom(32)
    owner = load_identity(key) if secret is None else Identity(secret)
    with working("reading and checking the data"):
        source, folder = _choose_data(data)
        digest = last_built(folder)
        corpus = check_whole(BlobStore(folder), digest)
    text = render_preset(preset, called, owner.key.hex(), coordinator, source, digest, machines)
    if private:
        text = text.replace("[data]\n", f"[data]\n{PRIVATE}\n", 1)
    if private or begin is not None:
        text = averaging(text)
    if corpus.chat is not None:
        text = text.replace("[data]\n", f"[data]\n{CHAT}\n", 1)
        text = re.sub(
            r"^sequence_length = \d+", f"sequence_length = {corpus.chat.sequence_length}", text, count=1, flags=re.MULTILINE
        )
    if begin is None:
        if stages or sequence_length or lora:
            fail("--stages, --sequence-length and --lora go with --from", Exit.USAGE, f"else edit {run_file}")
        text = _with_vocabulary(text, corpus.vocabulary_size)
        if like is not None:
            text, fits = fitted(text, machines, like)
        manifest = Manifest.from_toml(text)  # before anything is written: a refused init leaves nothing behind
        check_fits(manifest, corpus)
        text, manifest = _with_seed_state(text, manifest)
    else:
        if like is not None:
            fail("--like goes without --from", Exit.USAGE, f"name --stages, and see `dilocox plan {run_file}`")
        text, manifest = _imported(begin, text, corpus, stages, sequence_length, lora)
    made = False
    try:
        if secret is not None:
            write_new(key, format_identity(secret), mode=0o600)
            made = True
        write_new(run_file, text.encode())
    except OSError:
        if made:
            key.unlink()
        raise
    for sentence in fits:
        errors.print(sentence, highlight=False, soft_wrap=True)
    errors.print(f"wrote {run_file} and {key}; keep the key: it signs the run", highlight=False)
    errors.print(f"run id {manifest.run_id.hex()} (changes with every edit)", highlight=False)
    errors.print(f"{manifest.begins} (rounds.start_clusters)", highlight=False)
    at = "" if folder == library(source) else f" --data {source}={folder}"
    errors.print(f"next: dilocox coordinator {run_file}{at} --host ADDRESS", highlight=False, soft_wrap=True)
    errors.print("  ADDRESS is how other machines reach this one; without --host the link works on this machine only")


def averaging(text: str) -> str:
    """Return a preset's text with plain averaging. The paper's preset stays as it is."""
    for pattern, instead in AVERAGING:
        text = re.sub(pattern, instead, text, count=1, flags=re.MULTILINE)
    return text


def _imported(
    folder: Path, text: str, corpus: Corpus, stages: int | None, sequence_length: int | None, rank: int | None
) -> tuple[str, Manifest]:
    """The run file with the model of a Hugging Face folder instead of the preset's, whose weights the run imports,
    or, with a `rank`, what adapters of that are added to. Raises ConfigError, before anything is written, where folder, data and
    run do not fit each other."""
    from dilocox.node.training.hf.hf_import import Weights, read_model  # torch loads only here

    preset = Manifest.from_toml(text).model
    config, tied = read_model(folder)
    laid_out = None if corpus.chat is None else corpus.chat.sequence_length
    fields: dict[str, Any] = {
        "sequence_length": sequence_length or laid_out or min(preset.sequence_length, config["max_position_embeddings"]),
        "stages": stages or min(preset.stages, config["num_hidden_layers"] + (2 if rank is None else 0)),
    }
    lora: dict[str, Any] = {}
    if rank is not None:
        fields["lora"] = lora = {"rank": rank, "alpha": 2.0 * rank, "targets": list(get_args(Target)), "base": bytes(32).hex()}
        text = re.sub(r"^\[compression\]\n.*?(?=^\[)", ADAPTERS, text, count=1, flags=re.MULTILINE | re.DOTALL)
    manifest = Manifest.from_toml(_with_model(text, folder, fields, config))
    _check_tokenizer(folder, corpus)
    check_fits(manifest, corpus)
    weights = Weights(folder, manifest.model, tied)
    with working("importing the model", manifest.model.stages) as bar:
        root = weights.put_into(BlobStore(weights_library()), lambda stage: bar.at(stage + 1))
    named = {"initial": root.hex()} if rank is None else {"lora": {**lora, "base": root.hex()}}
    text = _with_model(text, folder, {**fields, **named}, config)
    return text, Manifest.from_toml(text)


def _with_seed_state(text: str, manifest: Manifest) -> tuple[str, Manifest]:
    """Name the initial state in the run file, so that no unknown peer can begin the run with another."""
    with working("computing the initial state") as bar:
        root = compute_with_bar(manifest.model, bar)
    line = f'seed_state = "{root.hex()}" # of this model: after a change of [model] `dilocox check` says the new one\n'
    text = re.sub(r"^stages = .*\n", lambda found: found[0] + line, text, count=1, flags=re.MULTILINE)
    return text, Manifest.from_toml(text)


def _check_tokenizer(folder: Path, corpus: Corpus) -> None:
    """Raises ConfigError where the folder has a tokenizer, and the data were made with another."""
    path = folder / "tokenizer.json"
    if path.exists() and corpus.tokenizer != digest_of([read_at_most(path, limits.TOKENIZER_BYTES)]).hex():
        raise ConfigError(
            f"the data's tokens are {'bytes' if corpus.tokenizer == BYTES else 'of another tokenizer'}, and the model's are of"
            f" {path}: make data with `dilocox data build NAME SOURCE --tokenizer {path}`, and name them with --data NAME"
        )


def _with_model(text: str, folder: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a preset's text with another [model] and [model.config]."""
    says = re.sub(r"[^\x20-\x7e]", "?", folder.resolve().name)
    first = f"[model]                   # of {says}; its config, stages and initial belong together"
    section = f"{first}\n{_lines(fields)}\n[model.config]            # keys of its Hugging Face config.json\n{_lines(config)}\n"
    heading = f"# {says}, trained further. Its learning rates are those of the preset: look at them.\n"
    text = heading + text.partition("\n")[2]
    found = re.compile(r"^\[model\]\n.*?(?=^\[(?!model))", re.MULTILINE | re.DOTALL)
    return found.sub(lambda _: section, text, count=1)


def _lines(fields: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items())


def _toml(value: Any) -> str:
    """Return a string, a number or a table of them in TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def _key(name: str) -> str:
    """Return a key, quoted if necessary: a config.json may contain any key."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name)


def _with_vocabulary(text: str, needed: int) -> str:
    """A preset's vocabulary, as large as the tokenizer's: rounded up, which makes the embedding's matrix a shape that GPUs like."""

    def larger(found: re.Match[str]) -> str:
        return found[0] if int(found[2]) >= needed else f"{found[1]}{-(-needed // VOCABULARY_UNIT) * VOCABULARY_UNIT}"

    return re.sub(r"^(vocab_size = )(\d+).*$", larger, text, count=1, flags=re.MULTILINE)


def _choose_data(data: str | None) -> tuple[str, Path]:
    """(NAME, DIR). Raises ConfigError."""
    if data is None:
        build_stdlib(library(STDLIB))
        return STDLIB, library(STDLIB)
    if "=" not in data:
        if not re.fullmatch(NAME, data):
            raise ConfigError(f"--data {data[:80]}: write NAME, or NAME=DIR, such as wikitext=/data/wikitext")
        if not library(data).is_dir():
            raise ConfigError(f"--data {data}: there is no corpus of this name. Make one: dilocox data build {data} SOURCE…")
        data = f"{data}={library(data)}"
    [(name, folder)] = parse_folders([data]).items()
    return name, folder
