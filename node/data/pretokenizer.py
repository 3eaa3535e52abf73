"""Pretokenizer: text to tokens several times as fast as `tokenizers`, with the same result.

A byte-level tokenizer cuts a text into pieces by a pattern, and encodes each piece alone; pieces repeat. For known
patterns Python's `re` cuts ASCII text, and each piece is encoded once. Other text is cut where every one of these
patterns cuts, between a letter or digit and a space, and goes to `tokenizers` in these stretches.
"""

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PieceEncoder", "pattern_of"]

MOST_KNOWN = 1 << 18
"""Pieces: then all are forgotten."""
LONGEST_KNOWN = 32
"""Characters, ASCII: longer ones hardly come again, and what is known stays small, whatever the text."""
SHOWN = {byte: 256 + byte for byte in range(33)} | {127: 256 + 33}
"""ASCII characters that byte-level tokenizers replace; all others stand for themselves."""
FOREIGN = re.compile(r"[^\x00-\x7f]+")
APART, LAST_APART = re.compile(r"(?<=[A-Za-z0-9])(?=[ \n])"), re.compile(r".*[A-Za-z0-9](?=[ \n])", re.DOTALL)
SIGN = r"[!-/:-@\[-`{-~\x00-\x08\x0e-\x1f\x7f]"
"""ASCII characters that are no letter, digit or space: `re` is faster with a positive set."""
SHORT = "'(?:[sdmt]|ll|ve|re)"
GPT2 = rf" ?[A-Za-z]++|{SHORT}| ?{SIGN}++| ?[0-9]++|\s+(?!\S)|\s+"
"""Alternatives in another order than GPT-2's, the commonest first: except the short forms no two begin alike."""
SINGLE_DIGITS = rf" ?[A-Za-z]++|{SHORT}| ?{SIGN}++|[0-9]|\s+(?![^\s0-9])|\s+"
"""Digits are cut off first: before one a run of spaces ends as at the end of a text."""
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = (LLAMA3, LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"))
"""Llama 3's, and Qwen2's and Qwen3's."""


def pattern_of(file: bytes) -> re.Pattern[str] | None:
    """Return the pattern that cuts ASCII text into the pieces of this `tokenizers` JSON; None: it is unknown here."""
    said = json.loads(file)
    model, added = said["model"], said.get("added_tokens") or []
    plain = model.get("type") == "BPE" and not model.get("dropout") and said.get("normalizer") is None
    if not plain or not all(token["special"] for token in added):
        return None
    match said.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            found = GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            found = SINGLE_DIGITS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if regex in SPLITS:
            found = regex.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
            found = re.sub(r"(?<![\^A-Za-z0-9\]-])(A-Za-z|0-9)(?=[+{|])", r"[\1]", found).replace(r"[^\sA-Za-z0-9]", SIGN)
        case _:
            return None
    return re.compile(found, re.ASCII)


class _Known(dict[str, bytes]):
    """Ids of pieces, as the bytes of uint32. A missing piece is encoded."""

    def __init__(self, model: Any) -> None:
        """`model`: of `tokenizers`, which takes a piece's bytes as characters."""
        super().__init__()
        self._tokenize = model.tokenize

    def __missing__(self, piece: str) -> bytes:
        ids = array("I", [token.id for token in self._tokenize(piece.translate(SHOWN))]).tobytes()
        if len(piece) <= LONGEST_KNOWN:
            self[piece] = ids
        return ids


class PieceEncoder:
    def __init__(self, tokenizer: Any, pattern: re.Pattern[str]) -> None:
        """`tokenizer`: of `tokenizers`, which cuts by this pattern."""
        self._tokenizer, self._cut = tokenizer, pattern.findall
        self._known = _Known(tokenizer.model)

    @property
    def known(self) -> int:
        """Pieces that it remembers."""
        return len(self._known)

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        known, stretches = self._known, dict[str, None]()
        pieces = [self._pieces(text, stretches) for text in texts]
        encoded = self._tokenizer.encode_batch_fast(list(stretches), add_special_tokens=False)
        known.update((stretch, array("I", each.ids).tobytes()) for stretch, each in zip(stretches, encoded, strict=True))
        found = [np.frombuffer(b"".join(map(known.__getitem__, each)), np.uint32) for each in pieces]
        for stretch in stretches:
            known.pop(stretch, None)
        if len(known) > MOST_KNOWN:
            known.clear()
        return found

    def _pieces(self, text: str, stretches: dict[str, None]) -> list[str]:
        """`stretches`: takes those of them that are not ASCII, which are no single pieces."""
        if text.isascii():
            return self._cut(text)
        pieces: list[str] = []
        done = 0
        for foreign in FOREIGN.finditer(text):
            if foreign.start() < done:
                continue  # it is part of the last stretch
            before, after = LAST_APART.match(text, done, foreign.start()), APART.search(text, foreign.end())
            start, end = before.end() if before else done, after.start() if after else len(text)
            pieces += self._cut(text, done, start)
            pieces.append(text[start:end])
            stretches[text[start:end]] = None
            done = end
        return pieces + self._cut(text, done)
