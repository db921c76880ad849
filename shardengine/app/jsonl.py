"""Files of JSON lines. Owns: reading them, and errors that name the file and the line.

Must not know: torch, tokenizers. One JSON object per line, all of one form: ``{"text": …}`` is a document, ``{"prompt":
…, "completion": …}`` an example whose completion is learnt, and ``{"messages": [{"role": …, "content": …}, …]}`` a
conversation whose assistant turns are learnt. ``tools`` beside messages is passed to the chat template. Other keys are
ignored, blank lines skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError

SUFFIXES = (".jsonl", ".json")
ASSISTANT = "assistant"
"""The role whose turns are learnt."""
EXPECTED = (
    'expected {"text": "…"}, {"prompt": "…", "completion": "…"} or {"messages": [{"role": "…", "content": "…"}, …]} on '
    "every line"
)
FORMS = (("text",), ("prompt", "completion"), ("messages",))

Message = dict[str, Any]


@dataclass(frozen=True)
class JsonRow:
    """One line. ``completion`` is learnt. For a document it is the text, and ``prompt`` is None.

    messages, tools: of a conversation, which has no prompt and no completion; None for the other forms.
    """

    line: int
    prompt: str | None
    completion: str
    messages: list[Message] | None = None
    tools: list[Any] | None = None

    @property
    def form(self) -> tuple[str, ...]:
        """The keys of the row's form."""
        return FORMS[2] if self.messages is not None else FORMS[0] if self.prompt is None else FORMS[1]


def is_jsonl(data: str) -> bool:
    """Whether ``--data`` is to be read as JSON lines, by its suffix."""
    return Path(data).suffix.lower() in SUFFIXES


def read(path: str, option: str = "--data") -> list[JsonRow]:
    """Return all rows of the UTF-8 file. UsageError, with file and line, for the first one that cannot be used."""
    rows: list[JsonRow] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{option} {path}, line {number}"
        row = _row(where, number, line)
        if rows and rows[0].form != row.form:
            raise UsageError(
                f"{where}: has {_form(row)}, line {rows[0].line} has {_form(rows[0])}: expected one form in a file",
                code="data-forms-mixed",
            )
        rows.append(row)
    if not rows:
        raise UsageError(f"{option} {path}: is empty; {EXPECTED}", code="data-empty")
    return rows


def _row(where: str, number: int, line: str) -> JsonRow:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON ({error}); {EXPECTED}", code="data-not-json") from None
    return row_of(value, number, where)


def row_of(value: Any, number: int, where: str) -> JsonRow:
    """Return the row of one line, or of one row of a dataset.

    UsageError, beginning with ``where``, if it cannot be used.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{where}: is {_kind(value)}; {EXPECTED}", code="data-line-not-an-object")
    forms = [form for form in FORMS if any(key in value for key in form)]
    if len(forms) != 1 or any(key not in value for key in forms[0]):
        keys = ", ".join(map(json.dumps, value)) or "none"
        raise UsageError(f"{where}: has the keys {keys}; {EXPECTED}", code="data-form-unknown")
    if forms[0] == ("messages",):
        return _conversation(where, number, value)
    for key in forms[0]:
        _check_text(where, key, value[key])
    learnt = forms[0][-1]
    if not value[learnt].strip():
        raise UsageError(
            f'{where}: "{learnt}" is empty: there is nothing to learn; leave the line out', code="data-nothing-to-learn"
        )
    return JsonRow(number, value.get("prompt"), value[learnt])


def _conversation(where: str, number: int, value: dict[str, Any]) -> JsonRow:
    messages, tools = value["messages"], value.get("tools")
    if not isinstance(messages, list) or not messages:
        found = "empty" if messages == [] else _kind(messages)
        raise UsageError(
            f'{where}: "messages" is {found}, expected a list of {{"role": "…", "content": "…"}}',
            code="data-messages-invalid",
        )
    for place, message in enumerate(messages, 1):
        here = f"{where}, message {place}"
        if not isinstance(message, dict):
            raise UsageError(
                f'{here}: is {_kind(message)}, expected {{"role": "…", "content": "…"}}', code="data-messages-invalid"
            )
        if "role" not in message or ("content" not in message and "tool_calls" not in message):
            keys = ", ".join(map(json.dumps, message)) or "none"
            raise UsageError(
                f'{here}: has the keys {keys}, expected "role" and "content"', code="data-messages-invalid"
            )
        _check_text(here, "role", message["role"])
        if message.get("content") is not None or "tool_calls" not in message:
            _check_text(here, "content", message["content"])
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f'{where}: "tools" is {_kind(tools)}, expected a list', code="data-tools-not-a-list")
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise UsageError(
            f'{where}: has the roles {roles}; expected a message of "{ASSISTANT}", without which there is nothing to '
            "learn; leave the line out",
            code="data-nothing-to-learn",
        )
    return JsonRow(number, None, "", messages, tools or None)


def _check_text(where: str, key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f'{where}: "{key}" is {_kind(value)}, expected a string', code="data-not-a-string")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(
            f'{where}: "{key}" holds half of a surrogate pair, which is no character', code="data-half-surrogate"
        )


def _form(row: JsonRow) -> str:
    return " and ".join(f'"{key}"' for key in row.form)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
