import torch

from training.algorithms.kl import kl_penalty

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
