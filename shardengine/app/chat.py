"""Conversations to tokens, of which the assistant's turns are learnt. Owns: which tokens these are.

Must not know: files, rows, the model. The tokenizer's own chat template writes the conversation.

[Note: What is learnt of a conversation] A template that marks the assistant's words with ``{% generation %}`` says so
itself: the tokens of these words are learnt. Any other one is asked for beginnings of the conversation. Turn i begins
where the conversation before it ends, with the header that the template gives when an answer is to be generated
(add_generation_prompt), and ends where the conversation up to and with it ends. Both are exact only if the tokens of
each beginning are the first tokens of the whole: then the model learns each answer after the tokens that it will see
when it is asked for one. Where they are not (a template that rewrites earlier turns, a token that holds the end of the
header and the start of the answer), the conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardengine.app import jsonl
from shardengine.app.data import IGNORED
from shardengine.errors import UsageError

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_HINT = "mark the words of the assistant with {% generation %} … {% endgeneration %} in the tokenizer's chat template"


class Chat:
    """Conversations in the words of one tokenizer; it must have a chat template once a conversation is encoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, row: jsonl.Row, where: str) -> tuple[list[int], list[int]]:
        """(tokens, labels) of a conversation; all but the assistant's turns is IGNORED. where: for errors."""
        messages = [{key: value for key, value in each.items() if value is not None} for each in row.messages or []]
        template = self._template(messages, row.tools, where)
        if _MARKED.search(template):
            tokens, turns = self._marked(messages, row.tools, template, where)
        else:
            tokens, turns = self._derived(messages, row.tools, where)
        labels = [IGNORED] * len(tokens)
        for first, end in turns:
            labels[first:end] = tokens[first:end]
        if all(label == IGNORED for label in labels[1:]):  # nothing predicts the first token
            raise UsageError(f"{where}: the assistant says nothing in it that could be learnt; leave the line out")
        return tokens, labels

    def _template(self, messages: Sequence[jsonl.Message], tools: list[Any] | None, where: str) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, tools))
        except ValueError:
            raise UsageError(
                f"{where}: has messages, and the tokenizer has no chat template to write them with: expected one in "
                "the model's directory (chat_template.jinja), or rows of prompt and completion"
            ) from None

    def _marked(
        self, messages: list[jsonl.Message], tools: list[Any] | None, template: str, where: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, and of which of them the template says that the assistant made them: [first, end) of each turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self._tokenizer.is_fast:
            raise UsageError(
                f"{where}: expected a fast tokenizer, which knows the place of each token in the text, to use the "
                "{% generation %} of its chat template"
            )
        with _Rejected(where):
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        encoded = self._tokenizer(texts[0], add_special_tokens=False)
        turns = []
        for first, end in spans[0]:  # a space at an end may be in the place of no token
            inside = [token for at in range(first, end) if (token := encoded.char_to_token(at)) is not None]
            if inside:
                turns.append((inside[0], inside[-1] + 1))
        return list(encoded["input_ids"]), turns

    def _derived(
        self, messages: list[jsonl.Message], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and turns by [Note: What is learnt of a conversation]."""
        with _Rejected(where):
            whole = self._tokens(messages, tools)
        turns = []
        for place, message in enumerate(messages):
            if message["role"] != jsonl.ASSISTANT:
                continue
            before = self._beginning(whole, messages[:place], tools, f"{where}, message {place + 1}", answered=False)
            end = self._beginning(whole, messages[: place + 1], tools, f"{where}, message {place + 1}", answered=True)
            turns.append((before, end))
        return whole, turns

    def _beginning(
        self, whole: list[int], messages: list[jsonl.Message], tools: list[Any] | None, where: str, *, answered: bool
    ) -> int:
        """How many tokens a beginning of the conversation has; UsageError where it is no beginning of the whole."""
        part = "conversation up to this turn" if answered else "conversation before this turn"
        if not messages:
            raise UsageError(
                f"{where}: the conversation begins with the assistant, so that nothing says where its header ends and "
                f"its words begin; {_HINT}, or leave the line out"
            )
        with _Rejected(f"{where}: the {part} alone"):
            tokens = self._tokens(messages, tools, header=not answered)
        if whole[: len(tokens)] != tokens:
            raise UsageError(
                f"{where}: the tokens of the {part} are not the first tokens of the whole conversation, so that "
                f"nothing says which of them the assistant made; {_HINT}, or leave the line out"
            )
        return len(tokens)

    def _tokens(self, messages: list[jsonl.Message], tools: list[Any] | None, *, header: bool = False) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=header)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class _Rejected:
    """Around a call of a template: what it raises becomes one sentence."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError | ValueError | TypeError | KeyError | AttributeError):
            reason = str(error) or type(error).__name__
            raise UsageError(f"{self._where}: the tokenizer's chat template rejects it: {reason}") from None
