"""What a worker of the `reasoning_gym` reward does: make the problem again, and ask its task's scorer.

Some scorers evaluate the answer as Python, which a model could use to run what it likes. Those are given only answers
that are plain values, or formulas of numbers, letters and functions.
"""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from typing import Any

import reasoning_gym

READS_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` on an answer that isn't right as it stands."""
READS_FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers give the answer to sympy's `parse_expr`, which evaluates it."""
_FUNCTIONS = "sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi"
_FORMULA = re.compile(
    rf"(?:\d+(?:\.\d+)?|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z0-9(])|(?<![A-Za-z])(?:{_FUNCTIONS})(?=\()|[-+*/^()\s])*"
)


def score(text: str, problem: dict[str, Any]) -> tuple[float, str] | str:
    """The score (0 to 1) and what it was for; a text alone says why the problem can't be made again."""
    task = problem["task"]
    settings = json.dumps(problem["settings"], sort_keys=True)
    try:
        dataset = _dataset(task, settings, problem["seed"], problem["size"])
        entry = _entry(task, settings, problem["seed"], problem["size"], problem["index"])
    except Exception as error:
        return f"problem {problem['index']} of task {task!r} can't be made: {type(error).__name__}: {error}"
    if entry["answer"] != problem["answer"]:
        return (
            f"problem {problem['index']} of task {task!r} is another one in this version of reasoning-gym; "
            "run stage prepare again"
        )
    if not is_harmless(task, text):
        return 0.0, "not read: neither a plain value nor a formula"
    try:
        return float(dataset.score_answer(text, entry)), "its own score"
    except MemoryError:
        raise
    except Exception as error:
        return 0.0, f"its scorer can't read that: {type(error).__name__}"


def is_harmless(task: str, text: str) -> bool:
    """Whether evaluating `text` as that task's scorer does can run nothing but arithmetic."""
    if task in READS_FORMULAS:
        return _FORMULA.fullmatch(text) is not None
    if task not in READS_LITERALS:
        return True
    if text.isidentifier():
        return True
    try:
        ast.literal_eval(text)
    except (SyntaxError, MemoryError, RecursionError):
        return True  # eval fails in the same way
    except (ValueError, TypeError):
        return False
    return True


@lru_cache(maxsize=32)
def _dataset(task: str, settings: str, seed: int, size: int) -> Any:
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(settings))


@lru_cache(maxsize=256)
def _entry(task: str, settings: str, seed: int, size: int, index: int) -> Any:
    return _dataset(task, settings, seed, size)[index]
