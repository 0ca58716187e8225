import json

import pytest

from tests.shared import SHARED, needs_shared
from training.config import RewardsConfig, SourceConfig
from training.data.sources import read_examples
from training.errors import BadInput
from training.rewards import load_reward

TASK = json.dumps({"numbers": [44, 19, 35], "target": 98})


def explained(*completions, answer=TASK):
    reward = load_reward("countdown", RewardsConfig())
    return reward.explain([""] * len(completions), completions, answer=[answer] * len(completions))


@pytest.mark.parametrize(
    "completion",
    [
        "<think>44 + 35 = 79</think>\n<answer> 44 + (19 + 35) </answer>",
        "44+19+35",
        "First 19 + 35.\n\n44 + 19 + 35 = 98.\n",
        "<answer>1 + 1</answer> no, <answer>-(-44 - 19) + 35</answer>",
        "`44 + 19 + 35`",
    ],
)
def test_right(completion):
    [grade] = explained(completion)
    assert (grade.score, grade.reason) == (1.0, "gives 98 with each of 19, 35, 44")


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("44 + 19 - 35", "gives 28, not 98"),
        ("44 + 54", "uses 44, 54, given are 19, 35, 44"),
        ("44 + 19 + 35 + 35 - 35", "uses 19, 35, 35, 35, 44"),
        ("98", "uses 98"),
        ("44 + 19 + 35 = 99", "not an equation"),
        ("44 / (19 - 19) + 35", "divides by zero"),
        ("44 ** 19 ** 35", "not an equation"),
        ("44 // 19 + 35", "not an equation"),
        ("44.0 + 19 + 35", "not an equation"),
        ("__import__('os').system('true')", "not an equation"),
        ("(" * 499 + "1", "not an equation"),
        ("-" * 499 + "1", "uses 1"),
        ("1+" * 5000 + "1", "not an equation"),
        ("", "no equation found"),
        ("<think>44 + 19 + 35", "no equation found"),
    ],
)
def test_wrong_and_hostile(completion, reason):
    [grade] = explained(completion)
    assert grade.score == 0.0
    assert reason in grade.reason


def test_values_are_exact():
    answer = json.dumps({"numbers": [8, 3, 8, 3], "target": 24})
    assert explained("8 / (3 - 8 / 3)", r"8 \div (3 - 8 ÷ 3)", answer=answer)[0].score == 1.0


@pytest.mark.parametrize("answer", ["98", "[44]", '{"numbers": 5, "target": 98}', "{"])
def test_an_answer_of_another_form_is_named(answer):
    with pytest.raises(BadInput, match="reward 'countdown': answer"):
        explained("44", answer=answer)


@needs_shared
@pytest.mark.parametrize(("name", "rows"), [("train", 10_240), ("test", 1024)])
def test_every_solution_of_the_real_set_is_right_and_no_other_rows(name, rows):
    source = SourceConfig(
        kind="file",
        path=str(SHARED / "countdown" / f"{name}.parquet"),
        format="countdown",
        columns={"solution": "answer"},
    )
    examples = list(read_examples(source, 1))
    assert len(examples) == rows
    reward = load_reward("countdown", RewardsConfig())
    prompts, solutions = [""] * rows, [example.solution for example in examples]
    answers = [example.answer for example in examples]
    assert reward(prompts=prompts, completions=solutions, answer=answers) == [1.0] * rows
    others = answers[1:] + answers[:1]
    assert sum(reward(prompts=prompts, completions=solutions, answer=others)) < rows / 100
