"""`dilocox data build | train-tokenizer | show | free`: text into a corpus, which a run names by its digest."""

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    HomeOption,
    JsonOption,
    check_place,
    console,
    errors,
    fail,
    print_json,
    print_labelled,
    shown,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.progress import working
from dilocox.node.data.build import HELD_OUT_EVERY, build
from dilocox.node.data.chat import FATES, ChatEncoder, open_chat_encoder
from dilocox.node.data.cleanup import held
from dilocox.node.data.finding import Found, find_files
from dilocox.node.data.sources import documents
from dilocox.node.data.tokenizers import Encoder, open_encoder, train_tokenizer
from dilocox.node.data.verify import check_whole
from dilocox.protocol import limits
from dilocox.protocol.run.corpus import BYTES, Chat, Corpus
from dilocox.protocol.run.manifest import NAME
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import DIGEST, last_built, library
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import find_chains, write_new

__all__ = ["app"]

app = typer.Typer(help="Build a corpus from text; a run names it by its digest.", no_args_is_help=True)
SourcesArgument = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE…", help="Text, JSONL or Parquet files, folders of them or of `datasets`; or stdlib."),
]
FieldOption = Annotated[str, typer.Option("--field", help="Field of a JSON line, or column of a table, with the text.")]


@app.command("build")
def build_corpus(
    name: Annotated[str, typer.Argument(help="Name by which runs refer to it.")],
    sources: SourcesArgument,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Folder to write (default: data/NAME in $DILOCOX_HOME, ~/.dilocox)."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizers JSON file, or a Hugging Face folder.")] = BYTES,
    end_token: Annotated[str | None, typer.Option(help="Token that ends a document (default: the tokenizer's).")] = None,
    field: FieldOption = "text",
    held_out_every: Annotated[
        int, typer.Option(min=2, help="One document in this many is held out, chosen by its hash.")
    ] = HELD_OUT_EVERY,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The sources are conversations: messages, or prompt and completion. Answers are trained on."
        ),
    ] = False,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, max=limits.CHAT_TOKENS, help="With --chat: sequence length of the run.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --chat: Jinja template, instead of the tokenizer's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build a corpus: tokens in data shards, and the digest that a run names. The same files in the same order give the same
    digest on every machine."""
    if not re.fullmatch(NAME, name):
        fail(
            f"{name!r} is not a valid name",
            Exit.USAGE,
            "use letters, digits, dots, dashes and underscores, such as wikitext-103",
        )
    folder = to or library(name)
    if folder.exists() and not folder.is_dir():
        fail(f"{folder} is a file", Exit.USAGE, "pass --to with a new folder, or one that `data build` wrote")
    encoder: Encoder | ChatEncoder
    if not chat:
        if sequence_length is not None or chat_template is not None:
            fail(
                "use --sequence-length and --chat-template only with --chat",
                Exit.USAGE,
                "without it, text is cut into sequences while a run reads it",
            )
        encoder = open_encoder(tokenizer, end_token)
    elif sequence_length is None or tokenizer == BYTES:
        fail(
            "--chat needs --sequence-length and --tokenizer",
            Exit.USAGE,
            "the tokenizer's template makes sequences of conversations",
        )
    else:
        encoder = open_chat_encoder(tokenizer, chat_template, end_token, sequence_length)
    files = _find(sources, only_records=chat)
    with working(name, sum(path.stat().st_size for path in files), bytes=True) as bar:
        digest, corpus = build(folder, files, encoder, field, held_out_every, bar.more)
    _print_corpus(folder, digest, corpus, as_json)
    for name_of_fate, why in encoder.reasons.items() if isinstance(encoder, ChatEncoder) else ():
        errors.print(shown(f"{FATES[name_of_fate]}; the first: {why}"), highlight=False, soft_wrap=True)
    errors.print(
        f"next: dilocox init RUN.toml --data {name if to is None else f'{name}={folder}'}", highlight=False, soft_wrap=True
    )


@app.command("train-tokenizer")
def train(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as tokenizer.json.")],
    sources: SourcesArgument,
    vocabulary_size: Annotated[int, typer.Option("--vocabulary", min=257, max=1 << 32, help="Number of tokens.")] = 32768,
    field: FieldOption = "text",
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    if out.exists():
        fail(f"{out} already exists", Exit.USAGE, "pass another name")
    check_place(out)
    files = _find(sources)
    with working("reading", sum(path.stat().st_size for path in files), bytes=True) as bar:

        def texts() -> Iterator[str]:
            for path in files:
                for text, size in documents(path, field):
                    bar.more(size)
                    yield text
            bar.begin("searching for pairs of tokens")  # no less work than reading

        tokenizer = train_tokenizer(texts(), vocabulary_size)
    write_new(out, tokenizer.encode())
    size = open_encoder(str(out)).vocabulary_size
    if size < vocabulary_size:
        errors.print(f"the text has pairs for {size:,} tokens only", highlight=False, soft_wrap=True)
    errors.print(
        f"wrote {out}, {size:,} tokens; next: dilocox data build NAME SOURCE… --tokenizer {out}",
        highlight=False,
        soft_wrap=True,
    )


@app.command("show")
def show(
    place: Annotated[str, typer.Argument(metavar="NAME|DIR", help="Corpus that `data build` wrote.")],
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a corpus, and check its files."""
    folder = Path(place) if (Path(place) / DIGEST).is_file() else library(place)
    digest = last_built(folder)
    with working("reading and checking every file"):
        corpus = check_whole(BlobStore(folder), digest)
    _print_corpus(folder, digest, corpus, as_json)


@app.command("free")
def free(
    home: HomeOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without a question.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete fetched data of finished runs. Corpora that `data build` wrote remain."""
    folder = home or base_folder() / "node"
    if not find_chains(folder):
        errors.print(f"no run under {folder}: nothing to delete", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit
    with closing(DataDirectory(folder)):  # no daemon runs there during the write
        store = BlobStore(folder / "data")
        shelves = held(folder, store)
        gone = [shelf for shelf in shelves if not shelf.needed_by]
        if not as_json:
            for shelf in shelves:
                why = f"stored for {', '.join(shelf.needed_by)}" if shelf.needed_by else "goes"
                console.print(
                    f"{shelf.name or 'used by no run here'}: {shelf.size / 1e6:,.1f} MB, {why}", highlight=False, markup=False
                )
        freed = sum(shelf.size for shelf in gone)
        if gone and not yes and not (sys.stdin.isatty() and typer.confirm(f"Delete {freed / 1e6:,.1f} MB?", err=True)):
            fail("nothing was deleted", Exit.USAGE, "pass --yes")
        for shelf in gone:
            for digest in shelf.blobs:
                store.remove(digest)
    if as_json:
        print_json({"folder": str(store.folder), "freed_bytes": freed, "corpora": [shelf.name for shelf in gone]})
    else:
        console.print(f"deleted {freed / 1e6:,.1f} MB", highlight=False)


def _find(sources: list[str], only_records: bool = False) -> list[Path]:
    """Return the files, after a line on what is read, and one on what is left out."""
    found = Found()
    files = find_files(sources, found, only_records)
    errors.print(shown(str(found)), highlight=False, soft_wrap=True)
    return files


def _print_corpus(folder: Path, digest: bytes, corpus: Corpus, as_json: bool) -> None:
    held_out = sum(shard.tokens for shard in corpus.held_out)
    if as_json:
        facts = corpus.model_dump(mode="json") | {"tokens": corpus.tokens, "held_out_tokens": held_out}
        print_json({"folder": str(folder), "digest": digest.hex(), **facts})
        return
    for label, text in (
        ("corpus", f"{folder}"),
        ("digest", digest.hex()),
        ("tokenizer", f"{corpus.tokenizer}, {corpus.vocabulary_size:,} tokens"),
        ("training", f"{corpus.tokens:,} tokens in {corpus.documents:,} documents, {len(corpus.training):,} shards"),
        ("held out", f"{held_out:,} tokens in {corpus.held_out_documents:,} documents"),
        *_conversations(corpus.chat),
    ):
        print_labelled(label, text, 11)


def _conversations(chat: Chat | None) -> Iterator[tuple[str, str]]:
    if chat is not None:
        yield "answers", f"{chat.trained:,} tokens are trained on, in sequences of {chat.sequence_length:,}"
        if "strftime_now" in chat.template:
            yield "", f"the template prints the date: every build uses {chat.date}"
        for name, says in FATES.items():
            if count := getattr(chat, name):
                yield "", f"{count:,} {says}"
