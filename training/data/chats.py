"""Conversations as data sets hold them: lists of messages (OpenAI's, ShareGPT's), Alpaca's rows, HH's dialogues."""

from __future__ import annotations

import re
from typing import Any

from training.errors import BadInput

Message = dict[str, str]
"""One message of a conversation: its `role` (system, user or assistant) and `content`."""
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant",
    "developer": "system",
}  # fmt: skip
"""Roles that a file's messages may have, ShareGPT's and OpenAI's newer names among them, and what they mean."""
_TURN = re.compile(r"\n\n(Human|Assistant):")


def read_messages(value: Any, place: str, role: str | None = None) -> list[Message]:
    """Messages of a cell: `{role, content}` or ShareGPT's `{from, value}`; with `role`, a plain text is one of that role.

    Raises BadInput for an unknown role, an empty turn and what is no message.
    """
    entries = value if isinstance(value, list) or role is None else [value]
    if not isinstance(entries, list):
        raise BadInput(f"{place}: holds {_short(value)}; expected a list of messages")
    if not entries:
        raise BadInput(f"{place}: holds an empty list, expected at least one message")
    return [_message(entry, role, place) for entry in entries]


def read_dialogue(value: Any, place: str) -> list[Message]:
    """Messages of a dialogue in one text, as HH writes it (Bai et al. 2022, arXiv:2204.05862): each turn begins with
    an empty line and `Human:` or `Assistant:`."""
    if not isinstance(value, str):
        raise BadInput(f"{place}: holds {_short(value)}; expected a text")
    before, *turns = _TURN.split(value if value.startswith("\n\n") else f"\n\n{value.lstrip()}")
    if before.strip() or not turns:
        raise BadInput(
            f"{place}: holds {_short(value)}; expected a dialogue that begins with an empty line and 'Human:'"
        )
    said = zip(turns[::2], turns[1::2], strict=True)
    return [_message({"role": who.lower(), "content": text.strip()}, None, place) for who, text in said]


def last_turn(messages: list[Message], place: str) -> tuple[tuple[Message, ...], str, str]:
    """(context, prompt, completion): the assistant's last message, the user's before it, and what was said before.

    Raises BadInput where the conversation does not end so, or where user and assistant do not take turns.
    """
    first = int(messages[0]["role"] == "system")
    for number, message in enumerate(messages[first:]):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            raise BadInput(
                f"{place}: message {number + first + 1} is the {message['role']}'s, expected the {expected}'s "
                "(user and assistant take turns, after a system message at most)"
            )
    if len(messages) < first + 2 or messages[-1]["role"] != "assistant":
        raise BadInput(f"{place}: its last message is the {messages[-1]['role']}'s, expected the assistant's")
    return tuple(messages[:-2]), messages[-2]["content"], messages[-1]["content"]


def _message(value: Any, role: str | None, place: str) -> Message:
    said: Any = role
    content = value
    if isinstance(value, dict):
        said = value.get("role", value.get("from"))
        content = value.get("content", value.get("value"))
        if not isinstance(said, str) or said not in ROLES:
            raise BadInput(f"{place}: a message's role is {said!r}; accepted: {', '.join(ROLES)}")
        if isinstance(content, list):
            content = _joined(content)
    if not isinstance(content, str) or not content.strip() or said is None:
        raise BadInput(
            f"{place}: holds {_short(content)}; expected a text, or messages with role and content"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{place}: holds {content[error.start]!r}, half of a surrogate pair, which is no character"
        ) from None
    return {"role": ROLES[said], "content": content}


def _joined(parts: list[Any]) -> Any:
    """The text of OpenAI's content parts, where all of them are texts."""
    if parts and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _short(value: Any) -> str:
    return repr(value)[:80]
