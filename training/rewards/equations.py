"""`equations`: does the arithmetic that a step writes down hold?

An equation is `expression = number` or `expression = expression`, with an operation on its left side: numbers
(`1,234`, `$18.50`, `.5`, `3/4`, `50%`), + - * / × ÷ x · and parentheses, on one line; GSM8K's `<<48/2=24>>` and
simple LaTeX are read too. Values are exact fractions; a decimal on the right may be the value rounded to the
places that it shows, and a percentage may stand for its figure.

Only what is certainly an equation is judged: where a side's own text goes on beyond what can be read (units
within a sum, variables, powers, `half of 6 + 2`), it counts as no equation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

_NUMBER = (
    r"(?:[$€£¥]\s?)?(?P<digits>(?:\d{1,3}(?:,\d{3}){1,20}(?![,\d])|\d+)(?:\.\d+)?|\.\d+)(?P<percent>\s?%)?"
)
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER})|(?P<operator>[-+*×÷·]|/(?!\s*[^\W\d_])|(?<![^\W\d_])[xX](?=\s*[$€£¥]?\s?[\d.(]))"
    r"|(?P<bracket>[()])|(?P<other>[^\W\d_]+|\S)"
)
_EQUALS = re.compile(r"(?<![<>!=≠:])=(?![=>])")
_NOTE = re.compile(r"<<([^<>]*)>>")
_BULLET = re.compile(r"^\s*[-*+•]\s+")
_BOLD = re.compile(r"(?<!\w)\*\*(?=\S)([^*]+?)(?<=\S)\*\*(?!\w)")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_SPELLINGS = {"\\times": "×", "\\cdot": "·", "\\div": "÷", "\\$": "$", "\\%": "%", "−": "-", "–": "-"}
_OPERATIVE_BEFORE = re.compile(
    r"(?:\b(?:times|plus|minus|by|over|from|than|twice|half|double|triple|root|\d\s+and)"
    r"|(?:\b(?:half|third|quarter|[a-z]+th)s?|\d|%|percent|root)\s+of(?:\s+the)?)\s*$",
    re.IGNORECASE,
)
_OPERATIVE_AFTER = re.compile(
    r"\s*(?:(?:hundred|thousand|million|billion|dozen|cent|remainder|times|plus|minus)|(?:k|m|r|mod|[xyz])\b"
    r"|and\W+\d+\s*/)",
    re.IGNORECASE,
)
_LONGEST = 64
"""Tokens of a side, and digits of a number, beyond which an equation is not read."""


class EquationsReward:
    """For each step 1.0 where every equation in it holds, 0.0 where one does not, None where it has none.

    Without `steps` the whole completion is judged as one.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        steps: Sequence[Sequence[str]] | None = None,
        **_: Any,
    ) -> list[float | None] | list[list[float | None]]:
        if steps is None:
            return [judge(text) for text in completions]
        return [[judge(step) for step in one] for one in steps]


def judge(text: str) -> float | None:
    """1.0, 0.0 or None for one step, as above."""
    verdicts = list(equations(text))
    return float(all(verdicts)) if verdicts else None


def equations(text: str) -> Iterator[bool]:
    """Whether each equation in the text holds, in order."""
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    text = _FRACTION.sub(r"((\1)/(\2))", text)
    for line in text.splitlines():
        line = _BOLD.sub(r"\1", _BULLET.sub("", line))
        for part in (*_NOTE.findall(line), _NOTE.sub("", line)):
            for left, right in pairwise(_EQUALS.split(part)):
                said, claimed = _at_end(left), _at_start(right)
                if said is not None and claimed is not None and said.operations:
                    yield _agree(said, claimed)


@dataclass(frozen=True)
class _Value:
    """What an expression comes to (None: a division by zero); `decimals` and `percent` of a number alone."""

    value: Fraction | None
    operations: int = 0
    decimals: int = 0
    percent: bool = False


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int
    value: _Value | None = None


def _agree(said: _Value, claimed: _Value) -> bool:
    if said.value is None or claimed.value is None:
        return False
    within = Fraction(1, 2 * 10**claimed.decimals) if claimed.decimals else Fraction(0)
    if claimed.percent:
        figure = claimed.value * 100
        return abs(said.value - figure) <= within or abs(said.value * 100 - figure) <= within
    return abs(said.value - claimed.value) <= within


def _at_end(text: str) -> _Value | None:
    """The longest expression that a text ends with, None where what stands before may belong to it."""
    tokens = _tokens(text)
    first = next((i + 1 for i in reversed(range(len(tokens))) if tokens[i].kind == "other"), 0)
    run = tokens[first:]
    if len(run) > _LONGEST:
        return None
    for start in range(len(run)):
        found = _parse(run, start)
        if found is None or found[1] != len(run):
            continue
        if start:
            return found[0] if run[start - 1].kind == "bracket" else None
        before = text[: run[0].start]
        return found[0] if _may_begin(before, run[0].text) else None
    return None


def _at_start(text: str) -> _Value | None:
    """The longest expression that a text starts with, None where what follows may belong to it."""
    tokens = _tokens(text)[: _LONGEST + 1]
    found = _parse(tokens, 0)
    if found is None or found[1] > _LONGEST:
        return None
    value, end = found
    after = text[tokens[end - 1].end :]
    if end == len(tokens) and not after.strip():
        return value
    follows = tokens[end].kind if end < len(tokens) else "other"
    if follows in ("number", "operator"):
        return None
    if after[:1] in ("(", "^", "!", "√") or after.lstrip()[:1] == "^" or _OPERATIVE_AFTER.match(after):
        return None
    return value


def _may_begin(before: str, first: str) -> bool:
    """Whether an expression whose first token is `first` may begin after this text."""
    if not before.strip():
        return True
    words = before.rstrip()
    if words[-1] in "^√!|_" or _OPERATIVE_BEFORE.search(words):
        return False
    if first == "-" and words[-1].isalnum():
        return False
    if words != before:
        return True
    return not (words[-1].isalnum() or (words[-1] in ".,:" and words[-2:-1].isdigit()))


def _tokens(text: str) -> list[_Token]:
    """The text as numbers, operators, brackets, and words or signs of any other kind; `2(3)` gets its sign."""
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind, start, end = match.lastgroup, match.start(), match.end()
        if match["number"] is not None:
            kind = "number"
        before = tokens[-1] if tokens else None
        if (
            match["bracket"] == "("
            and before
            and before.end == start
            and (before.kind == "number" or before.text == ")")
        ):
            tokens.append(_Token("operator", "*", start, start))
        value = _number(match) if kind == "number" else None
        tokens.append(_Token(str(kind), match[0], start, end, value))
    return tokens


def _number(match: re.Match[str]) -> _Value | None:
    digits = match["digits"].replace(",", "")
    if len(digits) > _LONGEST:
        return None
    percent = match["percent"] is not None
    value = Fraction(digits) / (100 if percent else 1)
    return _Value(value, decimals=len(digits.partition(".")[2]), percent=percent)


def _parse(tokens: list[_Token], place: int) -> tuple[_Value, int] | None:
    """A sum from `place` on, as long as it goes, and the place after it; None where none can be read."""
    return _chain(tokens, place, "+-", lambda ts, p: _chain(ts, p, "*/×÷·xX", _factor))


def _chain(tokens: list[_Token], place: int, operators: str, part: Any) -> tuple[_Value, int] | None:
    found = part(tokens, place)
    while found is not None and found[1] < len(tokens):
        left, place = found
        token = tokens[place]
        if token.kind != "operator" or token.text not in operators:
            break
        right = part(tokens, place + 1)
        if right is None:
            return None
        found = _apply(token.text, left, right[0]), right[1]
    return found


def _factor(tokens: list[_Token], place: int) -> tuple[_Value, int] | None:
    """A number, a parenthesis, or either with a minus sign right before it."""
    if place >= len(tokens):
        return None
    token = tokens[place]
    if token.kind == "number" and token.value is not None:
        return token.value, place + 1
    if token.text == "(" and token.kind == "bracket":
        inner = _parse(tokens, place + 1)
        if inner is None or inner[1] >= len(tokens) or tokens[inner[1]].text != ")":
            return None
        return _Value(inner[0].value, inner[0].operations), inner[1] + 1
    glued = place + 1 < len(tokens) and tokens[place + 1].start == token.end
    if token.text == "-" and glued and tokens[place + 1].text != "-":
        inner = _factor(tokens, place + 1)
        if inner is not None:
            value = inner[0]
            negative = None if value.value is None else -value.value
            return _Value(negative, value.operations, value.decimals, value.percent), inner[1]
    return None


def _apply(operator: str, left: _Value, right: _Value) -> _Value:
    operations = left.operations + right.operations + 1
    a, b = left.value, right.value
    if a is None or b is None or (operator in "/÷" and b == 0):
        return _Value(None, operations)
    if operator in "+-":
        return _Value(a + b if operator == "+" else a - b, operations)
    return _Value(a / b if operator in "/÷" else a * b, operations)
