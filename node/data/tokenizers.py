"""Text into tokens: by bytes, or by a `tokenizers` file."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dilocox.node.data.end_token import end_token_of
from dilocox.node.data.pretokenizer import PieceEncoder, pattern_of
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import BYTES
from dilocox.transport.store.files import read_at_most

__all__ = ["Encoder", "FileEncoder", "Tokens", "byte_tokenizer", "open_encoder", "told_of_panics", "train_tokenizer"]

Tokens = npt.NDArray[np.integer[Any]]
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Usual names of the token that ends a document, the commonest first."""


class Encoder(Protocol):
    vocabulary_size: int
    end_token: int
    file: bytes | None
    """The tokenizer's; None: bytes."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Without the token that ends a document."""


class ByteEncoder:
    vocabulary_size, end_token = 256, 0
    file: bytes | None = None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.replace("\0", "").encode(), dtype=np.uint8) for text in texts]


@contextmanager
def told_of_panics(tokenizer: str) -> Iterator[None]:
    """Raise ConfigError if `tokenizers` panics over a file's content: that is no Exception, and has no type to import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"the library `tokenizers` cannot load the tokenizer {tokenizer}: {error}") from error


class FileEncoder:
    def __init__(self, path: Path, end_token: str | None, known_ends: Sequence[str | int] = ()) -> None:
        """`end_token`: that of the operator. `known_ends`: those of the model, texts or ids, which win over what such tokens are
        usually called. Raises ConfigError."""
        from tokenizers import Tokenizer

        self._path = path
        try:
            self.file: bytes | None = read_at_most(path, limits.TOKENIZER_BYTES)
            with told_of_panics(str(path)):
                self._tokenizer = Tokenizer.from_buffer(self.file)
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # what a text spells is text: it ends no document
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"the tokenizer {path} has no tokens")
        self.vocabulary_size = max(vocabulary.values()) + 1
        ids = set(vocabulary.values())
        wanted = (end_token,) if end_token is not None else (*known_ends, *END_TOKENS)
        found = (each if isinstance(each, int) else vocabulary.get(each) for each in wanted)
        ends = [each for each in found if each in ids]
        if not ends:
            raise ConfigError(
                f"the tokenizer {path} has none of the tokens {', '.join(map(str, wanted))}. Pass the token that "
                "ends a document with --end-token"
            )
        self.end_token = ends[0]
        pattern = pattern_of(self.file)
        self._pieces = PieceEncoder(self._tokenizer, pattern) if pattern is not None else None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Raises ConfigError where its file makes `tokenizers` fail."""
        with told_of_panics(str(self._path)):
            if self._pieces is not None:
                return list(self._pieces.encode(texts))
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.uint32) for each in encoded]


def open_encoder(tokenizer: str, end_token: str | None = None) -> Encoder:
    """Return an encoder of `bytes`, a tokenizers JSON file, or a folder with a tokenizer.json. Raises ConfigError."""
    if tokenizer == BYTES:
        if end_token is not None:
            raise ConfigError("remove --end-token: it names a token of a tokenizer's file, but the tokenizer is bytes")
        return ByteEncoder()
    path = Path(tokenizer)
    return FileEncoder(path / "tokenizer.json" if path.is_dir() else path, end_token, end_token_of(path))


def byte_tokenizer() -> str:
    """Return ByteEncoder as the JSON of a `tokenizers` file: ids are the bytes of the text. The end token replaces the
    byte 0, which no text contains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as themselves; the others follow U+0100 in their order
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
    vocabulary = {name: byte for name, byte in vocabulary.items() if byte} | {END_TOKENS[0]: ByteEncoder.end_token}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKENS[0]])
    json: str = tokenizer.to_str(pretty=True)
    return json


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> str:
    """A byte-level BPE of so many tokens, or of fewer where the text has no more pairs; one ends a document. As the JSON of its
    file. Raises ConfigError where there is no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += len(text.strip())
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if not characters:
        raise ConfigError("no text to make tokens from: every document is empty")
    json: str = tokenizer.to_str(pretty=True)
    return json
