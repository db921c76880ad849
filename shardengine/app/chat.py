"""Turns conversations into tokens and labels; the assistant's turns are learnt. Owns: which tokens these are.

Must not know: files, rows, the model. The tokenizer's own chat template writes the conversation.

[Note: Learnt tokens] If the template marks the assistant's words with ``{% generation %}``, the
tokens of these words are learnt. With any other template, the conversation's beginnings are rendered. Turn i begins
where the conversation before it ends, including the header that the template writes before an answer
(add_generation_prompt). It ends where the conversation up to and including it ends. This is exact only if the tokens of
each beginning are the first tokens of the whole conversation: then the model learns each answer after the tokens that
it will see when it generates one. If they are not, the conversation is rejected. Examples are a template that rewrites
earlier turns, and a token that holds the end of the header and the start of the answer.
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
    """Encodes conversations with one tokenizer, which must have a chat template by the first call of ``encode``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, row: jsonl.JsonRow, where: str) -> tuple[list[int], list[int]]:
        """Return (tokens, labels) of a conversation. All labels but those of the assistant's turns are IGNORED.

        where: the row's place, for errors. UsageError if nothing in the conversation can be learnt.
        """
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
            raise UsageError(
                f"{where}: the assistant says nothing in it that could be learnt; leave the line out",
                code="data-nothing-to-learn",
            )
        return tokens, labels

    def _template(self, messages: Sequence[jsonl.Message], tools: list[Any] | None, where: str) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, tools))
        except ValueError:
            raise UsageError(
                f"{where}: has messages, and the tokenizer has no chat template to write them with: expected one in "
                "the model's directory (chat_template.jinja), or rows of prompt and completion",
                code="tokenizer-without-chat-template",
            ) from None

    def _marked(
        self, messages: list[jsonl.Message], tools: list[Any] | None, template: str, where: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens, and [first, end) of each part that the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self._tokenizer.is_fast:
            raise UsageError(
                f"{where}: expected a fast tokenizer, which knows the place of each token in the text, to use the "
                "{% generation %} of its chat template",
                code="tokenizer-not-fast",
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
        for first, end in spans[0]:  # a space at an end may belong to no token
            inside = [token for at in range(first, end) if (token := encoded.char_to_token(at)) is not None]
            if inside:
                turns.append((inside[0], inside[-1] + 1))
        return list(encoded["input_ids"]), turns

    def _derived(
        self, messages: list[jsonl.Message], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return tokens and turns by rendering the conversation's beginnings; see the note at the top of the file."""
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
        """Return the number of tokens of a beginning of the conversation.

        UsageError if they are not the first tokens of the whole.
        """
        part = "conversation up to this turn" if answered else "conversation before this turn"
        if not messages:
            raise UsageError(
                f"{where}: the conversation begins with the assistant, so that nothing says where its header ends and "
                f"its words begin; {_HINT}, or leave the line out",
                code="data-conversation-begins-with-assistant",
            )
        with _Rejected(f"{where}: the {part} alone"):
            tokens = self._tokens(messages, tools, header=not answered)
        if whole[: len(tokens)] != tokens:
            raise UsageError(
                f"{where}: the tokens of the {part} are not the first tokens of the whole conversation, so that "
                f"nothing says which of them the assistant made; {_HINT}, or leave the line out",
                code="tokenizer-chat-template-not-prefix",
            )
        return len(tokens)

    def _tokens(self, messages: list[jsonl.Message], tools: list[Any] | None, *, header: bool = False) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=header)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class _Rejected:
    """Turns an error of the chat template into a UsageError of one sentence."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError | ValueError | TypeError | KeyError | AttributeError):
            reason = str(error) or type(error).__name__
            raise UsageError(
                f"{self._where}: the tokenizer's chat template rejects it: {reason}",
                code="data-refused-by-chat-template",
            ) from None
