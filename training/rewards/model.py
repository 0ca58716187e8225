"""`model`: the reward model's score of a completion, read at its last token, or at each step's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import transformers

from training.batches import Tree
from training.prompts import Message, PromptRenderer
from training.reward_model import score_branches


class ModelReward:
    """Scores prompt + completion as the reward model saw them in training: same rendering, same end.

    A completion that was cut off (`finish_reason` is `length`) is scored at its last token, without its end.
    `renderer` is the policy's where the reward model was trained as the policy is prompted; with `own`, the
    model's own (see `renderer_of`), which is fed texts and closes the assistant's turn as its chat template does.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        renderer: PromptRenderer,
        micro_batch_tokens: int = 4096,
        own: bool = False,
    ) -> None:
        self.model, self.renderer, self.micro_batch_tokens = model, renderer, micro_batch_tokens
        self._own_end = renderer.turn_end() if own else None

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]] | None = None,
        finish_reason: Sequence[str] | None = None,
        step_ends: Sequence[Sequence[int]] | None = None,
        context: Sequence[Sequence[Message]] | None = None,
        **_: Any,
    ) -> list[float] | list[list[float]]:
        """Scores in order; `completion_ids`, the ids that were sampled, are taken as they are, texts else;
        `context` are the messages before each prompt.

        With `step_ends`, the indices of each completion's steps' last ids, a list of scores for each completion.
        """
        reasons = finish_reason or ["stop"] * len(completions)
        if completion_ids is None or self._own_end is not None:
            branches = map(self._rendered, completions, reasons)
        else:
            branches = map(self._sampled, completion_ids, reasons)
        asked = zip(prompts, context or [()] * len(prompts), strict=True)
        trees = [
            Tree(self.renderer.ids(*question), [branch for _, branch in group])
            for question, group in groupby(zip(asked, branches, strict=True), key=lambda pair: pair[0])
        ]
        pad_id = self.renderer.tokenizer.pad_token_id or 0
        scores = score_branches(self.model, trees, pad_id, self.micro_batch_tokens, step_ends)
        if step_ends is None:
            return list(scores.tolist())
        return [part.tolist() for part in scores.split([len(ends) for ends in step_ends])]

    def _rendered(self, text: str, reason: str) -> list[int]:
        if reason != "stop":
            return self.renderer.text_ids(text)
        if self._own_end is None:
            return self.renderer.completion_ids(text)
        return self.renderer.text_ids(text + self._own_end)

    def _sampled(self, ids: list[int], reason: str) -> list[int]:
        """The sampled ids; of a model's several end tokens, the one that training showed."""
        return [*ids[:-1], *self.renderer.completion_ids("")] if reason == "stop" else ids


def renderer_of(
    tokenizer: transformers.PreTrainedTokenizerBase, policy: PromptRenderer
) -> tuple[PromptRenderer, bool]:
    """What shows texts to a reward model that has `tokenizer`, and whether that is the model's own.

    A model with the policy's vocabulary and chat template was made like the policy and reads the ids that it
    samples. Another one is shown texts through its own chat template or, if it has none, the recipe's.
    """
    if (
        tokenizer.get_vocab() == policy.tokenizer.get_vocab()
        and tokenizer.chat_template == policy.tokenizer.chat_template
    ):
        return policy, False
    config = policy.config
    if tokenizer.chat_template is not None:
        config = config.model_copy(update={"chat_template": None})
    return PromptRenderer(tokenizer, config), True
