"""`format`: does the whole completion have the asked-for shape (R1's think and answer tags by default)?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from training.errors import BadInput
from training.rewards.explained import Explained, ExplainingReward


class FormatReward(ExplainingReward):
    """1.0 where the whole completion matches `pattern`, else 0.0."""

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise BadInput(
                f"rewards.format.pattern = {pattern!r}: not a regular expression: {error}"
            ) from None

    def explain(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Explained]:
        return [
            Explained(1.0, reason="matches the pattern")
            if self.pattern.fullmatch(text)
            else Explained(0.0, reason="does not match the pattern")
            for text in completions
        ]
