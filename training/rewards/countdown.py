"""`countdown`: does the equation use each given number exactly once and give the target?

The equation is what the last `<answer>` element holds, else the last line that isn't empty. Text up to `</think>`
never counts, and a completion that never leaves `<think>` has none. An `= 98` at its end is left out where it names
the target. Numbers, + - * / and brackets are all there is; the value is exact.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from training.errors import BadInput
from training.rewards.explained import Explained, ExplainingReward
from training.rewards.extract import after_thinking, tagged

_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_SPELLED = {"×": "*", "·": "*", "\\times": "*", "\\cdot": "*", "÷": "/", "\\div": "/", "−": "-", "–": "-"}
_LONGEST = 500
"""Characters beyond which nothing is read."""


class CountdownReward(ExplainingReward):
    """1.0 where the equation is right, else 0.0 (Countdown as TinyZero sets it, github.com/Jiayi-Pan/TinyZero)."""

    def explain(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[Explained]:
        """A grade for each completion; `answer` is JSON, `{"numbers": [44, 19, 35], "target": 98}`.

        Raises BadInput for an answer that is something else.
        """
        return [_graded(text, *_task(right)) for text, right in zip(completions, answer, strict=True)]


def _graded(text: str, numbers: list[int], target: int) -> Explained:
    equation = extract_equation(text, target)
    if equation is None:
        return Explained(0.0, None, "no equation found")
    try:
        used, value = evaluated(equation)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Explained(0.0, equation, "not an equation of numbers, + - * / and brackets")
    except ZeroDivisionError:
        return Explained(0.0, equation, "divides by zero")
    if sorted(used) != sorted(numbers):
        return Explained(0.0, equation, f"uses {_listed(used)}, given are {_listed(numbers)}")
    if value != target:
        return Explained(0.0, equation, f"gives {value}, not {target}")
    return Explained(1.0, equation, f"gives {target} with each of {_listed(numbers)}")


def extract_equation(text: str, target: int) -> str | None:
    """The equation in a completion, or None; see the module's docstring."""
    rest = after_thinking(text)
    if rest is None:
        return None
    lines = [line for line in rest.splitlines() if line.strip()]
    found = tagged(rest)
    found = found if found is not None else lines[-1] if lines else ""
    for spelling, sign in _SPELLED.items():
        found = found.replace(spelling, sign)
    found = re.sub(rf"=\s*{target}\s*\.?\s*$", "", found.strip().strip("$`")).strip()
    return found or None


def evaluated(equation: str) -> tuple[list[int], Fraction]:
    """The numbers that an equation uses and its value; raises SyntaxError, ValueError or ZeroDivisionError."""
    if len(equation) > _LONGEST:
        raise ValueError("too long")
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
            parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return _OPERATORS[type(node.op)](*map(value, parts))
        raise ValueError(f"holds {type(node).__name__}")

    return used, value(ast.parse(equation, mode="eval").body)


def _task(answer: str) -> tuple[list[int], int]:
    try:
        task = json.loads(answer)
        return [int(number) for number in task["numbers"]], int(task["target"])
    except (KeyError, TypeError, ValueError):
        raise BadInput(
            f"reward 'countdown': answer {answer[:80]!r}; expected JSON such as "
            '{"numbers": [44, 19, 35], "target": 98}, which format countdown makes'
        ) from None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
