"""Pass@K, Maj@K and intervals against values worked by hand, brute force, exact counting and published figures."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.metrics import Graded, maj_at_k, pass_at_k, problem_scores, summarize

GOLDEN = os.environ.get(
    "REFERENCE_VALUES", str(Path(__file__).parents[4] / "shared" / "golden" / "rl_math.json")
)


def golden_cases() -> list[dict]:
    files = [Path(name) for name in GOLDEN.split(":") if Path(name).is_file()]
    return [case for file in files for case in json.loads(file.read_text())["evaluation"]]


def majority_share(votes: Counter, correct: set[str]) -> Fraction:
    """Share of the win that goes to right answers, from one subset's votes."""
    if not votes:
        return Fraction(0)
    top = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == top]
    return Fraction(sum(answer in correct for answer in winners), len(winners))


def brute_force_majority(answers: list[str | None], correct: set[str], k: int) -> Fraction:
    subsets = list(combinations(answers, k))
    return sum(
        (majority_share(Counter(a for a in s if a is not None), correct) for s in subsets), Fraction(0)
    ) / len(subsets)


def counted_majority(right: int, wrong: tuple[int, int], silent: int, k: int) -> Fraction:
    """Exact Maj@K in integers: walks over how many of the k samples each of three answers has."""
    sixths = 0
    for a, b, c in product(range(right + 1), range(wrong[0] + 1), range(wrong[1] + 1)):
        if a and a >= max(b, c) and 0 <= k - a - b - c <= silent:
            ways = (
                math.comb(right, a)
                * math.comb(wrong[0], b)
                * math.comb(wrong[1], c)
                * math.comb(silent, k - a - b - c)
            )
            sixths += ways * 6 // (1 + (b == a) + (c == a))
    return Fraction(sixths, 6 * math.comb(right + sum(wrong) + silent, k))


@pytest.mark.skipif(not golden_cases(), reason=f"no reference values at {GOLDEN}")
def test_estimators_give_the_reference_values():
    for case in golden_cases():
        answers, correct, k = case["answers"], case["correct"], case["k"]
        assert pass_at_k(case["n"], answers.count(correct), k) == pytest.approx(case["pass_at_k"], abs=1e-12)
        assert maj_at_k(answers, {correct}, k) == pytest.approx(case["maj_at_k"], abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 0, 3, 0.0),
        (5, 5, 1, 1.0),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold the right one
        (5, 2, 3, 0.9),  # 1 of the 10 triples holds none
        (10, 3, 10, 1.0),
        (256, 1, 64, 0.25),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (["A", "B"], {"A"}, 2, 1 / 2),  # a tie is shared
        (["A", "B", "C"], {"A"}, 3, 1 / 3),
        (["A", "B", "C"], {"A", "C"}, 3, 2 / 3),  # two spellings of the right answer
        (["A", None, None], {"A"}, 3, 1.0),  # silence is no vote
        ([None, None], {"A"}, 2, 0.0),  # nobody voted, nobody wins
        (["A", None], {"A"}, 1, 1 / 2),
        (
            ["A", "A", "B", "B", "C"],
            {"A"},
            3,
            (3 + 0 + 4 / 3) / 10,
        ),  # AAx wins 3 of 10; BBx none; 4 of ABC a third each
        (["B", "B"], {"A"}, 1, 0.0),
    ],
)
def test_maj_at_k_by_hand(answers: list[str | None], correct: set[str], k: int, expected: float):
    assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


@given(
    answers=st.lists(st.sampled_from(["A", "B", "C", "D", None]), min_size=1, max_size=10),
    correct=st.sets(st.sampled_from(["A", "B", "C"])),
    data=st.data(),
)
def test_estimators_are_the_mean_over_all_subsets(answers, correct, data):
    k = data.draw(st.integers(1, len(answers)))
    assert maj_at_k(answers, correct, k) == pytest.approx(
        float(brute_force_majority(answers, correct, k)), abs=1e-12
    )
    c = sum(answer in correct for answer in answers)
    hits = [any(answers[i] in correct for i in subset) for subset in combinations(range(len(answers)), k)]
    assert pass_at_k(len(answers), c, k) == pytest.approx(sum(hits) / len(hits), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 64, 129, 255, 256])
def test_maj_at_k_is_exact_for_256_samples(k: int):
    answers = ["A"] * 105 + ["B"] * 108 + ["C"] * 7 + [None] * 36
    assert maj_at_k(answers, {"A"}, k) == pytest.approx(
        float(counted_majority(105, (108, 7), 36, k)), abs=1e-11
    )


def test_maj_at_k_with_256_different_answers_and_with_thousands_of_samples():
    assert maj_at_k([str(i) for i in range(256)], {"7"}, 255) == pytest.approx(1 / 256, abs=1e-11)
    assert maj_at_k(["A"] + [None] * 2999, {"A"}, 1000) == pytest.approx(1 / 3, abs=1e-11)
    assert maj_at_k(["A"] * 1500 + ["B"] * 1500, {"A"}, 999) == pytest.approx(1 / 2, abs=1e-10)


@given(
    answers=st.lists(st.sampled_from(["A", "B", "C", None]), min_size=1, max_size=40),
    correct=st.sets(st.sampled_from(["A", "B"])),
    data=st.data(),
)
def test_laws(answers, correct, data):
    """Order and names are immaterial; Maj@1 is the accuracy; a majority that is right needs one sample that is."""
    k = data.draw(st.integers(1, len(answers)))
    value = maj_at_k(answers, correct, k)
    shuffled = data.draw(st.permutations(answers))
    assert maj_at_k(shuffled, correct, k) == pytest.approx(value, abs=1e-12)
    renamed = {"A": "C", "C": "A"}
    swapped = maj_at_k([renamed.get(a, a) for a in answers], {renamed.get(a, a) for a in correct}, k)
    assert swapped == pytest.approx(value, abs=1e-12)
    c = sum(answer in correct for answer in answers)
    assert maj_at_k(answers, correct, 1) == pytest.approx(c / len(answers), abs=1e-12)
    assert -1e-12 <= value <= pass_at_k(len(answers), c, k) + 1e-12
    wins = [maj_at_k(answers, {name}, k) for name in ("A", "B", "C")]
    silence = answers.count(None)
    nobody = math.comb(silence, k) / math.comb(len(answers), k)
    assert sum(wins) == pytest.approx(1 - nobody, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_sizes_are_refused(n: int, c: int, k: int):
    with pytest.raises(ValueError, match=r"expected"):
        pass_at_k(n, c, k)
    if not 1 <= k <= n:
        with pytest.raises(ValueError, match=r"expected 1 <= k <= n"):
            maj_at_k(["A"] * n, {"A"}, k)


def sample(
    vote: str | None, correct: bool = False, strict: bool = False, truncated: bool = False, length: int = 4
) -> Graded:
    return Graded(vote, correct, strict, truncated, length)


def test_scores_of_one_problem_by_hand():
    samples = [
        sample("7", correct=True, strict=True, length=2),
        sample("7", correct=True, truncated=True, length=8),
        sample("8", length=3),
        sample(None, truncated=True, length=8),
    ]
    scores = problem_scores(samples, [1, 2])
    assert scores == pytest.approx(
        {
            "pass_at_1": 2 / 4,
            "pass_at_2": 5 / 6,
            "maj_at_1": 2 / 4,
            "maj_at_2": (1 + 1 / 2 + 1 / 2 + 1 + 1 + 0) / 6,  # 77, 78, 78, 7-, 7-, 8-
            "accuracy_strict": 1 / 4,
            "accuracy_lenient": 2 / 4,
            "truncated": 2 / 4,
            "no_answer": 1 / 4,
            "mean_length": 21 / 4,
        },
        abs=1e-12,
    )


def test_the_interval_of_a_mean_is_close_to_the_normal_one_and_exact_where_nothing_varies():
    values = [{"accuracy": float(i % 4 == 0), "constant": 0.3} for i in range(400)]
    estimates = summarize(values, seed=5, resamples=2000)
    accuracy = estimates["accuracy"]
    assert accuracy.value == 0.25
    half_width = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert accuracy.low == pytest.approx(0.25 - half_width, abs=0.006)
    assert accuracy.high == pytest.approx(0.25 + half_width, abs=0.006)
    constant = estimates["constant"]
    assert (constant.low, constant.high) == pytest.approx((0.3, 0.3))


def test_intervals_depend_on_the_seed_alone():
    values = [{"accuracy": float(i % 3 == 0)} for i in range(30)]
    assert summarize(values, 1, 200) == summarize(values, 1, 200)
    assert summarize(values, 1, 200) != summarize(values, 2, 200)


def test_models_are_resampled_in_pairs():
    """Two models that differ by a constant on every problem have intervals that differ by that constant."""
    scores = [i % 7 / 10 for i in range(50)]
    lower = summarize([{"accuracy": score} for score in scores], 3, 300)["accuracy"]
    upper = summarize([{"accuracy": score + 0.25} for score in scores], 3, 300)["accuracy"]
    assert (upper.low - lower.low, upper.high - lower.high) == pytest.approx((0.25, 0.25))


def test_no_problems_is_an_error():
    with pytest.raises(ValueError, match="no problems"):
        summarize([], 1, 10)
