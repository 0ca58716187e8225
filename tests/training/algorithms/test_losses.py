import pytest
import torch

from training.algorithms.kl import kl_penalty
from training.algorithms.losses import (
    cispo_loss,
    clip_fractions,
    clipped_policy_loss,
    sapo_loss,
    token_weights,
    value_loss,
)
from training.algorithms.ratios import sequence_logprobs, truncated_importance_weights

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


# Ratios beyond the clip

RATIO = torch.tensor([0.1, 0.7, 1.0, 1.1, 1.25, 1.6, 2.9, 3.1, 50.0], dtype=torch.float64)


def value_and_slope(loss, advantage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of (logprobs, old_logprobs, advantages) at RATIO, and its derivative by the log-probability."""
    logprobs = RATIO.log().requires_grad_()
    per_token = loss(logprobs, torch.zeros_like(RATIO), torch.full_like(RATIO, advantage))
    per_token.sum().backward()
    return per_token.detach(), logprobs.grad


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_delta_is_dual_clip_and_two_sided_clipping(advantage):
    got, _ = value_and_slope(lambda *x: clipped_policy_loss(*x, 0.2, 0.28, delta=3.0), advantage)
    clipped = RATIO.clamp(0.8, 1.28)
    surrogate = torch.minimum(RATIO * advantage, clipped * advantage)
    dual_clip = torch.maximum(surrogate, torch.tensor(3.0 * advantage)) if advantage < 0 else surrogate
    two_sided = torch.minimum(RATIO.clamp(max=3.0) * advantage, clipped * advantage)
    torch.testing.assert_close(got, -dual_clip)
    torch.testing.assert_close(got, -two_sided)


def test_delta_stops_the_gradient_of_large_ratios():
    _, slope = value_and_slope(lambda *x: clipped_policy_loss(*x, 0.2, 0.28, delta=3.0), -2.0)
    # below 0.8 the clip, above 3 delta
    torch.testing.assert_close(slope, 2 * RATIO * ((RATIO > 0.8) & (RATIO < 3.0)))


def test_a_delta_inside_the_clip_range_is_refused():
    with pytest.raises(ValueError, match=r"delta 1.1 .* at least 1 \+ epsilon_high = 1.28"):
        clipped_policy_loss(RATIO.log(), RATIO.log(), RATIO, 0.2, 0.28, delta=1.1)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_keeps_every_tokens_gradient_with_a_capped_weight(advantage):
    value, slope = value_and_slope(lambda *x: cispo_loss(*x, max_ratio=3.0), advantage)
    torch.testing.assert_close(slope, -advantage * RATIO.clamp(max=3.0))
    torch.testing.assert_close(value, -advantage * RATIO.clamp(max=3.0) * RATIO.log())


@pytest.mark.parametrize(("advantage", "temperature"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapos_gate_is_one_at_ratio_one_and_fades_like_its_sech(advantage, temperature):
    value, slope = value_and_slope(lambda *x: sapo_loss(*x, 1.0, 1.05), advantage)
    # d/dr (4/τ) σ(τ(r-1)) = 4 σ (1 - σ) = sech²(τ(r-1)/2), and dr/dlogprob = r
    gate = 1 / torch.cosh(temperature * (RATIO - 1) / 2) ** 2
    torch.testing.assert_close(slope, -advantage * gate * RATIO)
    assert value[2].item() == pytest.approx(-advantage * 2 / temperature)


def test_a_sequence_loss_gives_each_token_its_share():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0] * 4, [-2.0] * 4], dtype=torch.float64, requires_grad=True)
    new, old = sequence_logprobs(logprobs, mask), sequence_logprobs(logprobs.detach(), mask)
    per_token = clipped_policy_loss(new, old, torch.tensor([[1.0], [-3.0]]), 0.2, 0.2)
    (token_weights(mask, "grpo", 4) * per_token).sum().backward()
    # two completions, so each weighs 1/2; at ratio 1 its tokens share -advantage equally
    expected = torch.tensor([[-1 / 8] * 4, [3 / 4, 3 / 4, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


# The value model's loss


def test_value_loss_by_hand():
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, -1.0])
    values = torch.tensor([0.1, 0.9, 1.5, 0.9])
    # within the clip: 0.9²; clipped to 0.2: worse than 0.1²; worse than 0.5²; and 1.9² worse than clipped 1.2²
    expected = 0.5 * torch.tensor([0.81, 0.64, 0.64, 3.61])
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), expected)


def test_a_value_that_left_the_clip_towards_its_return_learns_no_more():
    values = torch.tensor([0.1, 0.9, 0.9], requires_grad=True)
    value_loss(values, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, 1.9]))


def test_an_infinite_clip_range_is_the_squared_error():
    values, returns = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 5.0])
    assert torch.equal(value_loss(values, torch.zeros(2), returns, torch.inf), 0.5 * (values - returns) ** 2)


# Laws that hold for every loss


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LENGTHS = torch.tensor([6, 1, 3, 4, 2, 6])
RAGGED = (torch.arange(6) < LENGTHS[:, None]).double()
INPUTS = {
    "old": -noise(6, 6, seed=1).abs(),
    "sampler": -noise(6, 6, seed=2).abs(),
    "ref": -noise(6, 6, seed=3).abs(),
    "advantages": noise(6, 6, seed=4),
    "mask": RAGGED,
}
LOGPROBS = INPUTS["old"] + 0.4 * noise(6, 6, seed=5)


def gspo(x, old, ref, sampler, advantages, mask):
    new, before = sequence_logprobs(x, mask), sequence_logprobs(old, mask)
    return clipped_policy_loss(new, before, advantages[:, :1], 0.2, 0.2)


LOSSES = {
    "clipped": lambda x, old, advantages, **_: clipped_policy_loss(x, old, advantages, 0.2, 0.28),
    "dual clip": lambda x, old, advantages, **_: clipped_policy_loss(x, old, advantages, 0.2, 0.2, 1.3),
    "gspo": gspo,
    "cispo": lambda x, old, advantages, **_: cispo_loss(x, old, advantages, 1.3),
    "sapo": lambda x, old, advantages, **_: sapo_loss(x, old, advantages, 1.0, 1.05),
    "k2": lambda x, ref, **_: kl_penalty(x, ref, "k2"),
    "k3": lambda x, ref, **_: kl_penalty(x, ref, "k3"),
    "corrected": lambda x, old, sampler, advantages, **_: (
        truncated_importance_weights(old, sampler, 2.0) * clipped_policy_loss(x, old, advantages, 0.2, 0.2)
    ),
    "value": lambda x, old, ref, **_: value_loss(x, old, ref, 0.2),
}


def loss_and_gradient(loss, logprobs, weights, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    total = (weights * loss(logprobs, **inputs)).sum()
    total.backward()
    return total.detach(), logprobs.grad


@pytest.mark.parametrize("aggregation", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(name, aggregation):
    weights = token_weights(RAGGED, aggregation, 8)
    whole, gradient = loss_and_gradient(LOSSES[name], LOGPROBS, weights, INPUTS)
    for split in ([1, 1, 1, 1, 1, 1], [2, 4], [5, 1], [3, 3]):
        parts = [
            loss_and_gradient(
                LOSSES[name], LOGPROBS[rows], weights[rows], {k: v[rows] for k, v in INPUTS.items()}
            )
            for rows in torch.arange(6).split(split)
        ]
        torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).sum(), whole)
        torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient)


@pytest.mark.parametrize("garbage", [1e30, -1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_what_lies_under_the_mask_never_matters(name, garbage):
    weights = token_weights(RAGGED, "dapo", 8)
    clean = loss_and_gradient(LOSSES[name], LOGPROBS, weights, INPUTS)
    hidden = RAGGED == 0
    for dirty in ["logprobs", "old", "ref", "sampler", "advantages"]:
        inputs = {k: v.masked_fill(hidden, garbage) if k == dirty else v for k, v in INPUTS.items()}
        logprobs = LOGPROBS.masked_fill(hidden, garbage) if dirty == "logprobs" else LOGPROBS
        loss, gradient = loss_and_gradient(LOSSES[name], logprobs, weights, inputs)
        torch.testing.assert_close(loss, clean[0])
        torch.testing.assert_close(gradient, clean[1])


@pytest.mark.parametrize(
    ("given", "inside"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_worked_out_in_float32_or_better(name, given, inside):
    inputs = {key: value.to(given) for key, value in INPUTS.items()}
    assert LOSSES[name](LOGPROBS.to(given), **inputs).dtype == inside
