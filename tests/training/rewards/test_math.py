import time

import psutil
import pytest

from benchmarks import graders
from tests.shared import SHARED, needs_shared
from training.config import RewardsConfig
from training.rewards import load_reward, symbolic, workers
from training.rewards.math import MathReward, extract_answer, normalize_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a} but #### 3", "a"),
        ("so\n#### 1,234\nbye", "1,234"),
        ("<answer> 7 </answer> or #### 8", "8"),
        ("<think>#### 3</think> <answer>12 apples</answer>", "12 apples"),
        (r"so \boxed 2$.", "2"),
        (r"\boxed{}", None),
        ("from 3-4", "4"),
        ("it is -$5", "-$5"),
        ("The answer is **18**", "18"),
        (r"half: \frac{1}{2}.", r"\frac{1}{2}"),
        ("The answer is $18.00.", "$18.00"),
        ("The answer is: 3/4", "3/4"),
        ("The sum of 3 and 4 is 7.", "7"),
        ("minus -4", "-4"),
        ("it is 18.", "18"),
        ("<think> surely 3", None),
        ("no number", None),
        ("", None),
        (r"\boxed{unclosed", None),
        ("118", "118"),
    ],
)
def test_extraction_order(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("1,234", "1234", True),
        ("$18.00", "18", True),
        ("18.", "18", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac12", "1/2", True),
        ("50%", "50", True),
        ("12 apples", "12", True),
        ("5 dollars", "5", True),
        ("118", "18", False),
        ("18", "118", False),
        ("-3", "3", False),
        (r"\text{Monday}", "Monday", True),
        ("x+1", "1+x", True),
        ("(1, 2)", "(1,2)", True),
        ("(1, 2)", "(2,1)", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("1/0", "0", False),
        (r"2\frac{1}{2}", "2.5", True),
        (r"2\frac{1}{2}", "10.5", False),
        (r"\frac{x+1}{2}", r"x+\frac12", False),
        (r"10,\!000", "10000", True),
        ("1{,}000", "1000", True),
        ("2 million", "2,000,000", True),
        ("€18", "18", True),
        ("0.5", "50%", True),
        ("50%", "0.5", True),
        ("50", "0.5", False),
        ("50%", "0.5%", False),
        (r"5\text{ square inches}", "5", True),
        ("3xy", "3", False),
        ("3m^2", "3", False),
        ("x = 5", "5", True),
        ("y = 2x + 1", "2x+1", True),
        ("x = 5", "y = 5", False),
        ("monday", r"\text{Monday}", True),
        ("(B)", "B", True),
        (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)", True),
        ("[1,2)", "[1,2]", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        (r"\{1, 2, 3\}", r"\{2, 1\}", False),
        (r"\frac{\pi}{3}", r"\frac{\pi}{4}", False),
        (r"\frac{3\sqrt{2}}{2}", r"\frac{3}{\sqrt{2}}", True),
        ("1 - 2i", "-2i + 1", True),
        ("1,234", "(1,234)", False),
        ("2x - y = 0", "0", False),
        ("3 + 4 = 7", "7", True),
        (r"2, 3, \text{ and } 4", "2,3,4", True),
        ("-2 or -12", r"-2 \text{ or } -12", True),
        ("-12 or -2", "-2, -12", True),
        ("45,135", r"45^\circ, 135^\circ", True),
        ("1,234", "1, 235", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    ],
)
def test_equality(a, b, same):
    assert MathReward(10).equal([a], [b]) == [float(same)]


def test_a_missing_answer_scores_zero_and_order_is_kept():
    reward = load_reward("math", RewardsConfig())
    got = reward(prompts=[""] * 4, completions=["nothing", "4", "x is 4", "5"], answer=["4"] * 4)
    assert got == [0.0, 1.0, 1.0, 0.0]


def test_a_comparison_that_takes_too_long_scores_none_and_the_next_is_right():
    slow = r"\int_0^1 e^{-x^2\sin x}dx"
    assert MathReward(1).equal(["x+x", slow, "x+1"], ["2x", "0.8", "1+x"]) == [1.0, None, 1.0]
    assert MathReward(60).equal(["2x"], ["x+x"]) == [1.0]


@pytest.mark.timeout(120)
def test_a_killed_server_is_started_again_and_leaves_no_process():
    for _ in range(3):
        assert MathReward(60).equal(["2x"], ["x+x"]) == [1.0]
        below = psutil.Process(symbolic.server.server.pid).children(recursive=True)
        assert len(below) > workers.WORKERS
        symbolic.server.server.kill()
        assert MathReward(60).equal(["2x"], ["x+x"]) == [1.0]
        assert psutil.wait_procs(below, timeout=30)[1] == []


@pytest.mark.timeout(120)
def test_every_worker_that_was_killed_is_replaced_by_one_that_works():
    """A worker forked from the waiting server would find the lock of its standard input held for ever."""
    slow = r"\int_0^1 e^{-x^2\sin x}dx"
    for _ in range(3):
        assert (
            MathReward(1).equal([slow] * workers.WORKERS, ["0.8"] * workers.WORKERS)
            == [None] * workers.WORKERS
        )
        time.sleep(0.3)
        assert MathReward(60).equal(["2x"] * 4, ["x+x"] * 4) == [1.0] * 4


def test_many_comparisons_are_pooled():
    n = 300
    found = [f"x+{i}" for i in range(n)]
    assert MathReward(5).equal(found, [f"{i}+x" for i in range(n)]) == [1.0] * n


def test_votes_for_the_same_number_are_one_vote():
    assert len({normalize_answer(t) for t in ("1,234", "1234.0", "$1234", "2468/2")}) == 1


def agreement(rows):
    """The share of a set's rows that are graded as expected, by the benchmark that makes the docs' table."""
    return rows["agree"] / rows["rows"]


@needs_shared
def test_golden_solutions_of_gsm8k_are_accepted_and_other_answers_rejected():
    solutions, answers = graders.gsm8k(SHARED)
    assert len(solutions) == 8792
    assert agreement(graders.measure("golden", solutions, answers, [1.0] * 8792)) >= 0.999
    others = graders.of_another_problem(
        answers, lambda a, b: float(a.replace(",", "")) == float(b.replace(",", ""))
    )
    assert agreement(graders.measure("others", solutions, others, [0.0] * 8792)) >= 0.999


@needs_shared
def test_golden_solutions_of_math_are_accepted_in_another_spelling_too():
    solutions, boxed, respelled = graders.competition_math(SHARED)
    assert len(solutions) == 12500
    assert agreement(graders.measure("golden", solutions, boxed, [1.0] * 12500)) >= 0.99
    assert agreement(graders.measure("respelled", solutions[::5], respelled[::5], [1.0] * 2500)) >= 0.99


@needs_shared
@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_of_other_math_problems_are_rejected(every):
    solutions, boxed, _ = graders.competition_math(SHARED)
    others = graders.of_another_problem(boxed, lambda a, b: graders.plain(a) == graders.plain(b))
    rows = len(solutions[::every])
    assert agreement(graders.measure("others", solutions[::every], others[::every], [0.0] * rows)) >= 0.998


@needs_shared
def test_labelled_solutions_are_graded_as_labelled():
    assert agreement(graders.measure("gsm8k", *graders.labelled_gsm8k(SHARED))) == 1.0
    rows = graders.measure("math", *graders.labelled_math(SHARED))
    assert [(one["found"], one["answer"]) for one in rows["disagreements"]] == [("10000", "10{,}000")]
