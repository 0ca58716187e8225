"""`math`: is the completion's final answer equal to the reference answer?

The answer is taken from, in this order: the last `\\boxed{}`; what follows the last `####`; the last
`<answer>` element; what follows the last "answer is"; the last number. Text inside `<think>` never counts, and
a completion that never leaves `<think>` has no answer. Equality is numeric where both sides are numbers, else of
normalised text, else symbolic (`training.rewards.symbolic`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from training.rewards.symbolic import compare

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|[-+]?\.\d+")
_NUMERIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))(?:/(\d+\.?\d*|\.\d+))?")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
_ANSWER_IS = re.compile(r"answer\s+is\s*:?\s*(.+?)(?:\.(?=\s|$)|\n|$)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_UNITS = re.compile(
    r"(?<=\d)\s*(?:dollars?|cents?|degrees?|percent|meters?|metres?|cm|km|kg|miles?|hours?|minutes?|seconds?|days?|weeks?|"
    r"months?|years?|inches|feet|units?|square\s+\w+|cubic\s+\w+)$",
    re.IGNORECASE,
)


class MathReward:
    """1.0 where the final answer equals `answer`, 0.0 where it differs or is missing, None where the
    comparison could not be finished in time."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[float | None]:
        found = [extract_answer(text) for text in completions]
        return self.equal(found, answer)

    def equal(self, found: Sequence[str | None], answer: Sequence[str]) -> list[float | None]:
        """Compare extracted answers with references, pair by pair."""
        scores = [_quick(a, b) for a, b in zip(found, answer, strict=True)]
        undecided = [i for i, score in enumerate(scores) if score is None]
        if undecided:
            results = compare([(found[i] or "", answer[i]) for i in undecided], self.timeout)
            for index, score in zip(undecided, results, strict=True):
                scores[index] = score
        return scores


def extract_answer(text: str) -> str | None:
    """The final answer in a completion, or None; see the module's docstring for the order."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0].strip() or None
    if tags := _ANSWER_TAG.findall(text):
        return _inner(tags[-1])
    if statements := _ANSWER_IS.findall(text):
        return _inner(statements[-1])
    if numbers := NUMBER.findall(text):
        return numbers[-1].strip()
    return None


def normalize_answer(text: str) -> str:
    """One spelling for answers that are plainly the same: numbers as reduced fractions, no currency, commas,
    units, `\\text{}`, spaces or final full stop. Votes are counted over this."""
    number = as_number(text)
    return str(number) if number is not None else _tidy(text)


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain number (`1,234`, `$18.00`, `18.`, `-3/4`, `\\frac{1}{2}`, `50%`), else None.

    A percentage keeps its figure: 50% is 50, as answer keys write it.
    """
    match = _NUMERIC.fullmatch(_tidy(text))
    if match is None:
        return None
    top, bottom = match.groups()
    if bottom is None:
        return Fraction(top)
    divisor = Fraction(bottom)
    return Fraction(top) / divisor if divisor else None


def _quick(found: str | None, answer: str) -> float | None:
    """Decide without symbols where possible; None leaves the pair to math-verify."""
    if found is None:
        return 0.0
    left, right = as_number(found), as_number(answer)
    if left is not None and right is not None:
        return float(left == right)
    if _tidy(found) == _tidy(answer):
        return 1.0
    if len(found) > 400:
        return 0.0
    return None


def _tidy(text: str) -> str:
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}", r"\1", text)
    for piece in (
        "\\left",
        "\\right",
        "\\!",
        "\\,",
        "\\ ",
        "\\;",
        "^{\\circ}",
        "^\\circ",
        "\\%",
        "%",
        "\\$",
        "$",
    ):
        text = text.replace(piece, "")
    text = _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = _UNITS.sub("", text.strip().rstrip(".").strip())
    return re.sub(r"\s+", "", text)


def _inner(text: str) -> str | None:
    """The answer within a short statement: its boxed part, the whole when it is a number, else its last number, else the whole."""
    text = text.strip()
    if as_number(text) is not None or not (numbers := NUMBER.findall(text)):
        return text or None
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+", "", text))
    return numbers[-1].strip() if words else text


def _last_boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip() or None
    return None
