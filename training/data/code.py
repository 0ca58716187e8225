"""Rows of data sets of programming problems: a question, a program that solves it, and its tests."""

from __future__ import annotations

import ast
from typing import Any


def humaneval(
    prompt: str, canonical_solution: str, test: str, entry_point: str
) -> tuple[str, str, dict[str, Any]]:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): a signature and docstring to complete, and `check(candidate)`."""
    question = f"Complete this function:\n\n```python\n{prompt.strip()}\n```"
    tests = {"tests": f"{test.strip()}\n\ncheck({entry_point})", "setup": prompt, "entry_point": entry_point}
    return question, f"{prompt.strip()}\n{canonical_solution.rstrip()}", tests


def mbpp(prompt: str, code: str, test_imports: Any, test_list: Any) -> tuple[str, str, dict[str, Any]]:
    """MBPP (Austin et al. 2021, arXiv:2108.07732): a sentence; its first assertion is shown, which names
    the function, the rest is held back."""
    question = f"{prompt.strip()}\nYour code should pass this test:\n\n{test_list[0]}"
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    called = {
        node.id for test in test_list for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)
    }
    tests = {
        "tests": list(test_list),
        "setup": test_imports if isinstance(test_imports, str) else "\n".join(test_imports),
        "entry_point": sorted(defined & called),  # some are called as a built-in function is
    }
    return question, code.strip(), tests
