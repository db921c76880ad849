"""Conversations: what is refused and how, which tokens are learnt, what becomes of long ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardengine.app import data, jsonl, reading
from shardengine.app.chat import Chat
from shardengine.errors import UsageError
from tests.app import tiny_chat
from tests.app.test_jsonl import write
from tests.app.tiny_chat import MARKED, PLAIN, make_tokenizer, turns
from tests.support.raising import raises

pytest.importorskip("transformers")
SYSTEM = {"role": "system", "content": "Be short."}
CONVERSATIONS = [
    turns("Hi", "Hello."),
    turns("Hi", "Hello.", "And?", "That is all.", "Bye"),
    [SYSTEM, *turns("Hi", "Hällo 🙂", "And?", "All of it ")],
    turns("Hi", "", "And?", "All"),  # an empty answer ends as well
]


def row(messages: list[dict[str, Any]], **more: Any) -> jsonl.JsonRow:
    return jsonl.JsonRow(1, None, "", messages, **more)


def learnt(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    """The texts of what is learnt, turn by turn."""
    tokens, labels = Chat(tokenizer).encode(row(messages), "here")
    assert all(label in (data.IGNORED, token) for token, label in zip(tokens, labels, strict=True))
    assert tokens == tokenizer.apply_chat_template(messages)["input_ids"]
    found: list[list[int]] = [[]]
    for label in labels:
        if label == data.IGNORED:
            found.append([])
        else:
            found[-1].append(label)
    return [tokenizer.decode(part) for part in found if part]


# Reading


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, '"messages" is empty, expected a list of {"role": "…", "content": "…"}'),
        ({"messages": "Hi"}, '"messages" is a string, expected a list'),
        ({"messages": ["Hi"]}, 'message 1: is a string, expected {"role"'),
        ({"messages": [{"role": "user"}]}, 'message 1: has the keys "role", expected "role" and "content"'),
        ({"messages": [{"content": "x"}]}, 'message 1: has the keys "content", expected "role" and "content"'),
        ({"messages": [{"role": 1, "content": "x"}]}, 'message 1: "role" is a number, expected a string'),
        ({"messages": [*turns("x"), {"role": "assistant", "content": None}]}, 'message 2: "content" is null, expected'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, '"content" is a list, expected a string'),
        ({"messages": turns("x")}, 'has the roles user; expected a message of "assistant"'),
        ({"messages": turns("x", "y"), "tools": {}}, '"tools" is an object, expected a list'),
        ({"messages": turns("x", "y"), "text": "z"}, 'has the keys "messages", "text"'),
        ({"text": "x"}, 'has "text", line 1 has "messages": expected one form in a file'),
    ],
)
def test_errors_name_the_file_the_line_and_the_message(line: object, message: str, tmp_path: Path):
    path = write(tmp_path, {"messages": turns("x", "y")}, line)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        jsonl.read(path, "--eval")
    assert str(caught.value).startswith(f"--eval {path}, line 2")


def test_calls_of_tools_need_no_content(tmp_path: Path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}}]
    path = write(tmp_path, {"messages": [*turns("Time?"), call], "tools": tools, "id": 7})
    (found,) = jsonl.read(path)
    assert found == jsonl.JsonRow(1, None, "", [*turns("Time?"), call], tools)
    template = (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if 'content' in m else m.tool_calls[0].function.name }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokens, labels = Chat(make_tokenizer(template)).encode(found, "here")
    decode = make_tokenizer(template).decode
    assert decode(tokens) == "now<|user|>Time?</s><|assistant|>now</s>"
    assert decode([label for label in labels if label != data.IGNORED]) == "now</s>"


# What is learnt


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_both_ways_learn_the_answers_and_their_ends(messages: list[dict[str, Any]]):
    expected = [each["content"] + "</s>" for each in messages if each["role"] == "assistant"]
    assert learnt(make_tokenizer(MARKED), messages) == expected
    assert learnt(make_tokenizer(PLAIN), messages) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_marks_mean_what_transformers_takes_them_for(messages: list[dict[str, Any]]):
    tokenizer = make_tokenizer(MARKED)
    _, labels = Chat(tokenizer).encode(row(messages), "here")
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert theirs["assistant_masks"] == [int(label != data.IGNORED) for label in labels]


def test_a_space_at_the_end_of_an_answer_does_not_make_the_next_question_learnt():
    """Where the place of a token leaves spaces out, transformers' own mask then runs to the end of the conversation."""
    template = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
    tokenizer = make_tokenizer(template, trim=True)
    messages = turns("Hi", "Hello ", "And?", "All")
    _, labels = Chat(tokenizer).encode(row(messages), "here")
    kept = tokenizer.decode([label for label in labels if label != data.IGNORED])
    assert kept.replace(" ", "") == "HelloAll"
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(theirs["assistant_masks"]) > len("Hello All")


# Refused


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, turns("a", "b"), "here: has messages, and the tokenizer has no chat template"),
        (tiny_chat.STRICT, [SYSTEM, *turns("a", "b")], "rejects it: Only the roles user and assistant are supported"),
        (tiny_chat.REWRITING, turns("a", "b", "c", "d"), "here, message 2: the tokens of the conversation up to this"),
        (PLAIN, turns("a", "b")[1:], "here, message 1: the conversation begins with the assistant"),
        (MARKED.replace("{{ message.content }}</s>{%", "{%"), turns("a", "b"), "the assistant says nothing in it"),
        ("{{ messages.nothing.there }}", turns("a", "b"), "the tokenizer's chat template rejects it"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(template: str | None, messages: list[dict[str, Any]], message: str):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Chat(make_tokenizer(template)).encode(row(messages), "here")
    assert "\n" not in str(caught.value)


def test_the_last_answer_may_be_written_differently():
    assert learnt(make_tokenizer(tiny_chat.REWRITING), turns("a", "b")) == ["hm b</s>"]


def test_a_token_that_holds_the_header_and_the_answer_is_refused():
    template = PLAIN.replace("<|{{ message.role }}|>", "{{ message.role }}:").replace("<|assistant|>", "assistant:")
    tokenizer = make_tokenizer(template, merges=((":", "b"),))
    with raises("tokenizer-chat-template-not-prefix", "message 2", "conversation before this turn"):
        Chat(tokenizer).encode(row(turns("a", "b")), "here")
    assert learnt(tokenizer, turns("a", "c")) == ["c</s>"]


# Rows


def blocks(path: Path, length: int, **how: Any) -> data.TokenBlocks:
    tokenizer = make_tokenizer(MARKED)
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    return reading.load_blocks(str(path), encode, length, 1, [], Chat(tokenizer).encode, reading.How(**how))


def test_long_conversations_are_cut_or_left_out_as_asked(tmp_path: Path):
    short, long = turns("ab", "cd"), turns("ab", "c" * 9, "ab", "cd")
    path = tiny_chat.write(tmp_path / "chat.jsonl", *[short, long] * 20)
    cut = blocks(path, 8)
    assert (len(cut.training), len(cut.validation), cut.truncated, cut.dropped) == (38, 2, 20, 0)
    assert cut.training.attention_mask is not None
    assert cut.training.attention_mask[:2].tolist() == [[1] * 7 + [0], [1] * 8]
    assert (cut.training.labels[:2] != data.IGNORED).tolist() == [
        [False] * 4 + [True] * 3 + [False],
        [False] * 4 + [True] * 4,
    ]
    left = blocks(path, 8, too_long="drop")
    assert (len(left.training), len(left.validation), left.truncated, left.dropped) == (19, 1, 0, 20)
    with raises("data-prompt-too-long", "line 1", "that the assistant says", "has 4"):
        blocks(path, 4)
    with raises("data-all-lines-too-long", "all 38", "training part", "than 4"):
        blocks(path, 4, too_long="drop")


def test_a_held_out_file_of_another_form(tmp_path: Path):
    path = tiny_chat.write(tmp_path / "chat.jsonl", *[turns("ab", "cd")] * 20)
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij", encoding="utf-8")
    found = blocks(path, 8, held_out=str(text), packing="apart")
    assert found.training.position_ids is not None and len(found.training) == 20  # 7 tokens each
    assert found.validation.input_ids.tolist()[0] == make_tokenizer(None)("abcdefgh")["input_ids"]
    assert found.validation.tokens == 10  # nothing of it is left out
    found = blocks(text.rename(tmp_path / "t.txt"), 8, held_out=str(path))
    assert found.validation.attention_mask is not None and len(found.validation) == 20
    (tmp_path / "one.txt").write_text("a", encoding="utf-8")
    with raises("data-too-short", "--eval", "it", "two tokens"):
        blocks(path, 8, held_out=str(tmp_path / "one.txt"))
