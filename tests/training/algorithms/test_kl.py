import pytest
import torch

from training.algorithms.kl import adaptive_kl_coef, kl_penalty

P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
Q = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)
EXACT = (P * (P / Q).log()).sum()


def test_k1_and_k3_meet_the_exact_kl_on_a_small_vocabulary():
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((P * kl_penalty(P.log(), Q.log(), estimator)).sum(), EXACT)


def test_k2_is_half_the_squared_log_ratio():
    torch.testing.assert_close(kl_penalty(P.log(), Q.log(), "k2"), (P / Q).log() ** 2 / 2)


def test_k3_is_never_negative_and_zero_without_difference():
    assert (kl_penalty(P.log(), Q.log(), "k3") >= 0).all()
    assert (kl_penalty(P.log(), P.log(), "k3") == 0).all()


def test_k3_gradient_is_one_minus_the_ratio():
    logprobs = P.log().clone().requires_grad_()
    kl_penalty(logprobs, Q.log(), "k3").sum().backward()
    torch.testing.assert_close(logprobs.grad, 1 - Q / P)


# Gradients: a policy over five tokens, p = softmax(logits). What a sampled loss f(x) teaches is
# sum over x of p(x) df(x)/dlogits, p itself held still.

LOGITS = P.log() + 0.7


def gradient(of) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    of(logits.log_softmax(-1)).backward()
    return logits.grad


def forward_kl(logprobs):
    return (logprobs.exp() * (logprobs - Q.log())).sum()


def reverse_kl(logprobs):
    return (Q * (Q.log() - logprobs)).sum()


def expected_loss(estimator):
    return lambda logprobs: (logprobs.detach().exp() * kl_penalty(logprobs, Q.log(), estimator)).sum()


def test_k1_as_a_loss_teaches_nothing():
    torch.testing.assert_close(gradient(expected_loss("k1")), torch.zeros_like(P))


def test_k2_as_a_loss_has_the_exact_gradient():
    torch.testing.assert_close(gradient(expected_loss("k2")), gradient(forward_kl))


def test_k3_as_a_loss_has_the_gradient_of_the_reverse_kl():
    torch.testing.assert_close(gradient(expected_loss("k3")), gradient(reverse_kl))


def test_k1_as_a_reward_has_the_exact_gradient():
    def policy_gradient(logprobs):
        return (logprobs.detach().exp() * kl_penalty(logprobs.detach(), Q.log(), "k1") * logprobs).sum()

    torch.testing.assert_close(gradient(policy_gradient), gradient(forward_kl))


def test_a_token_the_policy_made_impossible_does_not_overflow_k3():
    logprobs = torch.tensor([-1e4], requires_grad=True)
    loss = kl_penalty(logprobs, torch.tensor([-1.0]), "k3")
    loss.backward()
    assert loss.isfinite().all()
    assert logprobs.grad.tolist() == [0.0]


def test_a_token_the_reference_finds_impossible_costs_its_whole_log_ratio():
    for estimator in ("k1", "k3"):
        got = kl_penalty(torch.tensor([-1.0]), torch.tensor([-101.0]), estimator)
        assert got.item() == pytest.approx(100.0 if estimator == "k1" else 99.0)


# The controller


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1.01),  # 10 % above target, gain 0.1
        (5.4, 0.99),
        (600.0, 1.02),  # the error is clipped to ±20 %
        (0.0, 0.98),
    ],
)
def test_the_coefficient_follows_the_error(kl, factor):
    assert adaptive_kl_coef(0.2, kl, target=6.0) == pytest.approx(0.2 * factor)


def test_the_controller_settles_where_kl_meets_its_target():
    coef = 0.01
    for _ in range(2000):
        coef = adaptive_kl_coef(coef, kl=1.5 / coef, target=6.0)
    assert coef == pytest.approx(0.25)


def test_a_target_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        adaptive_kl_coef(0.2, 1.0, target=0.0)
