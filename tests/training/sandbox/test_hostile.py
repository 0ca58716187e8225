"""Hostile programs score 0, leave no process and no file, and the next grade is right."""

import json
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.shared import needs_sandbox
from tests.training.sandbox.hostile import PROGRAMS
from training.config import CodeRewardConfig
from training.sandbox.grader import Grader, Verdict

pytestmark = needs_sandbox()
ASSERTIONS = json.dumps({"tests": "assert f(7) == 4111\nassert list(map(f, [7, 7])) == [4111, 4111]"})
CASES = json.dumps({"cases": [{"stdin": "7\n", "stdout": "4111\n"}]})
TESTS = {"assertions": ASSERTIONS, "cases": CASES}
RIGHT = "def f(x): return 4111\nprint(4111)"
WRITTEN = (
    "/hostile",
    "/dev/hostile",
    "/dev/shm/hostile",
    "/tmp/hostile-marker",
    "/tmp/large",
    "/etc/hostile",
)


def eventually(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> dict[tuple[str, str], Verdict]:
    """A verdict on every program and kind of test; a right program between any two, graded by the same sandboxes."""
    folder, before = tmp_path_factory.mktemp("temporary"), psutil.Process().children(recursive=True)
    jobs = [(name, kind) for name in PROGRAMS for kind in TESTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        grader = Grader(CodeRewardConfig(timeout=4.0, partial=True, workers=4))
        pairs = [
            pair for name, kind in jobs for pair in ((PROGRAMS[name], TESTS[kind]), (RIGHT, TESTS[kind]))
        ]
        verdicts = grader.grade_all(pairs)
        grader.close()
    left = lambda: [p for p in psutil.Process().children(recursive=True) if p not in before]  # noqa: E731
    assert eventually(lambda: not left()), left()
    assert not [p for p in psutil.process_iter(["name", "ppid"]) if p.info == {"name": "bwrap", "ppid": 1}]
    assert list(folder.iterdir()) == []
    assert not [path for path in WRITTEN if Path(path).exists()]
    assert {verdict.score for verdict in verdicts[1::2]} == {1.0}
    return dict(zip(jobs, verdicts[::2], strict=True))


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 40


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_scores_0(graded, name: str, kind: str) -> None:
    verdict = graded[name, kind]
    assert verdict.score == 0.0, verdict
