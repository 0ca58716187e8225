import asyncio

import pytest

from training.config import FormatRewardConfig, RewardsConfig
from training.errors import BadInput
from training.rewards import RewardSum, load_reward


def half(prompts, completions, **columns):
    return [0.5 if text else None for text in completions]


def short(prompts, completions, **columns):
    return [1.0]


async def waited(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [len(text) for text in completions]


def test_a_weighted_sum_leaves_out_what_does_not_apply():
    rewards = RewardSum(
        ["format", f"{__name__}:half"], [2.0, 4.0], RewardsConfig(format=FormatRewardConfig(pattern="a+"))
    )
    scores = rewards.score(["", "", ""], ["aa", "b", ""])
    assert scores.total == [4.0, 2.0, 0.0]
    assert scores.parts == {"format": [1.0, 0.0, 0.0], f"{__name__}:half": [0.5, 0.5, None]}


def test_nothing_applicable_is_none_not_zero():
    assert RewardSum([f"{__name__}:half"], None, RewardsConfig()).score([""], [""]).total == [None]


def test_r1_format():
    reward = load_reward("format", RewardsConfig())
    texts = [
        "<think>a\nb</think> <answer>3</answer>",
        "<answer>3</answer>",
        "<think>a</think><answer>3</answer> bye",
    ]
    assert reward(prompts=[""] * 3, completions=texts) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "reward 'maths': unknown; accepted: math, code, countdown, reasoning_gym, format"),
        ("no.such:thing", "can't be imported"),
        (f"{__name__}:pytest", "not a function"),
    ],
)
def test_unknown_rewards_are_refused(name, message):
    with pytest.raises(BadInput, match=message):
        load_reward(name, RewardsConfig())


def test_a_bad_pattern_is_refused():
    with pytest.raises(BadInput, match=r"rewards.format.pattern = '\('"):
        load_reward("format", RewardsConfig(format=FormatRewardConfig(pattern="(")))


def test_a_wrong_number_of_rewards_is_refused():
    with pytest.raises(BadInput, match="1 values for 2 completions"):
        RewardSum([f"{__name__}:short"], None, RewardsConfig()).score(["", ""], ["a", "b"])


def test_async_rewards_run_side_by_side_with_others():
    name = f"{__name__}:waited"
    scores = RewardSum([name, f"{__name__}:half"], [1.0, 2.0], RewardsConfig()).score(["", ""], ["abc", ""])
    assert scores.parts == {name: [3.0, 0.0], f"{__name__}:half": [0.5, None]}
    assert scores.total == [4.0, 0.0]


def test_async_rewards_wait_together():
    started = []

    async def meets(prompts, completions, **columns):
        started.append(1)
        while len(started) < 2:  # ends only when the other one runs at the same time
            await asyncio.sleep(0)
        return [1.0]

    given = {"a": meets, "b": meets}
    assert RewardSum(["a", "b"], None, RewardsConfig(), given).score([""], ["x"]).total == [2.0]


def test_async_rewards_work_where_a_loop_is_running_already():
    async def notebook():
        return RewardSum([f"{__name__}:waited"], None, RewardsConfig()).score([""], ["abc"]).total

    assert asyncio.run(notebook()) == [3.0]


def test_a_users_reward_may_lie_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rewards").mkdir()
    (tmp_path / "my rewards" / "short.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Kept:\n    n: int = 3\n\n"
        "def short(prompts, completions, **columns):\n    return [float(len(t) < Kept().n) for t in completions]\n"
    )
    reward = load_reward("my rewards/short.py:short", RewardsConfig())
    assert reward(prompts=["", ""], completions=["ab", "abc"]) == [1.0, 0.0]
    with pytest.raises(BadInput, match="long\\.py:short': can't be imported"):
        load_reward("my rewards/long.py:short", RewardsConfig())
