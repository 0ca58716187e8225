"""The embedded rollout engine: torch + transformers, no server, runs anywhere.

A prompt shared by neighbouring requests is prefilled once and its cache expanded; finished rows leave the batch.
Every request has its own random stream, so its completion does not depend on its neighbours.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import groupby

import numpy as np
import torch
import transformers

from training.rollout.cache import roomy_cache
from training.rollout.protocol import Completion, Request, Sampling

# The argument's new name is unknown to the transformers that vLLM's releases are pinned to.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)

BLOCK = 256
"""Entries of the vocabulary that are summed together when a token is drawn."""
COMPACT_AT = 0.25
"""Share of finished rows at which the batch is cut down to the running ones."""


class NativeEngine:
    """Samples with a model in this process; `end_ids` are the token ids that end a completion."""

    def __init__(
        self, model: transformers.PreTrainedModel, end_ids: set[int], max_batch_size: int = 128
    ) -> None:
        self.model = model
        self.end_ids = torch.tensor(sorted(end_ids), device=model.device)
        self.max_batch_size = max_batch_size

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """See RolloutEngine; at most `max_batch_size` requests run at once."""
        training = self.model.training
        self.model.eval()
        completions: list[Completion] = []
        with torch.no_grad():
            for start in range(0, len(requests), self.max_batch_size):
                completions += self._generate(requests[start : start + self.max_batch_size], sampling)
        self.model.train(training)
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model; one that already is the model's own costs nothing."""
        own = self.model.state_dict()
        for name, tensor in named_tensors:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)

    def close(self) -> None:
        """The model is the caller's."""

    def _generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        device = self.model.device
        groups = [(prompt, len(list(same))) for prompt, same in groupby(r.prompt_ids for r in requests)]
        prompts = [prompt for prompt, _ in groups]
        rows = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([n for _, n in groups])).to(
            device
        )
        uniforms = torch.from_numpy(
            np.stack(
                [np.random.Generator(np.random.Philox(r.seed)).random(sampling.max_tokens) for r in requests]
            )
        ).to(device)

        logits, cache, mask, lengths = self._prefill(prompts)
        logits, mask, position = logits[rows], mask[rows], lengths[rows]
        cache.batch_select_indices(rows)

        running = torch.arange(len(requests), device=device)
        finished = torch.zeros(len(requests), dtype=torch.bool, device=device)
        ids = torch.zeros(len(requests), sampling.max_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(requests), sampling.max_tokens, dtype=torch.float64, device=device)
        count = torch.full((len(requests),), sampling.max_tokens, device=device)
        stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        for step in range(sampling.max_tokens):
            token, logprob = sample(logits, uniforms[running, step], sampling)
            ids[running, step], logprobs[running, step] = token, logprob.double()
            ends = torch.isin(token, self.end_ids) & ~finished
            count[running[ends]] = step + 1
            stopped[running[ends]] = True
            finished |= ends
            if finished.all() or step + 1 == sampling.max_tokens:
                break
            if finished.float().mean() >= COMPACT_AT:
                keep = (~finished).nonzero().squeeze(-1)
                running, token, mask, position = running[keep], token[keep], mask[keep], position[keep]
                finished = finished[keep]
                cache.batch_select_indices(keep)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = self.model(
                input_ids=token[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
            ).logits[:, -1]
            position = position + 1
        lengths_out, ended = count.tolist(), stopped.tolist()
        return [
            Completion(ids[i, :n].tolist(), logprobs[i, :n].tolist(), "stop" if ended[i] else "length")
            for i, n in enumerate(lengths_out)
        ]

    def _prefill(
        self, prompts: list[tuple[int, ...]]
    ) -> tuple[torch.Tensor, transformers.DynamicCache, torch.Tensor, torch.Tensor]:
        """Left-padded prompts through the model: next-token logits [P, V], cache, mask [P, L], lengths [P]."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        cache = roomy_cache(self.model.config)
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        )
        return output.logits[:, -1], cache, mask, mask.sum(1)


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by inverting the cumulative distribution at `uniforms`. [B, V], [B] -> ids [B], logprobs [B].

    The log-probability is that of the tempered full distribution, also under top_p.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature != 1:
        scaled = scaled / sampling.temperature
    peak = scaled.amax(-1, keepdim=True)
    size = scaled.shape[-1]
    weights = scaled.new_zeros(len(scaled), -(-size // BLOCK) * BLOCK)
    torch.exp(scaled - peak, out=weights[:, :size])
    sums = weights.view(len(weights), -1, BLOCK).sum(-1, dtype=torch.float64)
    total = sums.sum(-1, keepdim=True)
    if sampling.greedy:
        token = scaled.argmax(-1)
    else:
        if sampling.top_p < 1:
            weights[:, :size] = _nucleus(weights[:, :size] / total.to(weights.dtype), sampling.top_p)
            sums = weights.view(len(weights), -1, BLOCK).sum(-1, dtype=torch.float64)
        token = _invert(weights.view(len(weights), -1, BLOCK), sums, uniforms).clamp(max=size - 1)
    chosen = (scaled - peak).gather(-1, token[:, None]) - total.log().to(scaled.dtype)
    return token, chosen.squeeze(-1)


def _invert(blocks: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index [B] at which weights [B, N, BLOCK], summed from the first on, pass the share `uniforms` [B] of their sum.

    First among the blocks' sums [B, N], then within one block, so that the vocabulary is read once.
    """
    ends = sums.cumsum(-1)
    point = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[-1] - 1)
    before = ends.gather(-1, block) - sums.gather(-1, block)
    rows = torch.arange(len(blocks), device=blocks.device)
    within = blocks[rows, block.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(within, (point - before).clamp(min=0), right=True)
    # rounding may put the point behind the block's last weight
    last = torch.searchsorted(within, within[:, -1:].contiguous())
    return (block * BLOCK + torch.minimum(offset, last)).squeeze(-1)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of tokens whose probability reaches `top_p`."""
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs).scatter(-1, order, torch.where(before < top_p, ordered, 0.0))
