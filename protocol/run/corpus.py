"""Corpus: the training data of a run, named by digest, and the order in which its samples are read.

A corpus is a document that lists data shards, which contain its tokens in order, by digest. A run's manifest names the
document by *its* digest (`data.digest`), so the run id fixes what every cluster reads. Hashes of documents decide their
shards: a shard is a fair sample of the whole, and no document is in two. Hashes also decide which documents are held
out.

A sample is sequence_length + 1 tokens of one shard. Positions (data_leases.py) visit the shards in an order that
changes every epoch, and the samples of each shard in another: neighbouring positions need one shard, or two.

A corpus of conversations (`Corpus.chat`) also marks the tokens to train on: the answers. Its shards are rows of
sequence_length + 1 tokens, followed by the rows' masks. A row contains whole conversations, each of which attends to
earlier ones in the row, and ends with padding of end tokens without loss.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest

__all__ = [
    "BYTES",
    "TEMPLATE_DATE",
    "Chat",
    "Corpus",
    "Order",
    "Shard",
    "check_enough",
    "check_fits",
    "check_private",
    "order_of",
    "permute",
    "samples_in",
    "token_bytes",
]

BYTES = "bytes"
"""Name of the tokenizer of a corpus whose tokens are bytes of text; 0, which no text contains, ends a document."""
TEMPLATE_DATE = "2024-07-26"
"""Date that the clock of a chat template shows, so that the same files make the same corpus on any day. Llama 3.1 writes this
date by default."""
FEISTEL_ROUNDS = 4

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, le=1 << 48)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Section):
    digest: Digest
    """Digest of the blob with its tokens, little-endian, `Corpus.token_bytes` each, followed by the rows' masks, if any."""
    tokens: Annotated[int, Field(gt=0, le=1 << 40)]


class Chat(_Section):
    """Settings that turned conversations into tokens, and counts of those left out for their length: none is cut within an
    answer."""

    sequence_length: Annotated[int, Field(gt=0, le=limits.CHAT_TOKENS)]
    """Rows have one token more; a run trains on sequences of this length."""
    template: Annotated[str, Field(min_length=1, max_length=limits.TEMPLATE_CHARACTERS)]
    """The tokenizer's chat template, in Jinja."""
    special_tokens: dict[Annotated[str, Field(pattern=r"^(bos|eos|unk|pad)_token$")], Annotated[str, Field(max_length=256)]]
    """Special tokens, by their names in the template."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    """Date that the template's clock showed."""
    trained: Number
    """Tokens of the training shards that are trained on."""
    shortened: Number
    """Conversations that end after the last answer that fits into a row."""
    too_long: Number
    """Left out: not even their first answer fits."""
    unanswered: Number
    """Conversations left out because they contain no answer."""
    spelling: Number
    """Conversations left out because their text contains a special token, which would end an answer early."""
    unreadable: Number
    """Left out: they are no messages of text."""
    refused: Number
    """Left out: the template refuses them, or does not write their calls of tools."""
    not_found: Number
    """Left out: no answer of theirs follows the template's prompt."""
    unmarked: Number
    """Answers that are read and not trained on: the template writes them otherwise once more follows."""

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.sequence_length + 1

    @property
    def mask_bytes(self) -> int:
        """Return the bytes of a row's mask: one bit per token, the first token in the highest bit of the first byte."""
        return -(-self.width // 8)


class Corpus(_Section):
    version: Literal[1] = 1
    tokenizer: Digest | Literal["bytes"]
    """`bytes`, or the digest of the blob with the `tokenizers` JSON."""
    vocabulary_size: Annotated[int, Field(gt=0, le=1 << 32)]
    """Every token is below."""
    end_token: Number
    """Ends each document."""
    held_out_every: Annotated[int, Field(ge=2, le=1 << 32)]
    """One document of so many is held out, by its hash."""
    chat: Chat | None = None
    """Settings of a corpus of conversations. None: every token is trained on."""
    documents: Number
    """Number of documents for training."""
    held_out_documents: Number
    """Number of held-out documents."""
    training: Annotated[tuple[Shard, ...], Field(min_length=1, max_length=limits.SHARDS)]
    held_out: Annotated[tuple[Shard, ...], Field(min_length=1, max_length=limits.SHARDS)]

    @model_validator(mode="after")
    def _consistent(self) -> "Corpus":
        if self.end_token >= self.vocabulary_size:
            raise ValueError("the end token is outside the vocabulary")
        if self.chat is not None and any(shard.tokens % self.chat.width for shard in (*self.training, *self.held_out)):
            raise ValueError("a shard of conversations does not contain whole rows")
        return self

    @classmethod
    def from_canonical(cls, raw: bytes) -> "Corpus":
        """Parse what arrived. Raises RemoteError, also when the bytes are not the canonical form."""
        try:
            corpus = cls.model_validate_json(raw)
        except ValueError as error:
            raise RemoteError(pb.REASON_MALFORMED, "not a corpus") from error
        if corpus.canonical_bytes() != raw:
            raise RemoteError(pb.REASON_MALFORMED, "not the canonical form of its corpus")
        return corpus

    def canonical_bytes(self) -> bytes:
        """JSON with sorted keys, no spaces and every default written out."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.vocabulary_size)

    def size(self, shard: Shard) -> int:
        """Return the size of a shard's blob in bytes."""
        masks = 0 if self.chat is None else shard.tokens // self.chat.width * self.chat.mask_bytes
        return shard.tokens * self.token_bytes + masks

    @property
    def tokens(self) -> int:
        """Return the number of tokens for training."""
        return sum(shard.tokens for shard in self.training)

    @property
    def blobs(self) -> list[tuple[bytes, int]]:
        """(digest, size in bytes) of what it names; 0: the size of a tokenizer is not known."""
        shards = [(bytes.fromhex(shard.digest), self.size(shard)) for shard in (*self.held_out, *self.training)]
        return shards if self.tokenizer == BYTES else [(bytes.fromhex(self.tokenizer), 0), *shards]


def check_fits(manifest: Manifest, corpus: Corpus) -> None:
    """Raises ConfigError where the run's model cannot be trained on it; where data are private, where it cannot be evaluated."""
    model, training = manifest.model, manifest.training
    if corpus.vocabulary_size > model.config.vocab_size:
        raise ConfigError(
            f"the data's tokenizer has {corpus.vocabulary_size:,} tokens, but model.config.vocab_size is "
            f"{model.config.vocab_size:,}"
        )
    if manifest.data.loss_mask != (corpus.chat is not None):
        says, wanted = ("no conversations", "false") if corpus.chat is None else ("conversations", "true")
        raise ConfigError(f"the data are {says}: set data.loss_mask to {wanted}")
    if corpus.chat is not None and corpus.chat.sequence_length != model.sequence_length:
        raise ConfigError(
            f"the conversations were built for sequences of {corpus.chat.sequence_length:,} tokens, but "
            f"model.sequence_length is {model.sequence_length:,}: build them with --sequence-length "
            f"{model.sequence_length}"
        )
    width = model.sequence_length + 1
    samples, held_out = (sum(samples_in(manifest, each) for each in shards) for shards in (corpus.training, corpus.held_out))
    read = not manifest.data.private or manifest.scoring.voters > 0
    if (read and samples < training.batch_size) or not held_out:
        raise ConfigError(
            f"the data give {samples:,} sequences of {width} tokens to train on and {held_out:,} held out, but "
            f"need {training.batch_size} and 1. Build them from more text, or with a smaller --held-out-every."
        )


def samples_in(manifest: Manifest, shard: Shard) -> int:
    return shard.tokens // (manifest.model.sequence_length + 1)


def order_of(manifest: Manifest, corpus: Corpus, cluster: str = "") -> "Order":
    """Return the order in which the run reads its training shards; on private data each cluster has an order of its own."""
    seed = int.from_bytes(sha256(b"dilocox private", cluster.encode())[:4], "big") if cluster else 0
    return Order([samples_in(manifest, shard) for shard in corpus.training], manifest.data.seed ^ seed)


def check_private(manifest: Manifest, shared: Corpus, own: Corpus) -> None:
    """Raise ConfigError if a cluster's private corpus has another tokenizer than the run, or is too small to train on."""
    if (own.tokenizer, own.end_token) != (shared.tokenizer, shared.end_token):
        raise ConfigError(
            f"the private data use tokenizer {own.tokenizer}, but the run uses {shared.tokenizer}: build them "
            "with the run's tokenizer"
        )
    if (own.chat is None) != (shared.chat is None):
        says, build = ("text", "with --chat") if own.chat is None else ("conversations", "without --chat")
        raise ConfigError(f"the private data are {says}, but the run's are not: build them {build}")
    if own.chat is not None and shared.chat is not None and _layout(own.chat) != _layout(shared.chat):
        raise ConfigError(
            "the private data use another chat template or sequence length than the run: build them with "
            f"--sequence-length {shared.chat.sequence_length} and the template of the run's tokenizer"
        )
    if own.vocabulary_size != shared.vocabulary_size:
        raise ConfigError(
            f"the private data have {own.vocabulary_size:,} tokens, but the run's have {shared.vocabulary_size:,}"
        )
    check_enough(manifest, own)


def check_enough(manifest: Manifest, own: Corpus) -> None:
    """Raise ConfigError if a cluster's private corpus contains no whole batch."""
    samples, width = sum(samples_in(manifest, shard) for shard in own.training), manifest.model.sequence_length + 1
    if samples < manifest.training.batch_size:
        raise ConfigError(
            f"the private data give {samples:,} sequences of {width} tokens, fewer than a batch of "
            f"{manifest.training.batch_size}. Build them from more text"
        )


def _layout(chat: Chat) -> tuple[int, str, dict[str, str], str]:
    return chat.sequence_length, chat.template, chat.special_tokens, chat.date


def token_bytes(vocabulary_size: int) -> int:
    """Return the bytes of a token on disk."""
    return next(size for size in (1, 2, 4) if vocabulary_size <= 1 << 8 * size)


class Order:
    """Order of samples: shard and offset of each position."""

    def __init__(self, samples: Sequence[int], seed: int) -> None:
        """`samples`: of each shard."""
        self._samples, self._seed = samples, seed
        self.total = sum(samples)
        self._epoch = lru_cache(maxsize=2)(self._shards)

    def _shards(self, epoch: int) -> tuple[list[int], list[int]]:
        """(shards in the order of this epoch, index of the first sample after each)."""
        count = len(self._samples)
        order = [permute(index, count, self._seed, epoch) for index in range(count)]
        return order, list(accumulate(self._samples[shard] for shard in order))

    def find(self, position: int) -> tuple[int, int]:
        """(shard, sample in it)."""
        shard, end = self.stretch(position)
        count = self._samples[shard]
        return shard, permute(position - end + count, count, self._seed, position // self.total, shard + 1)

    def stretch(self, position: int) -> tuple[int, int]:
        """(shard, first position after it): up to there, all lie in this shard."""
        epoch, index = divmod(position, self.total)
        order, ends = self._epoch(epoch)
        place = bisect_right(ends, index)
        return order[place], epoch * self.total + ends[place]

    def shards(self, first: int, end: int) -> Iterator[int]:
        """Yield the shards of positions `first` … `end`, in reading order."""
        while first < end:
            shard, first = self.stretch(first)
            yield shard


def permute(index: int, count: int, seed: int, epoch: int, lane: int = 0) -> int:
    """A pseudo-random permutation of 0 … count-1 without a table: a Feistel network, walked until it lands inside."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = sha256(b"dilocox-order-v2\0", *(number.to_bytes(8, "big") for number in (seed, epoch, lane)))
    while True:
        left, right = index >> half, index & mask
        for number in range(FEISTEL_ROUNDS):
            mixed = int.from_bytes(sha256(key, bytes([number]), right.to_bytes(8, "big"))[:8], "big")
            left, right = right, (left ^ mixed) & mask
        index = left << half | right
        if index < count:
            return index
