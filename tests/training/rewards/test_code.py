"""`code`: which text is the program, and the reward's values."""

import json

import pytest

from tests.shared import needs_sandbox
from training.config import CodeRewardConfig, RewardsConfig
from training.rewards import RewardSum
from training.rewards.code import extract_program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```", None),
        ("```py\nx = 1", "x = 1"),
        ("  ```Python\n    return 1\n  ```", "    return 1\n"),
        ('```python\ns = """```"""\n```', 's = """```"""\n'),
        ("def f(x):\n    return x", "def f(x):\n    return x"),
        ("    return x", "    return x"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```", None),
        ("  \n", None),
        ("", None),
    ],
)
def test_the_program_in_a_completion(text: str, program: str | None) -> None:
    assert extract_program(text) == program


@needs_sandbox()
def test_the_reward_grades_each_completion_against_its_rows_tests() -> None:
    rewards = RewardSum(["code"], None, RewardsConfig(code=CodeRewardConfig(partial=True)))
    completions = [
        "```python\ndef f(x): return x\n```",
        "```python\ndef f(x): return 1\n```",
        "I don't know.",
    ]
    answer = [json.dumps(["assert f(1) == 1", "assert f(2) == 2"])] * 3
    scores = rewards.score(prompts=["?"] * 3, completions=completions, answer=answer, id=["a", "b", "c"])
    assert scores.total == [1.0, 0.5, 0.0]
