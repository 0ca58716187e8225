"""Reward `reasoning_gym`, and that every one of reasoning-gym's tasks can be a source."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tests.shared import ROOT
from training.config import RewardsConfig, SourceConfig
from training.data.sources import read_examples
from training.errors import BadInput
from training.rewards import load_reward
from training.rewards.gym_scorer import READS_FORMULAS, READS_LITERALS, is_harmless
from training.rewards.workers import Workers

REFUSED = {
    "composite": "give each of them a source of its own",
    "game_of_life_halting": "its own scorer accepts any text",
}
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks that state no answer: any that their scorer accepts is right."""


@pytest.fixture(scope="module")
def reward():
    return load_reward("reasoning_gym", RewardsConfig.model_validate({"reasoning_gym": {"timeout": 60}}))


def examples(task, size=2, seed=1):
    source = SourceConfig(
        kind="reasoning_gym",
        task=task,
        size=size,
        seed=seed,
        format="reasoning_gym",
    )
    return list(read_examples(source, 0))


def check(task, reward):
    """The task's own answers score 1, nonsense less."""
    made = examples(task)
    answers = [example.answer for example in made]
    assert [example.subject for example in made] == [task] * 2
    nonsense = reward(prompts=[""] * 2, completions=["no idea"] * 2, answer=answers)
    assert all(score is not None and score < 1 for score in nonsense)
    if task in WITHOUT_ANSWER:
        assert [example.solution for example in made] == [None] * 2
    else:
        told = [f"<think>hm</think><answer>{example.solution}</answer>" for example in made]
        assert reward(prompts=[""] * 2, completions=told, answer=answers) == [1.0] * 2


@pytest.mark.parametrize("task", ["chain_sum", "graph_color", "prime_factorization", "string_insertion"])
def test_a_tasks_own_scorer_grades(task, reward):
    check(task, reward)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - REFUSED.keys()))
def test_every_task_can_be_a_source(task, reward):
    check(task, reward)


def test_a_task_without_an_answer_accepts_any_that_is_right(reward):
    [example] = examples("graph_color", size=1, seed=3)
    entry = reasoning_gym.create_dataset("graph_color", size=1, seed=3)[0]
    colours = json.dumps({str(k): v for k, v in entry["metadata"]["possible_answer"].items()})
    one_colour = json.dumps(dict.fromkeys(json.loads(colours), 1))
    scores = reward(prompts=[""] * 2, completions=[colours, one_colour], answer=[example.answer] * 2)
    assert scores[0] == 1.0
    assert scores[1] < 1.0


def test_another_version_of_a_problem_is_refused(reward):
    [example] = examples("chain_sum", size=1)
    changed = json.dumps(json.loads(example.answer) | {"answer": "something else"})
    with pytest.raises(BadInput, match="problem 0 of task 'chain_sum' is another one"):
        reward(prompts=[""], completions=["1"], answer=[changed])


@pytest.mark.parametrize("answer", ["18", "[]", "{}"])
def test_an_answer_of_another_form_is_named(answer, reward):
    with pytest.raises(BadInput, match="expected what a source of kind reasoning_gym"):
        reward(prompts=[""], completions=["1"], answer=[answer])


HOSTILE = [
    "__import__('os').system('touch hacked')",
    "open('hacked', 'w')",
    "[open('hacked', 'w')]",
    "().__class__.__base__",
    "(lambda: 1)()",
    "exec('1')",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_runs_is_evaluated(text):
    assert not any(is_harmless(task, text) for task in READS_FORMULAS | READS_LITERALS)


def test_what_answers_look_like_is_evaluated():
    formulas = ["(1 + 2) * 3", "x**3/3 + C", "5*x**2*exp(3*x) - log(Abs(x)) + 0.5", "sin(x)/2 + pi"]
    assert all(is_harmless("simple_integration", text) for text in formulas)
    assert all(is_harmless("n_queens", text) for text in ["_ Q\nQ _", "[['Q', '_'], ['_', 'Q']]"])


def test_every_scorer_that_evaluates_is_known():
    """Modules of reasoning-gym that call `eval` or sympy's parser in `score_answer`, as they stand."""
    found = set()
    for path in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        scorer = path.read_text().partition("def score_answer")[2].split("\n    def ")[0]
        if "eval(" in scorer.replace("literal_eval(", "") or "parse_expr(" in scorer:
            found.add(path.stem)
    assert found == READS_FORMULAS | READS_LITERALS | {"number_sorting"}  # that one evaluates its own answer


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_tasks_that_can_not_be_graded_say_why(task):
    with pytest.raises(BadInput, match=f"task '{task}': .*{REFUSED[task]}"):
        examples(task)


def test_a_worker_has_no_more_memory_than_it_is_given():
    workers = Workers("operator:mul", [], memory=1 << 30)
    assert workers.call([["a", 3], ["a", 2 << 30], ["b", 2]], timeout=60) == ["aaa", None, "bb"]


def test_problems_do_not_depend_on_the_hash_seed():
    """Two processes whose sets have other orders make the same problems of a task that goes through sets."""
    code = (
        "from training.config import SourceConfig; from training.data.sources import read_examples;"
        "print(*read_examples(SourceConfig(kind='reasoning_gym', task='isomorphic_strings', size=2), 1))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""
