"""Verdicts on programs that mean well, worked out by hand, and what happens where there is no sandbox."""

import json
import re

import pytest

from tests.shared import SHARED, needs_sandbox, needs_shared
from training.config import CodeRewardConfig, SourceConfig
from training.data.sources import read_examples
from training.errors import BadInput
from training.sandbox import bubblewrap
from training.sandbox.grader import Grader, Verdict, parse_tests

sandboxed = needs_sandbox()
ADD = json.dumps(["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(-1, 1) == 0"])
ECHO = json.dumps({"cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5", "stdout": "10  \n\n"}]})


@pytest.fixture(scope="module")
def grader():
    grader = Grader(CodeRewardConfig(partial=True, workers=2))
    yield grader
    grader.close()


@sandboxed
@pytest.mark.parametrize(
    ("code", "tests", "score", "reason"),
    [
        ("def add(a, b): return a + b", ADD, 1.0, ""),
        ("def add(a, b): return 3", ADD, 1 / 3, "assertion 2 is false"),
        ("def add(a, b): return 1 // a", ADD, 0.0, "assertion 1 is false"),
        ("def add(a, b): return {}[a]", ADD, 0.0, "assertion 1 raised KeyError: '1'"),
        ("def sum(a, b): return a + b", ADD, 0.0, "assertion 1 raised KeyError: \"'add'\""),
        ("def add(a, b) return a", ADD, 0.0, "the program raised SyntaxError: expected ':'"),
        (None, ADD, 0.0, "no program"),
        ("print(sum(map(int, input().split())))", ECHO, 1.0, ""),
        ("print(3); exit()", ECHO, 0.5, "case 2: other output"),
        ("print(3)\nraise SystemExit(1)", ECHO, 0.0, "case 1: ended with status 1"),
        ("import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))", ECHO, 1.0, ""),
        ("import threading\nt = threading.Thread(target=lambda: print(sum(map(int, input().split()))))\nt.start()", ECHO, 1.0, ""),
    ],
)  # fmt: skip
def test_verdicts(grader: Grader, code: str | None, tests: str, score: float, reason: str) -> None:
    verdict = grader.grade(code, tests)
    assert verdict.score == pytest.approx(score)
    assert verdict.reason.startswith(reason)
    assert bool(verdict.reason) == bool(reason)


@sandboxed
@pytest.mark.parametrize(
    ("tests", "passed", "total"),
    [
        ("for x in [1, 2, 3]:\n    assert f(x) < 3", 0, 1),  # held twice of three times
        ("assert True\nassert f(1) == 1", 1, 1),  # a constant is no test
        ("assert f(1) == 1\nif f(1) == 2:\n    assert f(2) == 2", 1, 2),  # one that never ran
        ("assert f(1) == 1\nf(1).missing\nassert f(1) == 1", 1, 2),  # stopped half-way
        ("x = f(1)\nassert x == 1\nf(1).missing", 0, 1),
        ("def check(g):\n    assert g(2) == 2\n    assert g(2) != 2\ncheck(f)", 1, 2),
        ("try:\n    f('raise')\n    assert f(1) == 2\nexcept TypeError:\n    assert f(2) == 2", 1, 2),
        ("import math\nassert math.isclose(f(0.1) + f(0.2), 0.3)", 1, 1),
        ("assert sys.getsizeof(f(())) == sys.getsizeof(())", 1, 1),
    ],
)
def test_assertions_are_counted(grader: Grader, tests: str, passed: int, total: int) -> None:
    code = "def f(x):\n    if x == 'raise': raise TypeError(x)\n    return x"
    verdict = grader.grade(code, json.dumps({"tests": tests}))
    assert (verdict.passed, verdict.total) == (passed, total), verdict


@sandboxed
def test_all_or_nothing_unless_partial() -> None:
    grader = Grader(CodeRewardConfig(workers=1))
    assert grader.grade("def add(a, b): return 3", ADD).score == 0.0
    assert grader.grade("print(3)", ECHO) == Verdict(0.0, "case 2: other output", 1, 2)
    grader.close()


@sandboxed
def test_broken_tests_are_no_verdict_on_the_program(grader: Grader) -> None:
    for tests in ("assert f(1) ==", "f(1)", "assert True"):
        verdict = grader.grade("def f(x): return x", json.dumps({"tests": tests}))
        assert verdict.score is None
        assert "test" in verdict.reason
    assert grader.grade("def f(x): return x", '["assert f(1) == 1"]').score == 1.0


@sandboxed
def test_a_program_too_large_to_cross_is_not_graded_and_the_next_is(grader: Grader) -> None:
    for _ in range(3):
        verdict = grader.grade("x = 1\n" * (2 << 20), ADD)
        assert verdict.score is None
        assert "may cross" in verdict.reason
        assert grader.grade("def add(a, b): return a + b", ADD).score == 1.0


@sandboxed
def test_the_setup_comes_before_program_and_tests(grader: Grader) -> None:
    tests = {"setup": 'def helper(x):\n    return x + 1\n\ndef f(x):\n    """To do."""\n', "tests": "assert f(1) == helper(1)", "entry_point": "f"}  # fmt: skip
    for code in ("    return helper(x)", "def f(x): return helper(x)", "def f(x): return 2"):
        assert grader.grade(code, json.dumps(tests)).score == 1.0
    assert grader.grade("def helper(x): return 0\ndef f(x): return 0", json.dumps(tests)).score == 0.0


@sandboxed
def test_the_tests_draw_the_same_numbers_every_time(grader: Grader) -> None:
    tests = json.dumps({"tests": "import random\nassert f(random.random()) < 0.5"})
    verdicts = {grader.grade("def f(x): return x if x < 0.3 else 1 - hash('a') % 2", tests) for _ in range(4)}
    assert len(verdicts) == 1


@pytest.mark.parametrize(
    "text", ["7", "not JSON", "{}", '{"cases": []}', '{"cases": [{"stdin": 1}]}', '{"tests": 7}', "[7]", "null"]
)  # fmt: skip
def test_an_answer_that_holds_no_tests_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="holds no tests"):
        parse_tests(text)


def test_inputs_and_outputs_are_cases() -> None:
    assert parse_tests('{"inputs": ["1"], "outputs": ["2"]}').cases == (("1", "2"),)


def emptied(program: str) -> str:
    """The program with `pass` for the body of every function."""
    import ast

    class Emptying(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            node.body = [ast.Pass()]
            return node

    return ast.unparse(Emptying().visit(ast.parse(program)))


@sandboxed
@needs_shared
@pytest.mark.parametrize(
    ("name", "file", "number"),
    [("humaneval", "HumanEval.jsonl.gz", 164), ("mbpp", "sanitized-mbpp.json", 427)],
)
def test_reference_solutions_pass_and_emptied_ones_fail(name: str, file: str, number: int) -> None:
    source = SourceConfig.model_validate({"kind": "file", "path": str(SHARED / name / file), "format": name})
    rows = [(example.solution, example.answer) for example in read_examples(source, 0)]
    assert len(rows) == number
    grader = Grader(CodeRewardConfig(timeout=20.0))
    verdicts = grader.grade_all(rows)
    assert [v for v in verdicts if v.score != 1.0] == []
    verdicts = grader.grade_all([(emptied(solution), tests) for solution, tests in rows])
    assert [v for v in verdicts if v.score != 0.0] == []
    grader.close()


@pytest.fixture
def no_sandbox(monkeypatch):
    monkeypatch.setenv("PATH", "")
    bubblewrap.why_unavailable.cache_clear()
    yield
    bubblewrap.why_unavailable.cache_clear()


def test_without_a_sandbox_it_refuses(no_sandbox) -> None:
    with pytest.raises(BadInput, match=re.escape("there is none: bwrap is not installed")):
        Grader(CodeRewardConfig())


def test_unsafe_runs_without_one_and_says_so(no_sandbox) -> None:
    with pytest.warns(UserWarning, match="without a sandbox"):
        grader = Grader(CodeRewardConfig(unsafe=True, timeout=5.0, workers=2))
    loop = "while True: pass"
    verdicts = grader.grade_all(
        [("def add(a, b): return a + b", ADD), ("def add(a, b): return 0", ADD), (loop, ADD)]
    )
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 0.0]
    assert grader.grade("print(sum(map(int, input().split())))", ECHO).score == 1.0
    grader.close()
