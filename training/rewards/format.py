"""`format`: does the whole completion have the asked-for shape (R1's think and answer tags by default)?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from training.errors import BadInput


class FormatReward:
    """1.0 where the whole completion matches `pattern`, else 0.0."""

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise BadInput(
                f"rewards.format.pattern = {pattern!r}: not a regular expression: {error}"
            ) from None

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
        return [float(self.pattern.fullmatch(text) is not None) for text in completions]
