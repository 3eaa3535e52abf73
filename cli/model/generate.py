"""`dilocox generate`: text from a model, to see what it learned."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    ArchiveKeyOption,
    DataOption,
    HomeOption,
    JsonOption,
    ReadArchiveOption,
    ReadOption,
    archive_place,
    console,
    fail,
    print_json,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.model.export import write_model
from dilocox.cli.progress import working
from dilocox.transport.store.corpus_store import parse_folders

__all__ = ["generate"]


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="An exported folder (default: the newest agreed state of a node, or of --join)."),
    ] = None,
    home: HomeOption = None,
    join: ReadOption = None,
    archive: ReadArchiveOption = None,
    archive_key: ArchiveKeyOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="One seed gives one text on one machine.")] = 0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue the text, even if the model has a chat template to answer with.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with the committed model, or let a chat model answer it, with transformers."""
    if folder is not None and (home is not None or join is not None or archive is not None or data):
        fail("a folder and --home, --join, --archive or --data", Exit.USAGE, "remove one: an exported folder needs no run")
    if prompt != prompt.encode("utf-8", "replace").decode():
        fail("--prompt is not text in UTF-8", Exit.USAGE, "pass it in UTF-8")
    with tempfile.TemporaryDirectory(prefix="dilocox-generate-") as scratch, working("loading the model") as bar:
        if folder is None:
            folder = Path(scratch) / "model"
            write_model(folder, home, join, archive_place(archive, archive_key), None, parse_folders(data or ()), bar)
        elif not (folder / "config.json").is_file():
            fail(f"{folder} contains no model", Exit.USAGE, "pass a folder that `dilocox export DIR` wrote")
        bar.begin("generating")
        from dilocox.node.training.hf.generate import generate_text  # torch loads only here

        made = generate_text(folder, prompt, tokens, temperature, seed, plain)
    if as_json:
        print_json({"prompt": prompt, "text": made.text})
    else:
        console.print(made.text if made.answers else prompt + made.text, highlight=False, soft_wrap=True)
