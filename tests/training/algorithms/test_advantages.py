import pytest
import torch

from training.algorithms.advantages import (
    group_advantages,
    leave_one_out_advantages,
    process_advantages,
    reinforce_plus_plus_advantages,
    whiten,
    zero_spread,
)


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


# Leave-one-out


def test_leave_one_out_by_hand():
    # the other two's means are 2, 3, 4
    rewards = torch.tensor([6.0, 4.0, 0.0], dtype=torch.float64)
    assert leave_one_out_advantages(rewards, 3).tolist() == pytest.approx([4.0, 1.0, -5.0])


def test_leave_one_out_is_the_distance_from_the_mean_stretched():
    rewards = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = 4 / 3 * group_advantages(rewards, 4, "none")
    torch.testing.assert_close(leave_one_out_advantages(rewards, 4), expected)


def test_leave_one_out_counts_graded_completions_only():
    rewards = torch.tensor([6.0, torch.nan, 4.0, 0.0, 5.0, torch.nan, torch.nan, torch.nan])
    got = leave_one_out_advantages(rewards, 4, ~rewards.isnan())
    assert got.tolist() == pytest.approx([4.0, 0.0, 1.0, -5.0, 0.0, 0.0, 0.0, 0.0])


# REINFORCE++ with baseline


def test_reinforce_plus_plus_by_hand():
    # centred: 1 on three tokens, -1 on one; mean 0.5, unbiased variance (3 x 0.25 + 2.25) / 3 = 1
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    got = reinforce_plus_plus_advantages(torch.tensor([3.0, 1.0], dtype=torch.float64), 2, mask)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0, 0]], dtype=torch.float64))


def test_reinforce_plus_plus_without_the_ungraded():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    rewards = torch.tensor([3.0, torch.nan, 1.0], dtype=torch.float64)
    got = reinforce_plus_plus_advantages(rewards, 3, mask, ~rewards.isnan())
    alone = reinforce_plus_plus_advantages(rewards[[0, 2]], 2, mask[[0, 2]])
    assert got[1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(got[[0, 2]], alone)


def test_reinforce_plus_plus_of_groups_without_spread_is_zero():
    assert (reinforce_plus_plus_advantages(torch.tensor([0.3, 0.1 + 0.2]), 2, torch.ones(2, 3)) == 0).all()


# Process supervision

STEP_ENDS = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)


def test_process_supervision_by_hand():
    # steps of the group: 1 and 0 in the first completion, 2 in the second: mean 1, unbiased std 1
    rewards = torch.tensor([[9.0, 1.0, 9.0, 0.0, 9.0], [9.0, 9.0, 2.0, 9.0, 9.0]], dtype=torch.float64)
    got = process_advantages(rewards, STEP_ENDS, 2, eps=0.0)
    assert got.tolist() == [[-1.0, -1.0, -1.0, -1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]]


def test_one_step_a_completion_is_outcome_supervision():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    ends = torch.zeros(4, 3, dtype=torch.bool)
    ends[[0, 1, 2, 3], [2, 0, 1, 2]] = True
    got = process_advantages(rewards[:, None] * ends, ends, 4)
    torch.testing.assert_close(got[:, 0], group_advantages(rewards, 4))
    assert got[1].tolist()[1:] == [0.0, 0.0]


def test_steps_are_scaled_as_completions_are():
    rewards = torch.tensor([[0, 1.0, 0, 3.0, 0], [0, 0, 5.0, 0, 0]], dtype=torch.float64)
    got = process_advantages(rewards, STEP_ENDS, 2, "none")
    assert got.tolist() == [[-2.0, -2.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0, 0.0]]
    other = process_advantages(torch.cat([rewards, 2 * rewards]), STEP_ENDS.repeat(2, 1), 2, "batch", eps=0.0)
    spread = torch.tensor([1.0, 3.0, 5.0, 2.0, 6.0, 10.0], dtype=torch.float64).std()
    torch.testing.assert_close(other[:2], got / spread)


def test_groups_of_steps_are_apart_and_flat_ones_are_zero():
    rewards = torch.tensor([[9.0, 1.0, 9.0, 0.0, 9.0], [9.0, 9.0, 2.0, 9.0, 9.0]], dtype=torch.float64)
    both = process_advantages(torch.cat([rewards, torch.full_like(rewards, 0.7)]), STEP_ENDS.repeat(2, 1), 2)
    torch.testing.assert_close(both[:2], process_advantages(rewards, STEP_ENDS, 2))
    assert (both[2:] == 0).all()


# Whitening


def test_whitened_by_hand():
    values = torch.tensor([[1.0, 3.0], [5.0, 1e30]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    expected = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), expected)
    mean_kept = torch.tensor([[2.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask, shift_mean=False), mean_kept)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_nothing_to_whiten(num_tokens):
    mask = torch.arange(3)[None] < num_tokens
    assert whiten(torch.tensor([[5.0, 6.0, 7.0]]), mask).tolist() == [[0.0, 0.0, 0.0]]


def test_low_precision_rewards_are_averaged_in_float32():
    rewards = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    got = group_advantages(rewards, 4, "none")
    assert got.dtype == torch.float32
    assert got.tolist() == [191.25, -63.75, -63.75, -63.75]
