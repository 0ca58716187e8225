import numpy as np
import pytest

from training.config import RewardsConfig
from training.errors import BadInput
from training.rewards import RewardSum, Scores
from training.rewards.process import score_steps, shown_steps
from training.rewards.steps import Step

TEXTS = ["1+1=2\nso 2\n2+2=5", "3", "4+4=8\n5"]


def decode(ids):
    return "".join(map(chr, ids))


def ids(text):
    return list(map(ord, text))


def lengths(prompts, completions, steps, **columns):
    return [[float(len(step)) for step in own] for own in steps]


def skips(prompts, completions, steps, **columns):
    return [None, [None], [np.float32(2.0), float("nan")]]


def outcome(prompts, completions, answer, **columns):
    return [float(a in text) for a, text in zip(answer, completions, strict=True)]


def too_few(prompts, completions, steps, **columns):
    return [[0.0] for own in steps]


def missing_one(prompts, completions, **columns):
    return [1.0]


def texts(prompts, completions, **columns):
    return [["good"] * 3, ["bad"], ["bad", "bad"]]


def score(names, weights=None, config=None, texts=TEXTS):
    own = [name if name in ("equations", "math") else f"{__name__}:{name}" for name in names]
    rewards = RewardSum(own, weights, config or RewardsConfig())
    answer = ["5", "3", "9"]
    columns = {"answer": answer, "finish_reason": ["stop"] * 3, "completion_ids": list(map(ids, texts))}
    return score_steps(rewards, [""] * len(texts), texts, decode, **columns)


def test_parts_are_added_up_step_by_step():
    scores = score(["equations", "math"], [0.5, 2.0])
    assert [one.total for one in scores.steps] == [[0.5, None, 2.0], [2.0], [0.5, 0.0]]
    assert scores.steps[0].steps == [Step("1+1=2\n", 5), Step("so 2\n", 10), Step("2+2=5", 15)]
    assert scores.steps[0].parts == {"equations": [1.0, None, 0.0], "math": [None, None, 1.0]}
    assert scores.total == [1.25, 2.0, 0.25]
    assert scores.parts == {"equations": [0.5, None, 1.0], "math": [1.0, 1.0, 0.0]}


def test_any_reward_of_the_outcome_is_the_last_steps():
    scores = score(["outcome"])
    assert [one.total for one in scores.steps] == [[None, None, 1.0], [1.0], [None, 0.0]]


def test_what_does_not_apply_is_left_out():
    scores = score(["skips"])
    assert [one.total for one in scores.steps] == [[None] * 3, [None], [2.0, None]]
    assert scores.total == [None, None, 2.0]


def test_steps_are_divided_as_the_recipe_says():
    scores = score(["lengths"], config=RewardsConfig.model_validate({"steps": {"separator": "+"}}))
    assert [one.total for one in scores.steps] == [[2.0, 11.0, 3.0], [1.0], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "'.*too_few': returned 1 rewards for completion 0, which has 3 steps"),
        ("missing_one", "'.*missing_one': returned 1 values for 3 completions"),
        ("texts", "'.*texts': returned str for completion 0, expected a number or None"),
    ],
)
def test_wrong_numbers_of_rewards_are_refused(name, message):
    with pytest.raises(BadInput, match=message):
        score([name])


def test_a_list_without_process_supervision_is_refused():
    rewards = RewardSum([f"{__name__}:texts"], None, RewardsConfig())
    with pytest.raises(BadInput, match=r"returned list for completion 0.*rl.supervision: process"):
        rewards.score(["", "", ""], TEXTS)


def test_scores_are_cut_and_joined_with_their_steps():
    scores = score(["equations", "lengths"])
    again = Scores.joined([scores.part(slice(0, 1)), scores.part(slice(1, 3))])
    assert again == scores


def test_a_table_shows_steps_and_their_rewards():
    scores = score(["equations", "math"])
    assert shown_steps(scores, 2) == {
        "steps": ["4+4=8\n", "5"],
        "step_rewards": [1.0, 0.0],
        "step_rewards/equations": [1.0, None],
        "step_rewards/math": [None, 0.0],
    }
    assert shown_steps(Scores([1.0], {"math": [1.0]}), 0) == {}
