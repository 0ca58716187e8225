"""Log-probabilities of given tokens, without ever holding logits for more than a chunk of positions.

The output layer and the log-softmax run chunk by chunk, in float32, and once more in the backward pass; memory
is flat in vocabulary x tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from training.batches import Layout

CHUNK = 512
"""Positions whose logits are held at once."""


class _LinearLogSoftmax(torch.autograd.Function):
    """(log p(target), entropy) of softmax(hidden @ weight.T / temperature), both differentiable."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> Any:
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy = torch.empty_like(logprobs)
        normalizer = torch.empty_like(logprobs)
        for part in _chunks(len(targets)):
            logits = _logits(hidden[part], weight, temperature)
            lse = torch.logsumexp(logits, -1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lse
            entropy[part] = lse - (torch.exp(logits - lse[:, None]) * logits).sum(-1)
            normalizer[part] = lse
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with_entropy = bool(grad_entropy.any())
        for part in _chunks(len(targets)):
            log_p = _logits(hidden[part], weight, ctx.temperature) - normalizer[part, None]
            p = log_p.exp()
            grad = -grad_logprobs[part, None] * p
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            if with_entropy:
                grad -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part])
        return grad_hidden, grad_weight, None, None


def hidden_states(
    model: transformers.PreTrainedModel, layout: Layout, positions: torch.Tensor
) -> torch.Tensor:
    """Last hidden states [N, H] of the layout's flat `positions` [N], such as its `sources` or its `ends`."""
    trunk = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    states = trunk(
        input_ids=layout.input_ids,
        attention_mask=_mask_for(model, layout.attention_mask),
        position_ids=layout.position_ids,
        use_cache=False,
    ).last_hidden_state
    return states.flatten(0, 1)[positions]


def logprobs_of(
    model: transformers.PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` [N] and entropies, in nats, from hidden states [N, H]: ([N], [N])."""
    weight = model.get_output_embeddings().weight
    logprobs, entropy = _LinearLogSoftmax.apply(hidden, weight, targets, temperature)
    return logprobs, entropy


def token_logprobs(
    model: transformers.PreTrainedModel, layout: Layout, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, in nats, of every branch token of a layout: ([N], [N]).

    Both are of the distribution softmax(logits / temperature), the one that completions are sampled from.
    """
    return logprobs_of(model, hidden_states(model, layout, layout.sources), layout.targets, temperature)


def _mask_for(model: transformers.PreTrainedModel, visible: torch.Tensor) -> torch.Tensor:
    """An additive mask; a padding row that sees nothing would give NaN, so it sees itself."""
    eye = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    zero = torch.zeros((), dtype=model.dtype, device=visible.device)
    return torch.where(visible | eye, zero, torch.finfo(model.dtype).min)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _chunks(length: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
