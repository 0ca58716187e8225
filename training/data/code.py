"""Rows of data sets of programming problems: a question, a program that solves it, and its tests as JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from training.errors import BadInput


class Format(NamedTuple):
    """Columns that a data set's rows have, and what makes (question, solution, answer) of them."""

    columns: tuple[str, ...]
    make: Callable[..., tuple[str, str, dict[str, Any]]]

    def example(self, record: dict[str, Any], place: str) -> tuple[str, str, str]:
        """Raises BadInput naming the row when a column holds something else than it should."""
        try:
            question, solution, tests = self.make(**{name: record[name] for name in self.columns})
        except (AttributeError, IndexError, SyntaxError, TypeError) as error:
            raise BadInput(f"{place}: not such a row as the format says: {error}") from None
        return question, solution, json.dumps(tests)


def _humaneval(
    prompt: str, canonical_solution: str, test: str, entry_point: str
) -> tuple[str, str, dict[str, Any]]:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): a signature and docstring to complete, and `check(candidate)`."""
    question = f"Complete this function:\n\n```python\n{prompt.strip()}\n```"
    tests = {"tests": f"{test.strip()}\n\ncheck({entry_point})", "setup": prompt, "entry_point": entry_point}
    return question, f"{prompt.strip()}\n{canonical_solution.rstrip()}", tests


def _mbpp(prompt: str, code: str, test_imports: Any, test_list: Any) -> tuple[str, str, dict[str, Any]]:
    """MBPP, sanitized (Austin et al. 2021, arXiv:2108.07732): a sentence; its first assertion is shown, which names
    the function, the rest is held back."""
    question = f"{prompt.strip()}\nYour code should pass this test:\n\n{test_list[0]}"
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    called = {
        node.id for test in test_list for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)
    }
    tests = {
        "tests": list(test_list),
        "setup": "\n".join(test_imports),
        "entry_point": sorted(defined & called),  # some are called as a built-in function is
    }
    return question, code.strip(), tests


FORMATS = {
    "humaneval": Format(("prompt", "canonical_solution", "test", "entry_point"), _humaneval),
    "mbpp": Format(("prompt", "code", "test_imports", "test_list"), _mbpp),
}
