"""The part of a completion that counts as its answer, for rewards that read it as it stands."""

from __future__ import annotations

import re

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; the whole text where there is no thinking, None where it never ends."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def tagged(text: str) -> str | None:
    """What the last `<answer>` element holds, None where there is none."""
    tags = _ANSWER_TAG.findall(text)
    return tags[-1].strip() if tags else None
