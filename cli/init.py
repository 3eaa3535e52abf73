"""`dilocox init RUN.toml`: the owner's key and a commented run file from a preset."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import errors, fail
from dilocox.protocol.manifest import Manifest
from dilocox.transport.blobs import write_atomically
from dilocox.transport.data_directory import load_identity

__all__ = ["init", "preset_names", "render_preset"]


def preset_names() -> list[str]:
    return sorted(
        item.name.removesuffix(".toml") for item in files("dilocox.node.presets").iterdir() if item.name.endswith(".toml")
    )


def render_preset(preset: str, name: str, owner: str) -> str:
    """The run file's text."""
    text = (files("dilocox.node.presets") / f"{preset}.toml").read_text()
    return text.replace("{name}", name).replace("{owner}", owner)


def init(
    run_file: Annotated[Path, typer.Argument(help="The run file to write, such as RUN.toml.")],
    preset: Annotated[str, typer.Option(help="Which preset to start from.")] = "tiny",
    name: Annotated[str | None, typer.Option(help="The run's name (default: the file's).")] = None,
) -> None:
    """Make the owner's key and a commented run file."""
    if preset not in preset_names():
        fail(f"no preset {preset}", 2, f"one of: {', '.join(preset_names())}")
    if run_file.exists():
        fail(f"{run_file} exists already", 2, "choose another name, or remove it")
    key = run_file.with_suffix(".key")
    owner = load_identity(key)
    text = render_preset(preset, name or run_file.stem, owner.key.hex())
    manifest = Manifest.from_toml(text)
    write_atomically(run_file, text.encode())
    errors.print(f"wrote {run_file} and {key}; keep the key: it signs the run", highlight=False)
    errors.print(f"run id {manifest.run_id.hex()} (changes with every edit)", highlight=False)
    errors.print(f"next: dilocox coordinator {run_file}", highlight=False)
