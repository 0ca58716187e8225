"""`repetition`: a penalty for n-grams that come again (arXiv:2502.03373 appendix C.2; open-r1's
`get_repetition_penalty_reward`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.rewards.explained import Explained, ExplainingReward


class RepetitionReward(ExplainingReward):
    """(1 - distinct n-grams / n-grams) * max_penalty, over lower-case words between white space.

    0 for a completion of fewer than `ngram_size` words; at most 0 everywhere, since `max_penalty` is.
    """

    def __init__(self, ngram_size: int, max_penalty: float) -> None:
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def explain(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Explained]:
        return [self._grade(text.lower().split()) for text in completions]

    def _grade(self, words: list[str]) -> Explained:
        ngrams = list(zip(*(words[i:] for i in range(self.ngram_size)), strict=False))
        repeats = len(ngrams) - len(set(ngrams))
        score = repeats / len(ngrams) * self.max_penalty if repeats else 0.0
        return Explained(score, reason=f"{repeats} of {len(ngrams)} {self.ngram_size}-grams came before")
