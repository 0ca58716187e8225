"""`code`: does the completion's program pass its row's tests?

The program is, in this order: the last code block marked `python`, `python3` or `py`; the last one without a mark;
the whole text where it has no code block. A block that is never closed goes to the end. Text up to `</think>` never
counts, and a completion that never leaves `<think>` has no program. It runs after the tests' `setup`, in a sandbox
(`training.sandbox`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from training.config import CodeRewardConfig
from training.rewards.explained import Explained, ExplainingReward
from training.rewards.extract import after_thinking
from training.sandbox.grader import Grader

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*+)[^\n]*+\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


class CodeReward(ExplainingReward):
    """1.0 where all tests pass, else 0.0, or with `partial` the share that passes; None where a program could not be graded.

    Raises BadInput where no sandbox can be had, unless `unsafe`.
    """

    def __init__(self, config: CodeRewardConfig) -> None:
        self.grader = Grader(config)

    def explain(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[Explained]:
        """A grade with its program and reason for each completion; `answer` holds the tests (docs/rewards.md)."""
        programs = [extract_program(text) for text in completions]
        verdicts = self.grader.grade_all(list(zip(programs, answer, strict=True)))
        return [
            Explained(verdict.score, program, verdict.reason)
            for program, verdict in zip(programs, verdicts, strict=True)
        ]


def extract_program(text: str) -> str | None:
    """The program in a completion, or None; see the module's docstring for the order."""
    rest = after_thinking(text)
    if rest is None:
        return None
    blocks = [(match[1].lower(), match[2]) for match in _BLOCK.finditer(rest)]
    if not blocks:
        return rest if rest.strip() else None
    marked = [body for mark, body in blocks if mark in _PYTHON] or [body for mark, body in blocks if not mark]
    return marked[-1] if marked else None
