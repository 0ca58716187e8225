import pytest
import torch

from training.algorithms.advantages import group_advantages, zero_spread


def test_hand_worked_group():
    # rewards 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64) / (3**-0.5 + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, 4), expected)


def test_without_scaling_it_is_reward_minus_mean():
    rewards = torch.tensor([3.0, 1.0, 10.0, 20.0])
    assert group_advantages(rewards, 2, "none").tolist() == [1.0, -1.0, -5.0, 5.0]


def test_batch_scale_uses_the_whole_batch():
    rewards = torch.tensor([3.0, 1.0, 10.0, 20.0], dtype=torch.float64)
    expected = torch.tensor([1.0, -1.0, -5.0, 5.0], dtype=torch.float64) / (rewards.std() + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, 2, "batch"), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_float_noise_is_no_spread(scale):
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(rewards, 4, scale)
    assert advantages[:4].tolist() == [0.0] * 4
    assert advantages[4] > 0
    assert zero_spread(rewards, 4).tolist() == [True, False]


def test_ungraded_completions_are_absent():
    rewards = torch.tensor([1.0, 99.0, 0.0, 0.0])
    valid = torch.tensor([True, False, True, True])
    got = group_advantages(rewards, 4, "group", valid)
    alone = group_advantages(torch.tensor([1.0, 0.0, 0.0]), 3)
    assert got[1] == 0
    torch.testing.assert_close(got[[0, 2, 3]], alone)


def test_a_group_with_one_graded_completion_teaches_nothing():
    got = group_advantages(torch.tensor([1.0, 0.0]), 2, "group", torch.tensor([True, False]))
    assert got.tolist() == [0.0, 0.0]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="2 or more"):
        group_advantages(torch.ones(4), 1)


def test_half_a_group_is_refused():
    with pytest.raises(ValueError, match="not whole groups of 4"):
        group_advantages(torch.ones(6), 4)
