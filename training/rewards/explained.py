"""What a reward can say about a grade besides its score, and how any reward is called.

A reward is a function, sync or async. One that can tell more has a method `explain`, called like the reward itself,
sync or async too, which returns an `Explained` for each completion; `ExplainingReward` makes a reward of that alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Explained:
    """A completion's score (None: not applicable, or not graded), what was graded in it, and why."""

    score: float | None
    extracted: str | None = None
    reason: str = ""


class ExplainingReward:
    """A reward whose scores are those of its `explain`."""

    explain: Callable[..., list[Explained]]
    """A grade for each completion."""

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | None]:
        return [one.score for one in self.explain(prompts, completions, **columns)]


def finished(values: Sequence[Any]) -> list[Any]:
    """The values, those of coroutines once they have all ended; they wait side by side."""
    if not any(inspect.isawaitable(value) for value in values):
        return list(values)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_gather(values))
    with ThreadPoolExecutor(1) as thread:  # a caller that has a loop of its own, such as a notebook
        return thread.submit(asyncio.run, _gather(values)).result()


async def _gather(values: Sequence[Any]) -> list[Any]:
    return list(
        await asyncio.gather(*(v if isinstance(v, Awaitable) else asyncio.sleep(0, v) for v in values))
    )
