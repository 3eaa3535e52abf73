"""Conversations: what is trained on of them, what is left out, and that nothing is cut within an answer."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.node.data import chat as conversations_
from dilocox.node.data import shards, sources
from dilocox.node.data.build import build
from dilocox.node.data.chat import ChatEncoder, open_chat_encoder
from dilocox.node.data.chat_messages import FIELDS, messages_of
from dilocox.node.data.chat_template_process import ExhaustedError, Renderer
from dilocox.node.data.shards import Encoded
from dilocox.node.data.verify import check_own, check_whole
from dilocox.node.training.model.data import UNTRAINED, load_dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import Corpus, Shard, check_fits
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in, last_built
from tests.chats import CHATML, conversations, write_hub, write_records
from tests.corpora import corpus_of, words
from tests.helpers import manifest

LENGTH = 32
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template as Qwen3's: it formats the last answer differently from earlier ones."""
BARE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("hub"))


def encoder(hub: Path, template: str = CHATML, length: int = LENGTH) -> ChatEncoder:
    path = hub / f"{abs(hash(template))}.jinja"
    path.write_text(template)
    return open_chat_encoder(str(hub), path, None, length)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


DEEP = json.loads("[" * 600 + "]" * 600)
TALK = [turn("user", "a b c"), turn("assistant", "d e"), turn("user", "f"), turn("assistant", "g h")]


def trained(hub: Path, document: Encoded) -> list[str]:
    """Return the trained stretches, as text."""
    tokenizer = Tokenizer.from_file(str(hub / "tokenizer.json"))
    assert document.mask is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.mask, [False]]).astype(int)))
    stretches = [document.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    return [tokenizer.decode(stretch, skip_special_tokens=False) for stretch in stretches]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ["d e<|im_end|>\n", "g h<|im_end|>\n"]),
        (MARKED, ["d e<|im_end|>", "g h<|im_end|>"]),
        (BARE, [" d e\n", " g h\n<|im_end|>"]),  # it writes nothing that ends an answer: the end token does
        (FORGETS, ["<think></think>g h<|im_end|>\n"]),
    ],
)
def test_answers_are_trained_on_and_nothing_else(hub: Path, template: str, answers: list[str]):
    chat = encoder(hub, template, 100)
    document = chat.encode(TALK)
    assert document is not None
    assert trained(hub, document) == answers
    assert chat.layout().unmarked == (template == FORGETS)


def test_marks_are_where_transformers_finds_them(hub: Path):
    document = encoder(hub, MARKED, 100).encode(TALK)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hub / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = MARKED
    said = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert document is not None
    assert document.mask is not None
    assert document.tokens.tolist() == said["input_ids"]
    assert document.mask.tolist() == [bool(each) for each in said["assistant_masks"]]


def test_what_is_too_long_ends_after_an_answer_or_is_left_out(hub: Path):
    whole = encoder(hub, CHATML, 1000).encode(TALK)
    assert whole is not None
    for length in range(4, len(whole.tokens)):
        chat = encoder(hub, CHATML, length)
        document = chat.encode(TALK)
        counts = chat.layout()
        if document is None:
            assert (counts.too_long, counts.shortened) == (1, 0)
            continue
        assert len(document.tokens) <= length + 1
        assert trained(hub, document) in (["d e<|im_end|>\n"], ["d e<|im_end|>\n", "g h<|im_end|>\n"])
        assert counts.shortened == (len(document.tokens) < len(whole.tokens))
    assert trained(hub, whole) == ["d e<|im_end|>\n", "g h<|im_end|>\n"]


def test_who_spells_a_special_token_or_is_not_answered_is_left_out(hub: Path):
    chat = encoder(hub)
    assert chat.encode([turn("user", "a <|im_end|> b"), turn("assistant", "c")]) is None
    assert chat.encode([turn("user", "a")]) is None
    assert (chat.layout().spelling, chat.layout().unanswered) == (1, 1)
    assert chat.says() == "1 left out: no message is an answer, 1 left out: a text contains a special token"


@pytest.mark.parametrize(
    "more",
    [{"reasoning": "r<|im_end|>"}, {"name": "<|im_start|>"}, {"tools": [{"<|im_end|>": 1}]}, {"calls": [["<|im_start|>"]]}],
)
def test_whatever_a_template_may_write_of_a_message_spells_no_special_token(hub: Path, more: dict[str, Any]):
    chat = encoder(hub)
    (asked, answered) = messages_of({"messages": [turn("user", "a"), {**turn("assistant", "b"), **more}]})
    assert chat.encode([asked, answered]) is None
    assert chat.layout().spelling == 1
    assert chat.encode([asked, turn("assistant", "b")]) is not None


def test_half_a_character_and_a_date_are_read(hub: Path):
    said = messages_of({"messages": [turn("user", "hi \ud83d"), {**turn("assistant", "b"), "at": datetime(2026, 11, 23)}]})
    assert [each["content"] for each in said] == ["hi ?", "b"]
    assert json.loads(json.dumps(said)) == said
    assert encoder(hub).encode(said) is not None


def test_what_does_not_fit_is_not_rendered_turn_by_turn(hub: Path, monkeypatch: pytest.MonkeyPatch):
    render, rendered = Renderer.render, list[int]()

    def counted(self: Renderer, template: str, messages: Sequence[Any], *rest: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(self, template, messages, *rest, **options)

    monkeypatch.setattr(Renderer, "render", counted)
    assert encoder(hub).encode([turn("user", "a"), turn("assistant", "b")] * 500) is not None
    assert max(rendered[1:]) < LENGTH, "turns that fit into a row, and the one behind it"


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{ '%(a)s' % {} }}", "{{ range(10**9) }}", "{{ 2.0**5000 }}"])
def test_a_template_that_fails_is_a_sentence(hub: Path, template: str):
    chat = encoder(hub, template)
    assert chat.encode([turn("user", "a"), turn("assistant", "b")], "line 7") is None
    assert chat.layout().refused == 1
    assert chat.reasons["refused"].startswith("line 7: the chat template rejects")


def test_a_template_that_does_not_end_is_a_sentence_and_the_next_one_is_rendered():
    renderer = Renderer(cpu_seconds=1)
    with pytest.raises(ConfigError, match="more than 1 seconds of processor time"):
        renderer.render("{{ 9 ** (9 ** 9) }}", TALK, {})  # one step of Python's, which no code in its process can end
    with pytest.raises(ConfigError, match=r"the chat template (needs more than|rejects a conversation: MemoryError)"):
        renderer.render("{{ ('a' * 2**30) * 2**10 }}", TALK, {})
    assert renderer.render(BARE, TALK[:1], {})[0] == "user: a b c\n"


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"messages": TALK, "id": 3}, TALK),
        ({"prompt": "a", "completion": "b"}, [turn("user", "a"), turn("assistant", "b")]),
        ({"messages": None, "prompt": TALK[:1], "completion": TALK[1:2]}, TALK[:2]),
        ({"messages": [{**TALK[0], "name": None}]}, TALK[:1]),
    ],
)
def test_records_are_messages_or_prompt_and_completion(record: dict[str, Any], found: list[dict[str, str]]):
    assert messages_of(record) == found


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"text": "x"}, r"neither messages.*nor prompt and completion.*found: text"),
        ({"messages": []}, "neither messages"),
        ({"prompt": "x"}, "found: prompt"),
        ([1], "no names"),
        ({"messages": ["x"]}, "not {role, content}"),
        ({"messages": [{"role": "user", "content": "x", "more": DEEP}]}, "recursion"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is not text: image"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "a part that is not text: text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "not {role, content}"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "not {role, content}"),
        ({"messages": [{"role": "assistant", "content": []}]}, "not {role, content}"),
        ({"messages": [{"content": "x"}]}, "not {role, content}"),
    ],
)
def test_a_record_that_is_none_is_left_out_and_named(hub: Path, tmp_path: Path, record: Any, sentence: str):
    path = write_records(tmp_path / "a.jsonl", [{"messages": TALK}, record])
    with pytest.raises(ConfigError, match=f"1 left out: .*line 2: .*{sentence}.*Convert them"):
        build(tmp_path / "c", [path], encoder(hub))


def test_one_bad_line_among_many_ends_no_build(hub: Path, tmp_path: Path):
    path = write_records(tmp_path / "a.jsonl", [{"messages": each} for each in conversations(60)])
    whole = path.read_bytes()
    plain = build(tmp_path / "plain", [path], encoder(hub), held_out_every=8)[1]
    path.write_bytes(b'{"messages": [\n["x"]\n' + whole + json.dumps({"messages": DEEP}).encode())
    chat = encoder(hub)
    corpus = build(tmp_path / "c", [path], chat, held_out_every=8)[1]
    assert corpus.training == plain.training
    assert corpus.chat is not None
    assert corpus.chat.unreadable == 3
    assert "line 1: not JSON" in chat.reasons["unreadable"]


def test_a_line_without_an_end_is_one_bad_line(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 2000)
    monkeypatch.setattr(sources, "READ_CHARACTERS", 300)
    records = [{"messages": [turn("user", "x" * 9000), turn("assistant", "y")]}, {"messages": TALK}]
    path = write_records(tmp_path / "a.jsonl", records)
    found = [value for _, value, _ in sources.records(path, FIELDS)]
    assert [isinstance(value, sources.Unreadable) for value in found] == [True, False]


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([part("a")], "a"),
        ([part("a", "input_text"), part("b", "output_text")], "a\nb"),
        (["a", {"text": "b", "image_url": None}], "a\nb"),
        ([part("\ud83d")], "?"),
    ],
)
def test_a_content_in_parts_of_text_is_that_text(content: Any, text: str):
    assert messages_of({"messages": [{"role": "user", "content": content}]}) == [turn("user", text)]


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation with a call of a tool, as OpenAI and TRL write it."""
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = [turn("user", "a"), asks, turn("tool", "b"), turn("assistant", "c")]
    return list(map(dict, messages_of({"messages": said})))


@pytest.mark.parametrize("arguments", ['{"d": 1}', {"d": 1}])
def test_calls_of_tools_are_written_once_as_json_whichever_way_they_are_said(hub: Path, arguments: Any):
    document = encoder(hub, CALLING, 100).encode(called(arguments))
    assert document is not None
    assert trained(hub, document) == ['w {"d": 1}<|im_end|>\n', "c<|im_end|>\n"]


def test_a_template_that_writes_arguments_as_they_are_gets_them_as_they_are(hub: Path):
    document = encoder(hub, CALLING.replace(" | tojson", ""), 100).encode(called('{"d": 1}'))
    assert document is not None
    assert trained(hub, document)[0] == 'w {"d": 1}<|im_end|>\n'


def test_calls_that_a_template_does_not_write_are_no_answer_of_nothing(hub: Path):
    chat = encoder(hub, CHATML, 100)
    assert chat.encode(called("{}")) is None
    assert chat.layout().refused == 1
    assert "does not write tool_calls" in chat.reasons["refused"]


TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_tools_of_a_record_are_described_as_the_template_does(hub: Path, tools: Any):
    describing = "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}" + CHATML
    found = encoder(hub, describing, 100).read("line 1", {"messages": TALK, "tools": tools})
    assert found is not None
    plain = encoder(hub, CHATML, 100).encode(TALK)
    assert plain is not None
    text = Tokenizer.from_file(str(hub / "tokenizer.json")).decode(found[1].tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("w\n<|im_start|>")
    assert trained(hub, found[1]) == trained(hub, plain)


@pytest.mark.parametrize("tools", ["[", "{}", [1], 3])
def test_tools_that_are_none_are_named(hub: Path, tools: Any):
    chat = encoder(hub)
    assert chat.read("line 1", {"messages": TALK, "tools": tools or [1]}) is None or tools == "{}"
    assert ("its tools are no" in chat.reasons.get("unreadable", "")) == (tools != "{}")


DATED = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}{{ ['a', 'b', 'c', 'd', 'e'] | random }}{{ lipsum(1) }}\n" + CHATML


def test_a_template_that_prints_the_date_or_draws_makes_the_same_corpus_on_any_day(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_records(tmp_path / "a.jsonl", [{"messages": each} for each in conversations(60)])
    digests = []
    for name in ("a", "b"):
        another = Renderer()
        monkeypatch.setattr(conversations_, "renderer", lambda it=another: it)
        digest, corpus = build(tmp_path / name, [path], encoder(hub, DATED, 2000), held_out_every=8)
        digests.append(digest)
    assert digests[0] == digests[1]
    assert corpus.chat is not None
    assert corpus.chat.date == "2024-07-26"
    text = Renderer().render(DATED, TALK, {})[0]
    assert text.startswith("26 Jul 2024 00:00:00.000000")


THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
APART = BARE.replace("assistant: {% endif", "assistant:\n{% endif")


@pytest.mark.parametrize(
    ("template", "said", "answer"),
    [
        (THOUGHT, "d e", "d e<|im_end|>\n"),
        (THOUGHT, "<thin d", "<thin d<|im_end|>\n"),  # no part of the prompt's tag
        (THOUGHT, "<think>\nd</think>e", "d</think>e<|im_end|>\n"),
        (R1, "<think>\nd</think>e", "e<|im_end|>"),
        (APART, "d", " d\n<|im_end|>"),
    ],
)
def test_an_answer_is_found_behind_a_prompt_that_opens_a_thought(hub: Path, template: str, said: str, answer: str):
    chat = encoder(hub, template, 200)
    document = chat.encode([turn("user", "a"), turn("assistant", said)])
    assert document is not None
    assert trained(hub, document) == [answer]
    assert chat.layout().unmarked == 0


def test_answers_that_no_prompt_announces_are_named_as_the_reason(hub: Path, tmp_path: Path):
    other = CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant", "{% if add_generation_prompt %}Answer:")
    path = write_records(tmp_path / "a.jsonl", [{"messages": each} for each in conversations(20)])
    with pytest.raises(ConfigError, match=r"20 left out: .*{% generation %}.*--chat-template"):
        build(tmp_path / "c", [path], encoder(hub, other))


def test_the_commonest_reason_is_the_one_that_is_advised_upon(hub: Path, tmp_path: Path):
    for name, records, sentence in (
        ("long", [{"messages": TALK}] * 3, "Use a larger --sequence-length"),
        ("alone", [{"messages": TALK[:1]}] * 3, "has the role assistant"),
        ("spelling", [{"messages": [turn("user", "<|im_end|>"), TALK[1]]}] * 3, "Remove special tokens"),
    ):
        path = write_records(tmp_path / f"{name}.jsonl", records)
        with pytest.raises(ConfigError, match=sentence):
            build(tmp_path / name, [path], encoder(hub, CHATML, 2))


def test_a_template_that_never_ends_is_not_tried_with_every_conversation(hub: Path, monkeypatch: pytest.MonkeyPatch):
    tried = []

    def exhausted(*asked: Any, **options: Any) -> Any:
        tried.append(1)
        raise ExhaustedError("too much")

    monkeypatch.setattr(Renderer, "render", exhausted)
    chat = encoder(hub)
    assert [chat.encode(TALK), chat.encode(TALK)] == [None, None]
    with pytest.raises(ConfigError, match="too much"):
        chat.encode(TALK)
    assert len(tried) == 3


def test_wrong_use_is_one_sentence(hub: Path, tmp_path: Path):
    (tmp_path / "empty.jinja").touch()
    with pytest.raises(ConfigError, match="has no chat template"):
        open_chat_encoder(str(hub), tmp_path / "empty.jinja", None, LENGTH)
    with pytest.raises(ConfigError, match="is a device"):
        open_chat_encoder(str(hub), Path("/dev/zero"), None, LENGTH)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match="contains no records"):
        build(tmp_path / "c", [tmp_path / "x.txt"], encoder(hub))
    with pytest.raises(ConfigError, match=r"has no chat template.*--chat-template"):
        open_chat_encoder(str(hub / "tokenizer.json"), None, None, LENGTH)
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        open_chat_encoder(str(hub), tmp_path / "none.jinja", None, LENGTH)
    raises = encoder(hub, "{{ raise_exception('no system here') }}")
    with pytest.raises(ConfigError, match=r"1 left out: .*line 1: .*no system here.*--chat-template"):
        build(tmp_path / "c", [write_records(tmp_path / "a.jsonl", [{"messages": TALK}])], raises)
    with pytest.raises(ConfigError, match=r"0 documents to train on.*2 left out: "):
        build(tmp_path / "c", [write_records(tmp_path / "b.jsonl", [{"messages": TALK[:1]}] * 2)], encoder(hub))
    for options, said in ((["--sequence-length", "8"], "only with --chat"), (["--chat"], "needs --sequence-length")):
        done = CliRunner().invoke(app, ["data", "build", "x", str(tmp_path / "a.jsonl"), *options])
        assert done.exit_code == 2
        assert said in done.output


def built(hub: Path, folder: Path, count: int = 60, **options: Any) -> Corpus:
    path = write_records(folder.with_suffix(".jsonl"), [{"messages": each} for each in conversations(count)])
    digest, corpus = build(folder, [path], encoder(hub), held_out_every=8, **options)
    assert corpus == corpus_in(BlobStore(folder), digest)
    return corpus


def rows_of(folder: Path, corpus: Corpus, of: tuple[Shard, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each row, and its mask."""
    chat, found = corpus.chat, []
    assert chat is not None
    for shard in of:
        raw, count = bytes(BlobStore(folder).view(bytes.fromhex(shard.digest))), shard.tokens
        assert len(raw) == corpus.size(shard)
        tokens = np.frombuffer(raw, f"<u{corpus.token_bytes}", count).reshape(-1, chat.width)
        masks = np.frombuffer(raw, np.uint8, offset=count * corpus.token_bytes).reshape(len(tokens), -1)
        found += [(row.tolist(), np.unpackbits(mask)[: chat.width].tolist()) for row, mask in zip(tokens, masks, strict=True)]
    return found


def test_a_corpus_holds_whole_conversations_in_rows(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "COPIED_BYTES", 200)
    monkeypatch.setattr(shards, "BUFFERED_BYTES", 500)
    corpus = built(hub, tmp_path / "c")
    check_whole(BlobStore(tmp_path / "c"), last_built(tmp_path / "c"))
    assert corpus.chat is not None
    assert corpus.documents + corpus.held_out_documents + corpus.chat.too_long == 60
    assert corpus.chat.shortened > 0
    start, end = (Tokenizer.from_file(str(hub / "tokenizer.json")).token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    begun = 0
    for tokens, mask in (found := rows_of(tmp_path / "c", corpus, corpus.training)):
        assert tokens[0] == start, "a row begins with a conversation"
        assert mask[0] == 0
        last = max(index for index, marked in enumerate(mask) if marked)
        assert end in tokens[last - 1 : last + 1], "and no answer of it is cut"
        assert set(tokens[last + 1 :]) <= {end}
        begun += sum(now == start for now in tokens)
    assert sum(sum(mask) for _, mask in found) == corpus.chat.trained
    assert begun > len(found), "several conversations in a row"
    assert built(hub, tmp_path / "again").canonical_bytes() == corpus.canonical_bytes()


def test_a_run_s_targets_are_the_answers(hub: Path, tmp_path: Path):
    corpus = built(hub, tmp_path / "c")
    run = chat_run(tmp_path / "c")
    dataset = load_dataset(run, tmp_path / "c")
    rows = {tuple(tokens): mask for tokens, mask in rows_of(tmp_path / "c", corpus, corpus.training)}
    inputs, targets = dataset.batch(range(8))
    for given, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        [(tokens, mask)] = [(t, m) for t, m in rows.items() if list(t[:-1]) == given]
        assert wanted == [token if marked else UNTRAINED for token, marked in zip(tokens[1:], mask[1:], strict=True)]
    assert dataset.evaluation()[1].eq(UNTRAINED).any()


def chat_run(folder: Path, **sections: Any) -> Any:
    data = {"digest": last_built(folder).hex(), "loss_mask": True}
    model = {"sequence_length": LENGTH, "vocab_size": 512, **sections.pop("model", {})}
    return manifest(data=data, model=model, **sections)


def test_a_run_says_that_its_data_are_conversations_and_how_long(hub: Path, tmp_path: Path):
    corpus = built(hub, tmp_path / "c")
    check_fits(chat_run(tmp_path / "c"), corpus)
    with pytest.raises(ConfigError, match=r"set data\.loss_mask to true"):
        check_fits(manifest(model={"vocab_size": 512, "sequence_length": LENGTH}), corpus)
    with pytest.raises(ConfigError, match="build them with --sequence-length 16"):
        check_fits(chat_run(tmp_path / "c", model={"sequence_length": 16}), corpus)
    text = corpus_of(tmp_path / "text", words(40, 60))
    plain = corpus_in(BlobStore(text.folder), last_built(text.folder))
    assert plain is not None
    with pytest.raises(ConfigError, match=r"set data\.loss_mask to false"):
        check_fits(chat_run(tmp_path / "c"), plain)


def test_private_conversations_are_laid_out_as_the_run_s(hub: Path, tmp_path: Path):
    shared, own = built(hub, tmp_path / "shared"), tmp_path / "own"
    run = chat_run(tmp_path / "shared")
    built(hub, own, 90)
    check_own(run, shared, own, last_built(own))
    path = own.with_suffix(".jsonl")
    digest, _ = build(tmp_path / "other", [path], encoder(hub, MARKED), held_out_every=8)
    with pytest.raises(ConfigError, match=f"another chat template.*--sequence-length {LENGTH}"):
        check_own(run, shared, tmp_path / "other", digest)
    write_records(path, [{"text": text} for text in words(40, 60)])
    digest, _ = build(tmp_path / "text", [path], encoder(hub).encoder, held_out_every=8)
    with pytest.raises(ConfigError, match=r"private data are text.*build them with --chat"):
        check_own(run, shared, tmp_path / "text", digest)


def test_a_row_that_nobody_trains_on_is_refused(hub: Path, tmp_path: Path):
    """Check the rejection: a batch of such rows would have no mean. Bits beyond a row's end have no meaning."""
    corpus = built(hub, tmp_path / "c")
    assert corpus.chat is not None
    store, shard = BlobStore(tmp_path / "c"), corpus.training[0]
    raw = bytearray(store.view(bytes.fromhex(shard.digest)))
    raw[-corpus.chat.mask_bytes :] = bytes([0x80] + [0] * (corpus.chat.mask_bytes - 2) + [0x7F])
    spoilt = corpus.model_copy(update={"training": (Shard(digest=store.put([bytes(raw)]).hex(), tokens=shard.tokens),)})
    with pytest.raises(ConfigError, match="a row without"):
        check_whole(store, store.put([spoilt.canonical_bytes()]))


def test_the_loss_is_the_mean_over_the_batch_s_answers_wherever_they_lie(process_group: None, hub: Path, tmp_path: Path):
    """Check that the loss is no mean of microbatches' means: a token's weight does not depend on its neighbours."""
    built(hub, tmp_path / "c")
    losses, norms = [], []
    for microbatches in (1, 2, 4):
        run = chat_run(tmp_path / "c", training={"microbatches": microbatches, "batch_size": 4})
        inputs, targets = load_dataset(run, tmp_path / "c").batch(range(4))
        targets[0, :] = UNTRAINED
        targets[0, 3] = 7  # one token in the first row, many in the others
        trainer = Trainer(run)
        trainer.load_initial()
        expected = trainer.evaluate(inputs, targets)
        result = trainer.step(inputs, targets)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        assert result.tokens == int((targets != UNTRAINED).sum())
        assert result.loss == pytest.approx(expected, rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
