"""`language`: the share of a completion's words that are of the target language (DeepSeek-R1, arXiv:2501.12948 §2.3.2).

A word (see training.languages) is of the target language when it is written in its script, which tells Chinese from
English exactly, but English from French not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regex

from training.languages import SCRIPTS, words
from training.rewards.explained import Explained, ExplainingReward


class LanguageReward(ExplainingReward):
    """From 0 to 1; None for a completion without words."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._own = regex.compile("|".join(rf"\p{{{script}}}" for script in SCRIPTS[target]))

    def explain(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Explained]:
        return [self._grade(words(text)) for text in completions]

    def _grade(self, words: list[str]) -> Explained:
        if not words:
            return Explained(None, reason="no words")
        own = sum(self._own.match(word) is not None for word in words)
        return Explained(
            own / len(words), reason=f"{own} of {len(words)} words in the script of {self.target!r}"
        )
