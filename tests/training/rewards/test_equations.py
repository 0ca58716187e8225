import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shared import SHARED, needs_shared
from training.config import RewardsConfig
from training.rewards import load_reward
from training.rewards.equations import judge
from training.rewards.steps import split_text


@pytest.mark.parametrize(
    "text",
    [
        "Natalia sold 48/2 = 24 clips in May.",
        "3 + 4 * 5 - 6 = 17",
        "(3 + 4) × 5 = 35 and 35 ÷ 7 = 5.",
        "3 x 4 = 12, so 2(3+4) = 14",
        "$1,234.50 + $0.50 = $1,235",
        "It costs $20 - $5=$15",
        ".5 * 4 = 2",
        "1/2 + 1/4 = 3/4",
        "10/3 = 3.33 rounded",
        "10/30 = 33.3%",
        "1/4 = 25%, and 200 * 50% = 100",
        "16 - 3 - 4 = <<16-3-4=9>>9 eggs",
        "total = 2*3 + 4 = 6 + 4 = 10",
        "-3 + 5 = 2",
        "- 3 + 5 = 8",  # a bullet
        "1. 3 + 4 = 7",
        "1) 3 + 4 = 7",
        "So **3 + 4 = 7**",
        r"\( 3 \times 4 = 12 \) and \frac{1}{2} + 1 = 1.5",
        "60/12 = $5/hour",
        "5 * -3 = -15",
        "(3 + 4 = 7)",
        "1 - 4 − 2 = -5",
        "a total of 12 + 24 = 36 pages",
    ],
)
def test_what_holds(text):
    assert judge(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "48/2 = 25",
        "3 + 4 * 5 = 35",
        "3 + 4 = 7 and then 7 + 1 = 9",
        "3 + 4 = 7 = 8 - 1 = 6",
        "16 - 3 - 4 = <<16-3-4=8>>9",
        "16 - 3 - 4 = <<16-3-4=9>>8",
        "$1,234 + $1 = $1,236",
        "10/3 = 3.34",
        "10/3 = 3",
        "5 / 0 = 0",
        "1/4 = 26%",
        "3/10 = 33.3%",
    ],
)
def test_what_does_not_hold(text):
    assert judge(text) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "She has 5 eggs.",
        "x = 5",
        "5 = 5",
        "3x = 12",
        "2x + 3 = 11",
        "3y - 2 = 7",
        "5 apples - 3 = 2",
        "5 apples + 3 apples = 8 apples",
        "half of 20 + 4 = 14",
        "50% of 20 = 10",
        "twice 3 + 4 = 10",
        "2^3 + 1 = 9",
        "√16 + 1 = 5",
        "1:30 + 45 = 2:15",
        "3 + 4 >= 7, 3 + 4 != 8, 3 + 4 => 7",
        "2 + 1 1/2 = 3 1/2",
        "1000 * 5 = 5 thousand",
        "10 / 3 = 3 remainder 1",
        "5 * 2 = 10x",
        "1 + 1 = 3 + z",
        "the sum is 3 +\n4 = 7",
        "+ 4 = 7",
        "9^9^9^9 = 1",
    ],
)
def test_what_is_no_certain_equation(text):
    assert judge(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000 + "1 + 1 = 2",
        "1" * 100_000 + " + 1 = 2",
        "1+" * 50_000 + "1 = 2",
        "1 + 1 = " + "-" * 50_000 + "2",
        "=" * 100_000,
        "1" + ",111" * 50_000 + ", + 1 = 2",
        "1,111" * 20_000 + " + 1 = 2",
    ],
)
def test_nothing_a_model_may_write_is_too_much(text):
    assert judge(text) in (None, 0.0, 1.0)


NUMBERS = st.integers(0, 999) | st.decimals(0, 99, places=2, allow_nan=False)


EXPRESSIONS = st.recursive(
    NUMBERS.map(str),
    lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*/"), part),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_values_against_pythons_own_arithmetic(expression):
    exact = re.sub(r"\d+(\.\d+)?", lambda m: f"Fraction('{m[0]}')", expression)
    try:
        value = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert judge(f"{expression} + 0 = 1") in (0.0, None)
        return
    claimed = f"{'-' if value < 0 else ''}{abs(value.numerator)}/{value.denominator}"
    assert judge(f"{expression} + 0 = {claimed}") == 1.0
    assert judge(f"{expression} + 0 = {claimed} + 1") == 0.0


def test_one_reward_a_step_and_one_a_completion_without_steps():
    reward = load_reward("equations", RewardsConfig())
    steps = [["1+1=2\n", "so\n", "2+2=5"], ["nothing"]]
    texts = ["".join(own) for own in steps]
    assert reward(prompts=["", ""], completions=texts, steps=steps) == [[1.0, None, 0.0], [None]]
    assert reward(prompts=["", ""], completions=texts) == [0.0, None]


@needs_shared
@pytest.mark.parametrize("notes", [True, False], ids=["with notes", "without"])
def test_the_steps_of_gsm8ks_solutions_hold_and_changed_ones_do_not(notes):
    """Every third of 7,473 solutions; what people wrote is not without mistakes (`6*2.5 = $<<6*3=18.00>>18.00`)."""
    lines = (SHARED / "gsm8k" / "train.jsonl").read_text().splitlines()[::3]
    answers = [json.loads(line)["answer"] for line in lines]
    if not notes:
        answers = [re.sub(r"<<[^>]*>>", "", answer) for answer in answers]
    steps = [step for answer in answers for step in split_text(answer, "\n")]
    verdicts = [judge(step) for step in steps]
    judged = [verdict for verdict in verdicts if verdict is not None]
    assert len(judged) > 6_000
    assert sum(judged) / len(judged) > 0.997
    claim = r"=(\d+)>>" if notes else r"= ?\$?(\d+)(?![\d,./%*+-])"
    changed, found = 0, 0
    for step, verdict in zip(steps[::3], verdicts[::3], strict=True):
        claims = list(re.finditer(claim, step))
        if verdict == 1.0 and claims:
            place = claims[-1].start(1)
            changed += 1
            found += judge(f"{step[:place]}{int(claims[-1][1]) + 1}{step[claims[-1].end(1) :]}") == 0.0
    assert changed > 1_000
    assert found / changed > 0.99
