import math

import pytest
import torch

from training.algorithms.dpo import dpo_loss, implicit_rewards

CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = (
    torch.tensor(values, dtype=torch.float64)
    for values in ([-1.0, -5.0, -2.5], [-3.0, -4.0, -2.5], [-2.0, -4.5, -9.0], [-2.0, -4.25, -9.0])
)
DELTA = torch.tensor([2.0, -0.75, 0.0], dtype=torch.float64)


def loss(beta, loss_type="sigmoid", label_smoothing=0.0, swapped=False):
    pair, ref = (CHOSEN, REJECTED), (REF_CHOSEN, REF_REJECTED)
    if swapped:
        pair, ref = pair[::-1], ref[::-1]
    return dpo_loss(*pair, *ref, beta, loss_type, label_smoothing)


def test_values_by_hand():
    """βΔ = 1, -0.375, 0 at β = 0.5, where ipo's target 1 / (2β) is 1."""
    expected = [math.log1p(math.exp(-1)), math.log1p(math.exp(0.375)), math.log(2)]
    torch.testing.assert_close(loss(0.5), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(
        loss(0.5, "ipo"), torch.tensor([1.0, 1.75**2, 1.0], dtype=torch.float64), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("beta", [0.01, 0.1, 3.0])
def test_a_policy_equal_to_its_reference(beta):
    same = (CHOSEN, REJECTED, CHOSEN, REJECTED)
    torch.testing.assert_close(dpo_loss(*same, beta), torch.full_like(CHOSEN, math.log(2)))
    torch.testing.assert_close(dpo_loss(*same, beta, "ipo"), torch.full_like(CHOSEN, (1 / (2 * beta)) ** 2))
    assert (implicit_rewards(CHOSEN, CHOSEN, beta) == 0).all()


def gradients(beta, *settings):
    inputs = [CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()]
    dpo_loss(*inputs, REF_CHOSEN, REF_REJECTED, beta, *settings).sum().backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_gradients_weigh_a_pair_by_how_wrong_it_is(beta):
    """Rafailov et al., section 4: ∓β σ(-βΔ), large where the implied order is wrong; ipo's is linear in Δ."""
    chosen, rejected = gradients(beta)
    torch.testing.assert_close(chosen, -beta * torch.sigmoid(-beta * DELTA))
    torch.testing.assert_close(rejected, -chosen)
    chosen, rejected = gradients(beta, "ipo")
    torch.testing.assert_close(chosen, 2 * (DELTA - 1 / (2 * beta)))
    torch.testing.assert_close(rejected, -chosen)


def test_swapping_the_pair_turns_the_sign_of_delta():
    """-log σ(x) + log σ(-x) = -x; (Δ - c)² - (Δ + c)² = -4Δc."""
    torch.testing.assert_close(loss(0.3) - loss(0.3, swapped=True), -0.3 * DELTA)
    torch.testing.assert_close(loss(0.3, "ipo") - loss(0.3, "ipo", swapped=True), -2 * DELTA / 0.3)


def test_label_smoothing_is_the_expected_loss_under_flipped_labels():
    expected = 0.8 * loss(0.5) + 0.2 * loss(0.5, swapped=True)
    torch.testing.assert_close(loss(0.5, label_smoothing=0.2), expected)


def test_label_smoothing_puts_the_minimum_at_the_odds_of_a_right_label():
    """Where σ(βΔ) = 1 - ε nothing is left to learn."""
    chosen = torch.tensor([math.log(0.9 / 0.1) / 0.5], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    dpo_loss(chosen, zero, zero, zero, 0.5, label_smoothing=0.1).sum().backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-15)


def test_ipo_is_least_at_its_margin():
    zero = torch.zeros(1, dtype=torch.float64)
    assert dpo_loss(zero + 1 / (2 * 0.1), zero, zero, zero, 0.1, "ipo") == 0


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_only_the_ratio_to_the_reference_counts(loss_type):
    moved = dpo_loss(CHOSEN - 3, REJECTED + 2, REF_CHOSEN - 3, REF_REJECTED + 2, 0.5, loss_type)
    torch.testing.assert_close(moved, loss(0.5, loss_type))


def test_long_completions_neither_overflow_nor_vanish():
    zero = torch.zeros(2)
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    losses = dpo_loss(far, zero, zero, zero, 1.0)
    losses.sum().backward()
    assert losses.tolist() == [0, 1e4]
    assert far.grad.tolist() == [0, -1]


def test_half_precision_is_worked_out_in_float32():
    inputs = [x.bfloat16() for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
    assert dpo_loss(*inputs, 0.1).dtype == torch.float32
    assert implicit_rewards(inputs[0], inputs[2], 0.1).dtype == torch.float32


def test_the_reward_is_the_scaled_log_ratio():
    assert implicit_rewards(CHOSEN, REF_CHOSEN, 0.5).tolist() == [0.5, -0.25, 3.25]


@pytest.mark.parametrize(("loss_type", "smoothing"), [("ipo", 0.1), ("sigmoid", 0.5), ("sigmoid", -0.1)])
def test_a_smoothing_without_meaning_is_refused(loss_type, smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing {smoothing}"):
        loss(0.5, loss_type, smoothing)
