"""`overlong`: a soft punishment for completions that come near the length limit (DAPO, arXiv:2503.14476 eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OverlongReward:
    """0 up to max_length - buffer tokens, falling linearly to -1 at max_length."""

    def __init__(self, max_length: int, buffer: int) -> None:
        self.max_length, self.buffer = max_length, buffer

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float | None]:
        free = self.max_length - self.buffer
        return [-min(1.0, max(0.0, (len(ids) - free) / self.buffer)) for ids in completion_ids]
