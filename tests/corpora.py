"""Corpora for tests, of text that is written down here."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from bench.texts import Text
from dilocox.node.data.build import build
from dilocox.node.data.tokenizers import Encoder, open_encoder

__all__ = ["corpus_of", "words"]


def corpus_of(folder: Path, texts: Iterable[str], encoder: Encoder | None = None, held_out_every: int = 8) -> Text:
    """Make a corpus in `folder` of these documents."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.with_name(f"{folder.name}.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    digest, _ = build(folder, [source], encoder or open_encoder("bytes"), held_out_every=held_out_every)
    return Text(folder.name, folder, digest.hex())


def words(documents: int, each: int, seed: int = 0) -> list[str]:
    """Return always the same documents of `each` words: Python's own sources, the default, differ between its versions."""
    rng = random.Random(seed)
    known = ["".join(chr(97 + int(26 * rng.random())) for _ in range(2 + int(6 * rng.random()))) for _ in range(60)]
    return [" ".join(known[int(len(known) * rng.random() ** 2)] for _ in range(each)) for _ in range(documents)]
