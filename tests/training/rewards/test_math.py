import json
import os

import psutil
import pytest

from tests.project import wait_for
from tests.shared import SHARED, needs_shared
from training.config import RewardsConfig
from training.rewards import load_reward, symbolic
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
def test_a_killed_server_is_started_again_and_leaves_no_worker():
    for _ in range(3):
        assert MathReward(60).equal(["2x"], ["x+x"]) == [1.0]
        workers = psutil.Process(symbolic._server.pid).children()
        assert workers
        for worker in workers:  # one that is still starting has not asked yet to die with its server
            wait_for(lambda w=worker: os.readlink(f"/proc/{w.pid}/fd/1") == os.devnull, "a worker", 30)
        workers[0].suspend()  # it can't notice by itself that its server is gone
        symbolic._server.kill()
        assert MathReward(60).equal(["2x"], ["x+x"]) == [1.0]
        assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_many_comparisons_are_pooled():
    n = 300
    found = [f"x+{i}" for i in range(n)]
    assert MathReward(5).equal(found, [f"{i}+x" for i in range(n)]) == [1.0] * n


def test_votes_for_the_same_number_are_one_vote():
    assert len({normalize_answer(t) for t in ("1,234", "1234.0", "$1234", "2468/2")}) == 1


@needs_shared
def test_gsm8k_reference_solutions_are_accepted_and_other_answers_rejected():
    rows = [
        json.loads(line)
        for name in ("train", "test")
        for line in (SHARED / f"gsm8k/{name}.jsonl").read_text().splitlines()
    ]
    answers = [row["answer"].rpartition("####")[2].strip() for row in rows]
    reward = load_reward("math", RewardsConfig())
    right = reward(prompts=[""] * len(rows), completions=[row["answer"] for row in rows], answer=answers)
    assert len(rows) == 8792
    assert sum(right) >= 0.999 * len(rows)
    shifted = answers[1:] + answers[:1]
    wrong = reward(prompts=[""] * len(rows), completions=[row["answer"] for row in rows], answer=shifted)
    equal = sum(normalize_answer(a) == normalize_answer(b) for a, b in zip(answers, shifted, strict=True))
    assert sum(wrong) <= equal + 0.001 * len(rows)
