import math

import torch

from training.algorithms.ratios import (
    MAX_LOG_RATIO,
    ratio,
    ratio_bounded,
    sequence_logprobs,
    truncated_importance_weights,
)


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_ratio_by_hand():
    torch.testing.assert_close(
        ratio(log(0.5, 0.1), log(0.25, 0.4)), torch.tensor([2.0, 0.25], dtype=torch.float64)
    )


def test_the_same_policy_has_ratio_exactly_one():
    logprobs = log(0.3, 0.9, 1e-5)
    assert ratio(logprobs, logprobs).tolist() == [1.0, 1.0, 1.0]


def test_a_stray_token_is_bounded_without_gradient_and_reported():
    logprobs = torch.tensor([-1.0, 1e4, -1e4], requires_grad=True)
    got = ratio(logprobs, torch.full((3,), -1.0))
    got.sum().backward()
    assert got.tolist() == [1.0, torch.tensor(MAX_LOG_RATIO).exp().item(), 0.0]
    assert logprobs.grad.tolist() == [1.0, 0.0, 0.0]
    assert ratio_bounded(logprobs.detach(), torch.full((3,), -1.0)).tolist() == [False, True, False]


def test_low_precision_log_probabilities_are_subtracted_in_float32():
    new, old = torch.tensor([-100.0], dtype=torch.bfloat16), torch.tensor([-0.5], dtype=torch.bfloat16)
    assert ratio(new, old).dtype == torch.float32
    assert ratio(old, new).log().item() == MAX_LOG_RATIO
    torch.testing.assert_close(ratio(new, old).log(), torch.tensor([-99.5]), rtol=1e-4, atol=0)


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    new = torch.stack([log(0.8, 0.2, 0.5), log(0.3, 0.5, 0.5), log(0.5, 0.5, 0.5)])
    old = torch.stack([log(0.1, 0.4, 0.1), log(0.1, 0.1, 0.1), log(0.1, 0.1, 0.1)])
    got = ratio(sequence_logprobs(new, mask), sequence_logprobs(old, mask))
    torch.testing.assert_close(got, torch.tensor([[2.0], [3.0], [1.0]], dtype=torch.float64))
    dirty = new.masked_fill(mask == 0, math.nan)
    assert torch.equal(sequence_logprobs(dirty, mask), sequence_logprobs(new, mask))


def test_importance_weights_are_capped_from_above_only():
    got = truncated_importance_weights(log(0.5, 0.5, 0.1, 0.5), log(0.4, 0.1, 0.5, 0.5), cap=2.0)
    torch.testing.assert_close(got, torch.tensor([1.25, 2.0, 0.2, 1.0], dtype=torch.float64))


def test_a_token_without_the_samplers_log_probability_counts_as_it_is():
    old = log(0.5, 0.5).requires_grad_()
    got = truncated_importance_weights(
        old, torch.tensor([torch.nan, math.log(0.4)], dtype=torch.float64), cap=2.0
    )
    torch.testing.assert_close(got, torch.tensor([1.0, 1.25], dtype=torch.float64))
    assert not got.requires_grad


def test_importance_weights_make_the_samplers_mean_the_trainers():
    trainer = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    sampler = torch.tensor([0.35, 0.3, 0.2, 0.09, 0.06], dtype=torch.float64)
    score = torch.tensor([1.0, -2.0, 3.0, 0.5, 7.0], dtype=torch.float64)
    weights = truncated_importance_weights(trainer.log(), sampler.log(), cap=2.0)
    torch.testing.assert_close((sampler * weights * score).sum(), (trainer * score).sum())
