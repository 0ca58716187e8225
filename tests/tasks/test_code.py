"""A task graded by running programs, from a file to an RL step."""

import json

import pandas as pd

from tasks.config import load_params
from tasks.prepare import prepare
from tasks.rl import rl
from tasks.stage import BAD_INPUT, Stage
from tasks.validate import validate
from tests.shared import needs_sandbox
from training.storage import read_json

pytestmark = needs_sandbox()
ROWS = [
    {
        "task_id": n,
        "prompt": f"Write a function to add {n} to a number.",
        "code": f"import math\ndef add_{n}(x):\n    return math.floor(x) + {n}",
        "test_imports": [],
        "test_list": [f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(2) == {n + 2}"],
    }
    for n in range(40)
]


def settings(rows, tree, unsafe=False):
    (tree.root / "rows.json").write_text(json.dumps(rows))
    tree.params(
        threads=1,
        device="cpu",
        prompt={"chat_template": "none", "completion": "```python\n{solution}\n```"},
        prepare={"sources": [{"kind": "file", "path": "rows.json", "format": "mbpp"}]},
        validate={"max_completion_tokens": 200, "min_rows": {"train": 4}},
        rewards={"grader": "code", "code": {"workers": 2, "partial": True, "unsafe": unsafe}},
        rl={
            "reward_funcs": ["code"],
            "num_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_completion_length": 8,
        },
    )


def test_from_rows_of_mbpp_to_an_rl_step(with_model):
    tree = with_model
    settings(ROWS, tree)
    assert tree.run("prepare", prepare) == 0
    train = pd.read_parquet(tree.root / "data/prepared/train.parquet")
    assert train["prompt"][0].splitlines()[-1].startswith("assert add_")
    assert train["completion"][0].startswith("```python\nimport math\ndef add_")
    tests = json.loads(train["answer"][0])
    assert (len(tests["tests"]), len(tests["entry_point"])) == (2, 1)
    assert tree.run("validate", validate) == 0, tree.outcome("validate")
    assert read_json(tree.root / "data/reports/validation/metrics.json")["accepted_answers"] == 1.0
    assert tree.run("rl", rl) == 0, tree.outcome("rl")
    [row] = [json.loads(line) for line in (tree.root / "data/models/rl/history.jsonl").open()]
    assert row["reward"] == 0.0
    _, run = tree.record("rl")
    assert "gradeline.unsafe_code" not in run.data.tags
    assert "unsandboxed_code" not in run.data.metrics


def test_a_reference_that_fails_its_tests_does_not_pass_the_gate(with_model):
    tree = with_model
    broken = [{**row, "code": f"def add_{n}(x): return x"} if n == 5 else row for n, row in enumerate(ROWS)]
    settings(broken, tree, unsafe=True)
    assert tree.run("prepare", prepare) == 0
    assert tree.run("validate", validate) == BAD_INPUT
    assert "column grade" in tree.outcome("validate")["message"]
    _, run = tree.record("validate")
    assert run.data.tags["gradeline.unsafe_code"] == "true"


def test_leave_to_do_without_a_sandbox_is_a_metric_of_the_stages_that_grade_programs(tree):
    settings(ROWS, tree, unsafe=True)
    params = load_params(tree.root / "params.yaml")
    found = {
        name: Stage(name, tree.root, params, "", tree.root, None).containment()  # type: ignore[arg-type]
        for name in ("validate", "sft", "preferences", "rl", "evaluate")
    }
    there = {"unsandboxed_code": 0.0}
    assert found == {"validate": there, "sft": {}, "preferences": {}, "rl": there, "evaluate": there}
    settings(ROWS, tree)
    params = load_params(tree.root / "params.yaml")
    assert Stage("rl", tree.root, params, "", tree.root, None).containment() == {}  # type: ignore[arg-type]


def test_a_row_that_is_not_of_the_format_is_named(with_model):
    tree = with_model
    settings([ROWS[0], {**ROWS[1], "code": "def f(:"}], tree)
    assert tree.run("prepare", prepare) == BAD_INPUT
    assert "rows.json, row 2: not such a row as the format says" in tree.outcome("prepare")["message"]
