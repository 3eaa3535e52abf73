"""Test that the fast pretokenizer makes the tokens of `tokenizers`, for any text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dilocox.node.data import pretokenizer
from dilocox.node.data.pretokenizer import SPLITS, PieceEncoder, pattern_of
from tests.corpora import words

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS = {
    "gpt2": BYTE_LEVEL,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    **{
        name: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(regex), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, regex in zip(("llama3", "qwen2"), SPLITS, strict=True)
    },
}
LIKELY = "ab s'tlreveLLdm  \n\r\t0123.,(_-\"\xa0é　日½²ſ\x1c\x85\U0001f600\u0301"
TEXTS = st.lists(st.text(st.sampled_from(LIKELY)) | st.text() | st.sampled_from(["  it's 12345", "\n\n  x", "don'T", " 's"]))


def tokenizer_of(cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    said = ["  it's 12345\n\n\t  don't (a.b) 's \xa0é  " * 3, "x\xa0  y \xa0 z\xa0\n" * 20, *words(50, 20)]
    tokenizer.train_from_iterator(said * 4, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


TOKENIZERS = {name: tokenizer_of(cut) for name, cut in CUTS.items()}


@pytest.mark.parametrize("name", CUTS)
@given(texts=TEXTS)
@settings(max_examples=300, deadline=None)
def test_tokens_are_those_of_tokenizers(name: str, texts: list[str]):
    tokenizer = TOKENIZERS[name]
    pattern = pattern_of(tokenizer.to_str().encode())
    assert pattern is not None
    texts = [text.encode(errors="replace").decode() for text in (*texts, "".join(texts))]
    mine = PieceEncoder(tokenizer, pattern)
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokens.tolist() for tokens in mine.encode(texts)] == expected
    assert [tokens.tolist() for tokens in mine.encode(texts)] == expected, "and once the pieces are known"


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretokenizer, "MOST_KNOWN", 3)
    tokenizer = TOKENIZERS["gpt2"]
    pattern = pattern_of(tokenizer.to_str().encode())
    assert pattern is not None
    mine = PieceEncoder(tokenizer, pattern)
    for text in words(5, 30):
        assert mine.encode([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["слово за словом, и ни пробела меж латиницей" * 9, "acgt" * 99])
def test_a_long_or_foreign_stretch_is_not_remembered(text: str):
    tokenizer = TOKENIZERS["gpt2"]
    pattern = pattern_of(tokenizer.to_str().encode())
    assert pattern is not None
    mine = PieceEncoder(tokenizer, pattern)
    mine.encode(["and some words"])
    before = mine.known
    assert mine.encode([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert mine.known == before


def test_tokenizers_of_other_ways_go_their_own():
    tokenizer = Tokenizer.from_str(TOKENIZERS["gpt2"].to_str())
    assert pattern_of(tokenizer.to_str().encode()) is not None
    tokenizer.add_tokens([AddedToken("plain", special=False)])
    assert pattern_of(tokenizer.to_str().encode()) is None, "what is added is cut out of a text first"
    other = Tokenizer.from_str(TOKENIZERS["gpt2"].to_str())
    for cut in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+"), "isolated"), BYTE_LEVEL]),
    ):
        other.pre_tokenizer = cut
        assert pattern_of(other.to_str().encode()) is None
    assert pattern_of(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str().encode()) is None
