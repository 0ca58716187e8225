"""`overlong`: a soft punishment for completions that come near the length limit (DAPO, arXiv:2503.14476 eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.rewards.explained import Explained, ExplainingReward


class OverlongReward(ExplainingReward):
    """0 up to max_length - buffer tokens, falling linearly to -1 at max_length."""

    def __init__(self, max_length: int, buffer: int) -> None:
        self.max_length, self.buffer = max_length, buffer

    def explain(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        *,
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[Explained]:
        free = self.max_length - self.buffer
        return [
            Explained(
                -min(1.0, max(0.0, (len(ids) - free) / self.buffer)),
                reason=f"{len(ids)} tokens, {free} of {self.max_length} are free",
            )
            for ids in completion_ids
        ]
