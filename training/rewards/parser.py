"""math-verify's parser, warmed up: what the fork server of `symbolic`'s workers imports, so that every worker begins with it."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse

EXAMPLES = (
    r"\frac{x+1}{2}", r"-2\sqrt{3}-i", "x^2+3x-4", "(1,-2)", r"(-\infty,2]\cup[3,\infty)", r"\{1,2\}", "y=2x+1",
    r"\frac{\pi}{4}", r"\begin{pmatrix}1\\2\end{pmatrix}", "2,3,4", r"x\leq5", r"\sin(x)", r"50\%",
)  # fmt: skip
"""Kinds of answers; the parser that has seen them is several times faster at the next."""


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """A group's completions are compared with one answer, and often say the same: parsing is the dear part."""
    return parse(f"${text.strip('$')}$", parsing_timeout=None)


logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off; ours is not
for example in EXAMPLES:
    parsed(example)
