"""What published packages compute from the same inputs: values, gradients and metrics to 1e-9 in float64.

The files' format is described beside the default one; which files, tests/shared.py says. Figures that a file
holds for a loss this project doesn't offer (VESPO, LUSPO) are skipped by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.shared import reference_values
from training.algorithms.advantages import (
    group_advantages,
    leave_one_out_advantages,
    reinforce_plus_plus_advantages,
    whiten,
)
from training.algorithms.gae import gae, token_rewards
from training.algorithms.kl import kl_penalty
from training.algorithms.losses import (
    cispo_loss,
    clip_fractions,
    clipped_policy_loss,
    sapo_loss,
    token_weights,
    value_loss,
)
from training.algorithms.ratios import sequence_logprobs
from training.evaluation.metrics import maj_at_k, pass_at_k

VERL_EPS = 1e-8
"""verl adds this to the token count of a completion's mean, and of the clip fraction."""


@dataclass(frozen=True)
class Reference:
    """One file: its inputs as float64 tensors [B, T], its figures as they are."""

    file: Path
    data: dict[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> torch.Tensor:
        return tensor(self.data["inputs"][name])

    @property
    def group_size(self) -> int:
        return self.data["group_size"]

    @property
    def max_length(self) -> int:
        return self.mask.shape[1]

    @cached_property
    def token_rewards(self) -> torch.Tensor:
        kl = kl_penalty(self.old_logprobs, self.ref_logprobs, "k1")
        return token_rewards(self.rewards, kl, self.mask, self.data["ppo"]["kl_coef"])


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(got: torch.Tensor | float, expected: Any) -> None:
    got = torch.as_tensor(got, dtype=torch.float64).detach()
    torch.testing.assert_close(got, tensor(expected), rtol=1e-9, atol=1e-9)


REFERENCES = [Reference(file, json.loads(file.read_text())) for file in reference_values()]
if not REFERENCES:
    pytest.skip("no file of reference values; name some in REFERENCE_VALUES", allow_module_level=True)

each_file = pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.file.stem)


def each_part(*path: str) -> pytest.MarkDecorator:
    """One case for every entry below `path` in every file: (reference, name, figures)."""
    cases = []
    for reference in REFERENCES:
        part = reference.data
        for key in path:
            part = part[key]
        named = part.items() if isinstance(part, dict) else ((str(i), entry) for i, entry in enumerate(part))
        cases += [pytest.param(reference, name, f, id=f"{reference.file.stem}-{name}") for name, f in named]
    return pytest.mark.parametrize(("reference", "name", "figures"), cases)


def offered(table: dict[str, Any], name: str) -> Any:
    if name not in table:
        pytest.skip(f"{name} is not offered")
    return table[name]


# Advantages


def on_tokens(advantages: torch.Tensor, reference: Reference) -> torch.Tensor:
    return advantages[:, None] * reference.mask


ADVANTAGES: dict[str, Callable[[Reference], torch.Tensor]] = {
    "grpo_std_eps1e-6": lambda r: on_tokens(group_advantages(r.rewards, r.group_size, "group", eps=1e-6), r),
    "grpo_mean_only": lambda r: on_tokens(group_advantages(r.rewards, r.group_size, "none"), r),
    "rloo": lambda r: on_tokens(leave_one_out_advantages(r.rewards, r.group_size), r),
    "reinforce_plus_plus_baseline": lambda r: reinforce_plus_plus_advantages(r.rewards, r.group_size, r.mask),
}


@each_part("advantages")
def test_advantages(reference: Reference, name: str, figures: Any) -> None:
    assert_equal(offered(ADVANTAGES, name)(reference), figures)


@each_file
def test_trl_advantages(reference: Reference) -> None:
    assert_equal(group_advantages(reference.rewards, reference.group_size), reference.data["trl_advantages"])


# PPO


@each_file
def test_token_rewards(reference: Reference) -> None:
    assert_equal(reference.token_rewards, reference.data["ppo"]["token_rewards"])


@each_part("ppo", "gae")
def test_gae(reference: Reference, name: str, figures: Any) -> None:
    gamma, lam = figures["gamma"], figures["lam"]
    advantages, returns = gae(reference.token_rewards, reference.values, reference.mask, gamma, lam)
    assert_equal(returns, figures["returns"])
    assert_equal(whiten(advantages, reference.mask), figures["whitened_advantages"])


@each_part("ppo", "value_loss")
def test_value_loss(reference: Reference, name: str, figures: Any) -> None:
    mask, values = reference.mask, reference.values
    _, returns = gae(reference.token_rewards, values, mask, gamma=1.0, lam=0.95)
    per_token = value_loss(reference.value_predictions, values, returns, clip_range=0.2)
    lengths = mask.sum(1, keepdim=True)
    weights = {
        "token-mean": token_weights(mask, "dapo", reference.max_length),
        "seq-mean-token-mean": token_weights(mask, "grpo", reference.max_length)
        * lengths
        / (lengths + VERL_EPS),
    }
    assert_equal((offered(weights, name) * per_token).sum(), figures)


@each_part("ppo", "policy_loss")
def test_ppo_policy_loss(reference: Reference, name: str, figures: Any) -> None:
    """`clip<epsilon>`, `clip<epsilon>_<epsilon_high>`, or `dual_clip<c>` with epsilon 0.2."""
    kind, number, high = re.findall(r"^([a-z_]+?)([\d.]+)(?:_([\d.]+))?$", name)[0]
    settings = {
        "clip": {"epsilon": float(number), "epsilon_high": float(high or number)},
        "dual_clip": {"epsilon": 0.2, "epsilon_high": 0.2, "delta": float(number)},
    }
    clip = offered(settings, kind)
    entry = next(g for g in reference.data["ppo"]["gae"] if (g["gamma"], g["lam"]) == (1.0, 0.95))
    advantages, mask, old = tensor(entry["whitened_advantages"]), reference.mask, reference.old_logprobs
    logprobs = reference.logprobs.requires_grad_()
    per_token = clipped_policy_loss(logprobs, old, advantages, **clip)
    loss = (token_weights(mask, "dapo", reference.max_length) * per_token).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    low, high = clip_fractions(logprobs.detach(), old, advantages, clip["epsilon"], clip["epsilon_high"])
    assert_equal(loss, figures["loss"])
    assert_equal(gradient, figures["grad"])
    assert_equal(((low | high) * mask).sum() / (mask.sum() + VERL_EPS), figures["clip_fraction"])


# KL


ESTIMATORS: dict[str, Literal["k1", "k2", "k3"]] = {"k1": "k1", "k2": "k2", "k3": "k3"}


@each_part("kl")
def test_kl(reference: Reference, name: str, figures: Any) -> None:
    estimate = kl_penalty(reference.logprobs, reference.ref_logprobs, offered(ESTIMATORS, name))
    assert_equal(estimate * reference.mask, figures)


# The losses of GRPO's family

AGGREGATION = {"cispo": "dapo", "sapo": "grpo", "gspo": "grpo"} | {
    name: name for name in ("grpo", "bnpo", "dr_grpo", "dapo")
}
DEFAULTS: dict[str, Any] = {
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": math.inf,
    "max_completion_length": None,
}


@each_part("grpo_losses")
def test_grpo_losses(reference: Reference, name: str, figures: Any) -> None:
    """`<loss type> [remark] [setting=value ...]`"""
    loss_type = name.split()[0]
    aggregation = offered(AGGREGATION, loss_type)
    named = {key: float(value) for key, value in re.findall(r"(\w+)=(\S+)", name)}
    assert named.keys() <= DEFAULTS.keys()
    settings = DEFAULTS | named
    epsilon, high = settings["epsilon"], settings["epsilon_high"]
    if high is None:
        high = 5.0 if loss_type == "cispo" else epsilon

    mask, advantages = reference.mask, tensor(reference.data["trl_advantages"])[:, None]
    logprobs = reference.logprobs.requires_grad_()
    new, old = logprobs, reference.old_logprobs
    if loss_type == "gspo":
        new, old = sequence_logprobs(new, mask), sequence_logprobs(old, mask)
    if loss_type == "cispo":
        per_token = cispo_loss(new, old, advantages, max_ratio=high)
    elif loss_type == "sapo":
        per_token = sapo_loss(new, old, advantages, temperature_pos=1.0, temperature_neg=1.05)
    else:
        per_token = clipped_policy_loss(new, old, advantages, epsilon, high, settings["delta"])
    kl = kl_penalty(logprobs, reference.ref_logprobs, "k3")
    weights = token_weights(mask, aggregation, settings["max_completion_length"] or reference.max_length)
    loss = (weights * (per_token + settings["beta"] * kl)).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert_equal(loss, figures["loss"])
    assert_equal(gradient, figures["grad"])
    even = mask / mask.sum()
    metrics = {"entropy": (even * reference.entropy).sum(), "kl": (even * kl).sum()}
    if loss_type == "cispo":
        _, capped = clip_fractions(new.detach(), old, advantages, epsilon, high - 1)
        metrics["cispo_clip_ratio"] = (even * capped).sum()
    else:
        low, high = clip_fractions(new.detach(), old, advantages, epsilon, high)
        metrics |= clip_metrics(low, high, mask)
    for metric, value in figures["metrics"].items():
        assert_equal(metrics[metric], value)


def clip_metrics(low: torch.Tensor, high: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Share of the tokens, or of the completions where each has one ratio, and its extremes over completions."""
    real = mask if low.shape == mask.shape else torch.ones_like(low, dtype=mask.dtype)
    share = {"low": low * real, "high": high * real, "region": (low | high) * real}
    means = {f"clip_ratio/{name}_mean": flags.sum() / real.sum() for name, flags in share.items()}
    rows = {name: flags.sum(1) / real.sum(1) for name, flags in share.items()}
    return means | {"clip_ratio/low_min": rows["low"].min(), "clip_ratio/high_max": rows["high"].max()}


# Evaluation


@each_part("evaluation")
def test_evaluation(reference: Reference, name: str, figures: Any) -> None:
    n, k, answers, correct = (figures[key] for key in ("n", "k", "answers", "correct"))
    assert_equal(pass_at_k(n, answers.count(correct), k), figures["pass_at_k"])
    assert_equal(maj_at_k(answers, {correct}, k), figures["maj_at_k"])


@each_file
def test_no_part_of_a_file_goes_unread(reference: Reference) -> None:
    parts = {
        "seed",
        "group_size",
        "inputs",
        "advantages",
        "ppo",
        "kl",
        "trl_advantages",
        "grpo_losses",
        "evaluation",
    }
    assert reference.data.keys() <= parts
    assert reference.data["ppo"].keys() <= {"kl_coef", "token_rewards", "gae", "value_loss", "policy_loss"}
