"""`dilocox export DIR`: the committed model as a Hugging Face folder, from this machine's disk or from the run's peers."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from dilocox.cli.common import DataOption, HomeOption, JsonOption, ReadOption, console, errors, fail, print_json
from dilocox.cli.reading import reading
from dilocox.node.data.check import check_corpus
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import parse_folders

__all__ = ["export"]


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write config.json and safetensors.")],
    home: HomeOption = None,
    join: ReadOption = None,
    round: Annotated[int | None, typer.Option(help="The state that this round starts from (default: the newest).")] = None,
    evaluate: Annotated[bool, typer.Option(help="Load it with transformers and measure its held-out loss.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the committed model as a Hugging Face folder. With --join it is read from the run: from any machine, and where this
    machine's folder has some of its stages only."""
    if folder.exists() and any(folder.iterdir()):
        fail(f"{folder} is not empty", 2, "name a new folder")
    folders = parse_folders(data or ())
    with reading(join, home, lambda reader: reader.state(round)) as (chains, found):
        _export(folder, chains, found if join else round, evaluate, folders, as_json)


def _export(
    folder: Path, chains: list[Path], round: int | None, evaluate: bool, folders: dict[str, Path], as_json: bool
) -> None:
    with ChainFile.for_reading(chains[-1]) as chain:
        if evaluate:  # before minutes of work
            data_store = check_corpus(chain.manifest, folders.get(chain.manifest.data.name, chains[-1].parents[2] / "data"))
        store = BlobStore(chains[-1].parent / "blobs")
        stages = chain.manifest.model.stages
        found = {commit.body.round: store.stage_digests(commit.body.state) for commit in chain.commits() if commit.body.round}
        found = {round: digests for round, digests in found.items() if all(digest in store for digest in digests)}
        held = [number for number, digests in found.items() if len(digests) == stages and round in (None, number)]
        if not held:
            fail(
                f"no agreed state{'' if round is None else f' before round {round}'} on this disk",
                2,
                "try another node's --home",
            )
        if not all(store.verify(digest) for digest in found[held[-1]]):
            fail(f"the state before round {held[-1]} is damaged on this disk", help="start its node, which fetches it again")
        from dilocox.node.outer.export import export_model  # torch loads only here

        with Progress(console=errors, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("stages", total=stages)
            export_model(chain.manifest, found[held[-1]], store, folder, lambda stage: bar.update(task, completed=stage + 1))
        report = {"folder": str(folder), "round": held[-1], "evaluation_loss": None}
        if evaluate:
            from dilocox.node.training.evaluate import evaluate_folder

            report["evaluation_loss"] = evaluate_folder(chain.manifest, folder, data_store.folder)
    if as_json:
        print_json(report)
        return
    console.print(f"wrote {folder}: the state before round {report['round']}", highlight=False)
    if evaluate:
        console.print(f"held-out loss with transformers: {report['evaluation_loss']:.4f}", highlight=False)
