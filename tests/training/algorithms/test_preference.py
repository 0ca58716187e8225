import math

import pytest
import torch

from training.algorithms.preference import bradley_terry_loss


def pair(chosen, rejected):
    return torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)


def test_bradley_terry_by_hand():
    """-log σ(2 - 0.5) = log(1 + e^-1.5)."""
    assert bradley_terry_loss(*pair(2.0, 0.5)).item() == pytest.approx(
        math.log(1 + math.exp(-1.5)), abs=1e-12
    )
    assert bradley_terry_loss(*pair(0.3, 0.3)).item() == pytest.approx(math.log(2), abs=1e-12)


def test_margin_and_centring_by_hand():
    margin = torch.tensor([0.5], dtype=torch.float64)
    loss = bradley_terry_loss(*pair(2.0, 0.5), margin, center_coefficient=0.1)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) + 0.1 * 2.5**2, abs=1e-12)


def test_its_gradient_is_the_probability_of_the_other_choice():
    """d/d chosen = -(1 - σ(chosen - rejected)) + 2·coefficient·(chosen + rejected), and the opposite for rejected."""
    chosen, rejected = (tensor.requires_grad_() for tensor in pair(2.0, 0.5))
    bradley_terry_loss(chosen, rejected, center_coefficient=0.1).sum().backward()
    wrong = 1 / (1 + math.exp(1.5))
    assert chosen.grad.item() == pytest.approx(-wrong + 0.5, abs=1e-12)
    assert rejected.grad.item() == pytest.approx(wrong + 0.5, abs=1e-12)


def test_only_the_difference_counts_without_centring():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 3.0, 0.0])
    moved = bradley_terry_loss(chosen + 7, rejected + 7)
    torch.testing.assert_close(moved, bradley_terry_loss(chosen, rejected))


def test_far_apart_rewards_stay_finite_and_bf16_is_worked_out_in_float32():
    loss = bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0]))
    assert loss.item() == pytest.approx(1000)
    assert bradley_terry_loss(torch.zeros(2).bfloat16(), torch.ones(2).bfloat16()).dtype == torch.float32
