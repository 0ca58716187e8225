"""Estimators over graded samples: Pass@K, Maj@K, accuracies and their intervals. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from training.randomness import generator

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Graded:
    """What the estimators need to know about one sampled completion.

    `vote` is its answer in normal form (None: no answer found), `correct` what the grader says of it,
    `strict` whether it also ended by itself in the required format, `length` its tokens.
    """

    vote: str | None
    correct: bool
    strict: bool
    truncated: bool
    length: int


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement from n is right, c of them being so.

    1 - C(n-c, k) / C(n, k), computed in integers: the unbiased estimator of Chen et al. 2021
    (arXiv:2107.03374, eq. 1). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check_sizes(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} correct samples of n = {n}; expected 0 <= c <= n")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def maj_at_k(answers: Sequence[str | None], correct: Collection[str], k: int) -> float:
    """Probability that the majority answer of k samples drawn without replacement is right.

    Self-consistency (Wang et al. 2022, arXiv:2203.11171), averaged exactly over all subsets of `answers` of
    size k. Equal strings are one candidate; those in `correct` are right. None never votes, tied candidates
    share the win equally, and a subset without any vote counts 0. Raises ValueError unless 1 <= k <= n.
    """
    _check_sizes(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    total = 0.0
    for candidate in sorted(votes.keys() & set(correct)):
        rivals = sorted(count for other, count in votes.items() if other != candidate)
        total += _win_share(votes[candidate], tuple(rivals), silent, k)
    return min(total, 1.0)


def problem_scores(samples: Sequence[Graded], ks: Sequence[int]) -> dict[str, float]:
    """Every metric of one problem from its n samples; a model's metric is the mean over problems.

    `pass_at_<k>`, `maj_at_<k>`, `accuracy_strict` (right answer, required format, ended by itself),
    `accuracy_lenient` (right answer anywhere), `truncated` (share cut off), `no_answer` (share without one),
    `mean_length` (tokens).
    """
    n = len(samples)
    votes = [sample.vote for sample in samples]
    right = {sample.vote for sample in samples if sample.correct and sample.vote is not None}
    num_correct = sum(sample.correct for sample in samples)
    scores = {f"pass_at_{k}": pass_at_k(n, num_correct, k) for k in ks}
    scores |= {f"maj_at_{k}": maj_at_k(votes, right, k) for k in ks}
    return scores | {
        "accuracy_strict": sum(sample.strict for sample in samples) / n,
        "accuracy_lenient": num_correct / n,
        "truncated": sum(sample.truncated for sample in samples) / n,
        "no_answer": votes.count(None) / n,
        "mean_length": sum(sample.length for sample in samples) / n,
    }


def summarize(scores: Sequence[dict[str, float]], seed: int, resamples: int) -> dict[str, Estimate]:
    """Mean of each metric over problems, with the percentile bootstrap interval (Efron 1979).

    Resample i draws the same problems for every metric and every model, so that models are compared in pairs.
    Raises ValueError without problems.
    """
    if not scores:
        raise ValueError("no problems to summarize")
    names = list(scores[0])
    values_PM = np.array([[problem[name] for name in names] for problem in scores])
    draws_BM = np.empty((resamples, len(names)))
    for i in range(resamples):
        rows = generator(seed, "evaluate/bootstrap", i).integers(0, len(scores), len(scores))
        draws_BM[i] = values_PM[rows].mean(axis=0)
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(draws_BM, [tail, 1 - tail], axis=0)
    means_M = values_PM.mean(axis=0)
    return {
        name: Estimate(float(means_M[j]), float(low_M[j]), float(high_M[j])) for j, name in enumerate(names)
    }


def _check_sizes(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples; expected 1 <= k <= n")


@lru_cache(maxsize=4096)
def _win_share(own: int, rivals: tuple[int, ...], silent: int, k: int) -> float:
    """Expected share of the win of a candidate that holds `own` of the votes, over all subsets of size k.

    Drawing k of n without replacement is the same as keeping each sample with any probability p and looking
    only at outcomes that keep k; so counts of candidates become independent binomials, generating functions
    multiply, and the coefficient of x^k is divided by P(k kept) at the end. For a winner with m votes each
    rival may have at most m, and t rivals with exactly m leave it 1/(t+1). With a rival's tie marked by y
    that is the integral of y^t over [0, 1], which Gauss-Legendre quadrature gives exactly for polynomials:
    all terms are positive and nothing cancels.
    """
    n = own + sum(rivals) + silent
    p = k / (n + 1)
    share = 0.0
    for m in range(1, min(own, k) + 1):
        rest = k - m
        strong = [count for count in rivals if count >= m]
        others = n - own - sum(strong)
        nodes, weights = _unit_quadrature(min(len(strong), rest // m))
        for y, weight in zip(nodes, weights, strict=True):
            ways = _binomial(others, p)[: rest + 1]
            for count in strong:
                allowed = _binomial(count, p)[: m + 1].copy()
                allowed[m] *= y
                ways = np.convolve(ways, allowed)[: rest + 1]
            if len(ways) > rest:
                share += weight * _binomial(own, p)[m] * ways[rest]
    return float(share / _binomial(n, p)[k])


@lru_cache(maxsize=1024)
def _binomial(count: int, p: float) -> np.ndarray:
    """P(i of `count` kept), i = 0 … count, each with probability p."""
    log_p, log_q = math.log(p), math.log1p(-p)
    logs = [math.log(math.comb(count, i)) + i * log_p + (count - i) * log_q for i in range(count + 1)]
    return np.exp(logs)


@lru_cache(maxsize=512)
def _unit_quadrature(degree: int) -> tuple[list[float], list[float]]:
    """Nodes and weights on [0, 1] that integrate polynomials up to `degree` exactly."""
    nodes, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return [float(x + 1) / 2 for x in nodes], [float(w) / 2 for w in weights]
