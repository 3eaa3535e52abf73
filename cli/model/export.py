"""`dilocox export DIR`: the committed model as a Hugging Face folder, from this machine's disk or from the run's peers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from dilocox.cli.progress import Working, working
from dilocox.cli.sources import reading
from dilocox.node.data.tokenizers import byte_tokenizer
from dilocox.node.data.verify import check_corpus
from dilocox.node.run_reader import RunReader
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.corpus import BYTES, Corpus
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import Folders, corpus_in, library, parse_folders
from dilocox.transport.store.files import whole_folder
from dilocox.views.model_card import model_card

__all__ = [
    "Chosen",
    "Exported",
    "agreed_states",
    "choose",
    "export",
    "fetch_model",
    "held_stages",
    "held_states",
    "write_held",
    "write_model",
]


@dataclass(frozen=True)
class Exported:
    round: int
    """Round whose starting state it is."""
    evaluation_loss: float | None
    trained: bool = True
    """True where a round before it counted a cluster."""


def export(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="New folder to write; with --every: a folder or s3://BUCKET/PREFIX.")
    ],
    home: HomeOption = None,
    join: ReadOption = None,
    archive: ReadArchiveOption = None,
    archive_key: ArchiveKeyOption = None,
    round: Annotated[int | None, typer.Option(help="Export the state before this round (default: the newest).")] = None,
    evaluate: Annotated[bool, typer.Option(help="Load the model with transformers and measure its held-out loss.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="In a run on adapters: export only these, as peft loads them (default: merged).")
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Publish the model in DIR every N rounds until the run ends; beside a node, or with --join.",
        ),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the committed model as a Hugging Face folder: weights, config, tokenizer, model card. With --join, the run's peers
    send it: on any machine, also beside a node with only some of the stages."""
    if every is not None:
        if archive or archive_key or round is not None or evaluate:
            fail(
                "--every and --archive, --archive-key, --round or --evaluate",
                Exit.USAGE,
                "use only one: --every follows the run and publishes the newest state",
            )
        from dilocox.cli.model.publish import publish

        publish(folder, every, home, join, parse_folders(data or ()), adapter, as_json)
        return
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fail(f"{folder} is {'not empty' if target.is_dir() else 'a file'}", Exit.USAGE, "pass a new folder")
    if adapter and evaluate:
        fail("--adapter and --evaluate", Exit.USAGE, "only the merged model can be evaluated: remove --adapter or --evaluate")
    place = archive_place(archive, archive_key)
    with working("searching for the state") as bar, _whole(target) as scratch:
        exported = write_model(scratch, home, join, place, round, parse_folders(data or ()), bar, evaluate, adapter)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "round": exported.round,
                "evaluation_loss": exported.evaluation_loss,
                "trained": exported.trained,
            }
        )
        return
    console.print(f"wrote {folder}: the state before round {exported.round}", highlight=False)
    if not exported.trained:
        console.print("it is not trained: no round has counted a cluster yet, so this is the initial state", highlight=False)
    if evaluate:
        console.print(f"held-out loss with transformers: {exported.evaluation_loss:.4f}", highlight=False)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield the folder to write to, so that the target appears complete. An existing empty folder is filled directly: it
    may be a volume."""
    if target.exists():
        yield target
        return
    with whole_folder(target) as scratch:
        yield scratch


def write_model(
    folder: Path,
    home: Path | None,
    join: str | None,
    place: ArchivePlace | None,
    round: int | None,
    folders: Folders,
    bar: Working,
    evaluate: bool = False,
    adapter: bool = False,
) -> Exported:
    """Into a new folder; `adapter`: what a run on adapters trained, alone. `round`: whose starting state; None: the newest that is
    agreed and to be had. Raises ConfigError or LocalError where something for it is not."""

    async def fetch(reader: RunReader) -> int:
        return await fetch_model(reader, round, folders, adapter)

    with reading(join, home, place, fetch) as (chains, found):
        return write_held(
            folder, chains[-1], round if join is None and place is None else found, folders, bar, evaluate, adapter
        )


async def fetch_model(reader: RunReader, round: int | None, folders: Folders, adapter: bool) -> int:
    """Fetch what the model needs from the run. Return the round whose starting state it is. Raises LocalError."""
    if not folders:
        await reader.tokenizer()
    if not adapter:
        await reader.frozen()
    return await reader.state(round)


def write_held(
    folder: Path, path: Path, round: int | None, folders: Folders, bar: Working, evaluate: bool = False, adapter: bool = False
) -> Exported:
    """Run `write_model` on the files beside the chain at `path`. A daemon may train on meanwhile, and delete older states."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return _write_held(folder, path, round, folders, bar, evaluate, adapter)
        except FileNotFoundError as error:
            if Path(error.filename or "").parent != path.parent / "blobs":
                raise
            if round is not None or not left:
                raise LocalError(
                    "the node deleted that state during the read, because the run continued: retry, or pass "
                    "--round of a stored state, or --archive"
                ) from error
    raise AssertionError("unreachable")


def _write_held(
    folder: Path, path: Path, round: int | None, folders: Folders, bar: Working, evaluate: bool, adapter: bool
) -> Exported:
    with ChainFile.for_reading(path) as chain:
        manifest, store = chain.manifest, BlobStore(path.parent / "blobs")
        corpus = _corpus_folder(manifest, folders, path.parents[2] / "data", path.parent / "blobs")
        if evaluate:  # before minutes of work
            bar.begin("checking the run's data")
            check_corpus(manifest, corpus)
        chosen = choose(chain, store, round, adapter, bar)
        _write(chosen, manifest, store, folder, corpus, bar)
        trained = any(commit.body.counted for commit in chain.commits() if commit.body.round < chosen.round)
        loss = None
        if evaluate:
            bar.begin("measuring the held-out loss with transformers")
            from dilocox.node.training.hf.evaluate import evaluate_folder

            loss = evaluate_folder(manifest, folder, corpus)
    return Exported(chosen.round, loss, trained)


ATTEMPTS = 5
"""Most tries with a newest state, which a node stores for two rounds."""


@dataclass(frozen=True)
class Chosen:
    """State of a run that becomes a model."""

    round: int
    """Round whose starting state it is."""
    stages: list[bytes]
    """The state's digests."""
    adapter: bool
    """True for the adapter alone, of a run that trained one."""
    card: str


def choose(chain: ChainFile, store: BlobStore, round: int | None, adapter: bool, bar: Working) -> Chosen:
    """The newest agreed state that is here, or that before `round`. Reads all of it. Raises ConfigError where the run has no such
    thing, LocalError where it is not whole on this disk."""
    model = chain.manifest.model
    if adapter and model.lora is None:
        raise ConfigError("this run trains all parameters, not adapters: remove --adapter")
    frozen = [] if adapter or model.lora is None else store.stage_digests(model.imported)

    def sound(what: str, digests: list[bytes]) -> bool:
        return all(map(store.verify, bar.each(what, digests, len(digests))))

    if not adapter and model.lora is not None and not (frozen and sound("checking the frozen weights", frozen)):
        raise LocalError(
            "the frozen weights on this disk are incomplete: pass --join LINK to fetch them, or --adapter to "
            "export without them"
        )
    found = held_states(chain, store)
    held = [number for number in found if round in (None, number)]
    if not held:
        wanted = "" if round is None else f" before round {round}"
        raise ConfigError(f"no agreed state{wanted} on this disk: pass --home of another node, or --join LINK")
    number, stages = held[-1], found[held[-1]]
    if not sound("checking the state", stages):
        raise LocalError(f"the state before round {number} on this disk is damaged: start its node, which fetches it again")
    commits = bar.each("reading the chain", chain.commits(), chain.length)
    return Chosen(number, stages, adapter, model_card(chain.manifest, commits, number))


def _write(chosen: Chosen, manifest: Manifest, store: BlobStore, folder: Path, place: Path, bar: Working) -> None:
    """Write the model. `place`: folder of the run's tokenizer."""
    corpus, tokenizer = _tokenizer_of(manifest, place)
    bar.begin("writing the model", len(chosen.stages))
    from dilocox.node.training.hf.export import Vocabulary, export_adapter, export_model  # torch loads only here

    vocabulary = Vocabulary(tokenizer, corpus.end_token, corpus.chat)
    if chosen.adapter:
        export_adapter(manifest, chosen.stages, store, folder, vocabulary, chosen.card)
    else:
        wrote = lambda stage: bar.at(stage + 1)  # noqa: E731
        export_model(manifest, chosen.stages, store, folder, vocabulary, chosen.card, wrote)


def held_states(chain: ChainFile, store: BlobStore) -> dict[int, list[bytes]]:
    """Stage digests of the agreed states that are here, whole as far as is known, by the round that starts from each."""
    stages = chain.manifest.model.stages
    return {n: digests for n, root in agreed_states(chain).items() if (digests := held_stages(root, stages, store))}


def agreed_states(chain: ChainFile, first: int = 0) -> dict[int, bytes]:
    """Roots, by the round that starts from each, from round `first` on."""
    return {commit.body.round: commit.body.state for commit in chain.commits(first) if commit.body.round}


def held_stages(root: bytes, stages: int, store: BlobStore) -> list[bytes]:
    """Digests of the state with this root; empty where it is not here, whole as far as is known."""
    digests = store.stage_digests(root)
    return digests if len(digests) == stages and all(digest in store for digest in digests) else []


def _corpus_folder(manifest: Manifest, folders: Folders, *here: Path) -> Path:
    """Return the folder of the run's corpus, or of its document and tokenizer: the named one, else `here`, else where it
    was built. Raises ConfigError."""
    name, digest = manifest.data.name, bytes.fromhex(manifest.data.digest)
    if folders and name not in folders:
        raise ConfigError(f"the run's data are named {name}, not {', '.join(folders)}: pass --data {name}=DIR")
    places = [folders[name]] if folders else [*here, library(name)]
    for place in places:
        if place.is_dir() and corpus_in(BlobStore(place, ours=False), digest) is not None:
            return place
    raise ConfigError(
        f"the run's data {name} (corpus {digest.hex()}), which contain its tokenizer, are not in {places[0]}: "
        f"pass --data {name}=DIR"
    )


def _tokenizer_of(manifest: Manifest, place: Path) -> tuple[Corpus, bytes]:
    """The run's corpus, and its tokenizer as JSON. Raises ConfigError where that is not there."""
    store = BlobStore(place, ours=False)
    corpus = corpus_in(store, bytes.fromhex(manifest.data.digest))
    assert corpus is not None, "it was found there"
    if corpus.tokenizer == BYTES:
        return corpus, byte_tokenizer().encode()
    digest = bytes.fromhex(corpus.tokenizer)
    if not store.sound(digest):
        raise ConfigError(f"the tokenizer of the run's data {digest.hex()} is missing or damaged in {place}")
    return corpus, store.read(digest)
