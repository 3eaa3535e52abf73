"""`dilocox init RUN.toml`: the owner's key and a commented run file from a preset."""

import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import errors, fail
from dilocox.node.data.build import build_stdlib
from dilocox.node.data.check import check_whole
from dilocox.node.data.sources import STDLIB
from dilocox.protocol.corpus import check_fits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.manifest import Manifest
from dilocox.transport.blobs import BlobStore
from dilocox.transport.corpora import last_built, library, parse_folders
from dilocox.transport.data_directory import format_identity, load_identity
from dilocox.transport.files import write_new

__all__ = ["init", "preset_names", "render_preset"]


VOCABULARY_UNIT = 64


def preset_names() -> list[str]:
    return sorted(
        item.name.removesuffix(".toml") for item in files("dilocox.node.presets").iterdir() if item.name.endswith(".toml")
    )


def render_preset(
    preset: str, name: str, owner: str, coordinator: str | None = None, data: str = STDLIB, digest: bytes = bytes(32)
) -> str:
    """The run file's text. `coordinator`: its peer id, where that is not the owner's. `digest`: of the corpus `data`; that of none
    where only the sizes matter."""
    text = (files("dilocox.node.presets") / f"{preset}.toml").read_text()
    named = f'"{owner}"'
    if coordinator is not None:
        named += f'\n# Who signs the commits: `dilocox id --home` with its folder.\ncoordinator = "{coordinator}"'
    text = text.replace("{data}", data).replace("{digest}", digest.hex())
    return text.replace("{name}", name).replace('"{owner}"', named)


def init(
    run_file: Annotated[Path, typer.Argument(help="The run file to write, such as RUN.toml.")],
    preset: Annotated[str, typer.Option(help="Which preset to start from.")] = "tiny",
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
) -> None:
    """Make the owner's key and a commented run file; by default on the text of Python's standard library."""
    if preset not in preset_names():
        fail(f"no preset {preset}", 2, f"one of: {', '.join(preset_names())}")
    key = run_file.with_suffix(".key")
    if key == run_file:
        fail(f"{run_file} is where the owner's key goes", 2, f"name the run file {run_file.with_suffix('.toml')}")
    if run_file.exists():
        fail(f"{run_file} exists already", 2, "choose another name, or remove it")
    secret = None if key.exists() else os.urandom(32)
    owner = load_identity(key) if secret is None else Identity(secret)
    source, folder = _choose_data(data)
    digest = last_built(folder)
    corpus = check_whole(BlobStore(folder), digest)
    text = render_preset(preset, name or run_file.stem, owner.key.hex(), coordinator, source, digest)
    text = _with_vocabulary(text, corpus.vocabulary_size)
    manifest = Manifest.from_toml(text)  # before anything is written: a refused init leaves nothing behind
    check_fits(manifest, corpus)
    made = False
    try:
        if secret is not None:
            write_new(key, format_identity(secret), mode=0o600)
            made = True
        write_new(run_file, text.encode())
    except OSError as error:
        if made:
            key.unlink()
        fail(f"{run_file} cannot be written: {error}", 2, "choose a folder that is there and that you may write to")
    errors.print(f"wrote {run_file} and {key}; keep the key: it signs the run", highlight=False)
    errors.print(f"run id {manifest.run_id.hex()} (changes with every edit)", highlight=False)
    at = "" if folder == library(source) else f" --data {source}={folder}"
    errors.print(f"next: dilocox coordinator {run_file}{at}", highlight=False, soft_wrap=True)


def _with_vocabulary(text: str, needed: int) -> str:
    """A preset's vocabulary, as large as the tokenizer's: rounded up, which makes the embedding's matrix a shape that GPUs like."""

    def larger(found: re.Match[str]) -> str:
        return found[0] if int(found[2]) >= needed else f"{found[1]}{-(-needed // VOCABULARY_UNIT) * VOCABULARY_UNIT}"

    return re.sub(r"^(vocabulary_size = )(\d+).*$", larger, text, count=1, flags=re.MULTILINE)


def _choose_data(data: str | None) -> tuple[str, Path]:
    """(NAME, DIR). Raises ConfigError."""
    if data is None:
        build_stdlib(library(STDLIB))
        return STDLIB, library(STDLIB)
    if "=" not in data:
        data = f"{data}={library(data)}"
    [(name, folder)] = parse_folders([data]).items()
    return name, folder
