"""`model`: the reward model's score of a completion, read at its last token, or at each step's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from training.batches import Tree
from training.prompts import PromptRenderer
from training.reward_model import score_branches


class ModelReward:
    """Scores prompt + completion as the reward model saw them in training: same rendering, same end token.

    A completion that was cut off (`finish_reason` is `length`) is scored at its last token, without an end token.
    """

    def __init__(
        self, model: PreTrainedModel, renderer: PromptRenderer, micro_batch_tokens: int = 4096
    ) -> None:
        self.model, self.renderer, self.micro_batch_tokens = model, renderer, micro_batch_tokens

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]] | None = None,
        finish_reason: Sequence[str] | None = None,
        step_ends: Sequence[Sequence[int]] | None = None,
        **_: Any,
    ) -> list[float] | list[list[float]]:
        """Scores in order; `completion_ids`, the ids that were sampled, are taken as they are, texts else.

        With `step_ends`, the indices of each completion's steps' last ids, a list of scores for each completion.
        """
        reasons = finish_reason or ["stop"] * len(completions)
        if completion_ids is None:
            branches = map(self._rendered, completions, reasons)
        else:
            branches = map(self._sampled, completion_ids, reasons)
        trees = [
            Tree(self.renderer.ids(prompt), [branch for _, branch in group])
            for prompt, group in groupby(zip(prompts, branches, strict=True), key=lambda pair: pair[0])
        ]
        pad_id = self.renderer.tokenizer.pad_token_id or 0
        scores = score_branches(self.model, trees, pad_id, self.micro_batch_tokens, step_ends)
        if step_ends is None:
            return list(scores.tolist())
        return [part.tolist() for part in scores.split([len(ends) for ends in step_ends])]

    def _rendered(self, text: str, reason: str) -> list[int]:
        ids = self.renderer.completion_ids(text)
        return ids if reason == "stop" else ids[:-1]

    def _sampled(self, ids: list[int], reason: str) -> list[int]:
        """The sampled ids; of a model's several end tokens, the one that training showed."""
        return [*ids[:-1], *self.renderer.completion_ids("")] if reason == "stop" else ids
