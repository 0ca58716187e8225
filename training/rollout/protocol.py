"""What a rollout engine is: token ids in, sampled token ids with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. The log-probabilities are those of the tempered, full distribution."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    greedy: bool = False


@dataclass(frozen=True)
class Request:
    """One completion to sample: the prompt's token ids and the seed of its own random stream."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """What was sampled: ids (the end token included when it was drawn), their log-probabilities in nats,
    and why it ended: `stop` (an end token, also on the very last allowed position) or `length` (truncated)."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """Samples completions; equal neighbouring prompts are computed once."""

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. A request's result depends on its prompt and seed only
        (up to rounding), not on what else is in the batch."""

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over the policy's current weights."""

    def close(self) -> None:
        """Give back what the engine holds; it is not used afterwards."""
