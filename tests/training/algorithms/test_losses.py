import pytest
import torch

from training.algorithms.losses import clip_fractions, clipped_policy_loss, token_weights

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [[1 / 9] * 3 + [0], [1 / 3, 0, 0, 0], [1 / 6, 1 / 6, 0, 0]]),
        ("dapo", [[1 / 6] * 3 + [0], [1 / 6, 0, 0, 0], [1 / 6, 1 / 6, 0, 0]]),
        ("bnpo", [[1 / 6] * 3 + [0], [1 / 6, 0, 0, 0], [1 / 6, 1 / 6, 0, 0]]),
        ("dr_grpo", [[1 / 30] * 3 + [0], [1 / 30, 0, 0, 0], [1 / 30, 1 / 30, 0, 0]]),
    ],
)
def test_weights_by_hand(loss_type, expected):
    torch.testing.assert_close(token_weights(MASK, loss_type, 10), torch.tensor(expected))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
def test_a_masked_completion_is_absent(loss_type):
    without = token_weights(MASK[:2], loss_type, 10)
    masked = torch.cat([MASK[:2], torch.zeros(1, 4, dtype=torch.bool)])
    torch.testing.assert_close(token_weights(masked, loss_type, 10)[:2], without)


def test_no_tokens_at_all_weigh_nothing():
    assert token_weights(torch.zeros(2, 3), "grpo", 3).sum() == 0


def test_clipping_by_hand():
    old = torch.zeros(4, dtype=torch.float64)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = clipped_policy_loss(ratio.log(), old, advantages, 0.2, 0.3)
    # positive advantage: min(1.5, 1.3), min(0.5, 0.8); negative: -min over the negated products
    torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8], dtype=torch.float64))
    low, high = clip_fractions(ratio.log(), old, advantages, 0.2, 0.3)
    assert low.tolist() == [False, False, False, True]
    assert high.tolist() == [True, False, False, False]


def test_gradient_at_ratio_one_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_policy_loss(logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), 0.2, 0.2).sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]
