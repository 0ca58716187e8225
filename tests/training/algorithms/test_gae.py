import pytest
import torch

from training.algorithms.advantages import group_advantages
from training.algorithms.gae import gae, token_rewards
from training.algorithms.kl import kl_penalty

LENGTHS = [5, 1, 3, 4]
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


REWARDS, VALUES = noise(4, 5, seed=1), noise(4, 5, seed=2)


def to_go(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of a completion's rewards from each token on, written out."""
    out = torch.zeros_like(rewards)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            out[b, t] = sum(gamma ** (s - t) * rewards[b, s] for s in range(t, length))
    return out


def test_two_tokens_by_hand():
    # δ_1 = 1 - 0.25 = 0.75; δ_0 = 0 + 0.5 x 0.25 - 0.5 = -0.375; A_0 = δ_0 + 0.5 x 0.5 x 0.75
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(rewards, values, torch.ones(1, 2), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.1875, 0.75]]
    assert returns.tolist() == [[0.3125, 1.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_one_is_return_minus_value(gamma):
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma, lam=1.0)
    torch.testing.assert_close(returns, to_go(REWARDS, gamma))
    torch.testing.assert_close(advantages, (to_go(REWARDS, gamma) - VALUES) * MASK)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_zero_is_the_one_step_error(gamma):
    advantages, _ = gae(REWARDS, VALUES, MASK, gamma, lam=0.0)
    next_values = torch.cat([VALUES[:, 1:], torch.zeros(4, 1)], 1) * torch.cat(
        [MASK[:, 1:], torch.zeros(4, 1)], 1
    )
    torch.testing.assert_close(advantages, (REWARDS + gamma * next_values - VALUES) * MASK)


def test_an_exact_critic_leaves_no_advantage():
    values = to_go(REWARDS, 0.9)
    advantages, _ = gae(REWARDS, values, MASK, gamma=0.9, lam=0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


def test_a_constant_critic_subtracts_a_constant():
    advantages, _ = gae(REWARDS, torch.full_like(VALUES, 0.3), MASK, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, (to_go(REWARDS, 1.0) - 0.3) * MASK)


def test_a_critic_that_knows_the_groups_mean_is_grpo_without_normalisation():
    scores = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    rewards = token_rewards(scores, torch.zeros(4, 5), MASK, kl_coef=0.05)
    advantages, _ = gae(rewards, scores.mean().expand(4, 5), MASK, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, group_advantages(scores, 4, "none")[:, None] * MASK)


def test_the_reward_lands_on_the_last_token_and_the_kl_on_every_one():
    kl = torch.tensor([[1.0, -2.0, 4.0], [8.0, 1e30, 1e30], [1e30, 1e30, 1e30]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    got = token_rewards(torch.tensor([10.0, 20.0, 30.0]), kl, mask, kl_coef=0.5)
    assert got.tolist() == [[-0.5, 1.0, 8.0], [16.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_without_a_difference_from_the_reference_only_the_reward_is_left():
    logprobs = noise(4, 5, seed=3)
    got = token_rewards(torch.ones(4), kl_penalty(logprobs, logprobs, "k1"), MASK, kl_coef=0.5)
    assert got.sum(1).tolist() == [1.0] * 4
    assert [got[b, length - 1].item() for b, length in enumerate(LENGTHS)] == [1.0] * 4


@pytest.mark.parametrize("garbage", [1e30, -1e30, torch.nan])
def test_what_lies_under_the_mask_never_matters(garbage):
    dirty = [x.masked_fill(~MASK, garbage) for x in (REWARDS, VALUES)]
    for got, expected in zip(
        gae(*dirty, MASK, 0.99, 0.95), gae(REWARDS, VALUES, MASK, 0.99, 0.95), strict=True
    ):
        assert torch.equal(got, expected)
        assert (got[~MASK] == 0).all()


def test_padding_in_front_or_between_is_passed_over():
    wide = torch.tensor([[0, 1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    rewards, values = (
        torch.full((1, 7), 1e30, dtype=torch.float64),
        torch.full((1, 7), -1e30, dtype=torch.float64),
    )
    rewards[wide], values[wide] = REWARDS[2, :3], VALUES[2, :3]
    advantages, _ = gae(rewards, values, wide, 0.9, 0.8)
    expected, _ = gae(REWARDS[2:3, :3], VALUES[2:3, :3], torch.ones(1, 3), 0.9, 0.8)
    assert torch.equal(advantages[wide], expected.flatten())
