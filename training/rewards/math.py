"""`math`: is the completion's final answer equal to the reference answer?

The answer is taken from, in this order: the last `\\boxed{}`; what follows the last `####`; the last
`<answer>` element; what follows the last "answer is"; the last number. Text inside `<think>` never counts, and
a completion that never leaves `<think>` has no answer.

Two answers are compared as exact numbers where both are plain numbers, else as normalised text, else as the
values of closed forms, which can show that they differ (`training.rewards.closed_form`), and else by math-verify
(`training.rewards.symbolic`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from training.boxed import last_boxed
from training.rewards.closed_form import closed_form, surely_differ
from training.rewards.explained import Explained, ExplainingReward
from training.rewards.extract import after_thinking, tagged
from training.rewards.symbolic import compare

_FRACTION = r"\\[dt]?frac\s*(?:\{\s*-?\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)"
NUMBER = re.compile(
    rf"(?:(?<![\w)}}])[-−+])?[$€£¥]?(?:{_FRACTION}"
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|\.\d+)%?"
)
_NUMERIC = re.compile(r"([-+]?)(?:(\d+\.?\d*|\.\d+)(?:/(\d+\.?\d*|\.\d+))?|(\d*)\\frac\{(-?\d+)\}\{(\d+)\})")
_TEX_FRACTION = re.compile(r"\\[dt]?frac\s*(\{[^{}]*\}|\d)\s*(?=([\d{]))(?:(\d)|)")
_ANSWER_IS = re.compile(r"answer\s+is\s*:?\s*(.+?)(?:\.(?=\s|$)|\n|$)", re.IGNORECASE)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
_TEXT_UNIT = re.compile(
    r"(?<=[\d}%])(?:\s|\\[ ,;])*\\(?:text|textbf|textit|mathrm|mathbf|mbox|rm)\s*\{([\sA-Za-z./]*)\}(?:\s*\^\s*\{?\d\}?)?$"
)
_UNITS = re.compile(
    r"(?<=[\d}%])\s*(?:(?:sq(?:uare|\.)?\s+|cubic\s+)?(?:[ckm]m|km/h|mph|[mk]?g|kg|lbs?|oz|ft|in|hrs?|mins?|days?)"
    r"|[A-Za-z]{4,}(?:\s+[A-Za-z]+)*)\.?(?:\s*\^\s*\{?[23]\}?)?$"
)
_MAYBE_UNIT = re.compile(r"[\d.]+[a-zA-Z]{1,3}(?:\^\{?[23]\}?)?")
_SCALE_WORD = re.compile(rf"\b(?:{'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(_SCALES)})s?\b.*$", re.IGNORECASE)
_NAMED = re.compile(r"[A-Za-z](?:\([A-Za-z]\)|_\{?\w\}?)?=(?=[^=])")
_DROPPED = re.compile(
    r"(?<=,)\s*\\!\s*|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|\^\{?\\circ\}?|\\degree|°|\\?%|\\?\$|[€£¥]"
    r"|\\(?:displaystyle|limits)(?![a-zA-Z])"
)
_AND = re.compile(r"\s*,?\s*\b(?:and|or)\b\s*")
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}")
_LONGEST = 400
"""Characters of an answer beyond which only its text is compared."""


class MathReward(ExplainingReward):
    """1.0 where the final answer equals `answer`, 0.0 where it differs or is missing, None where the
    comparison could not be finished in time."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def explain(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[Explained]:
        """The scores with the answers found and why (see `training.rewards.explained`)."""
        found = [extract_answer(text) for text in completions]
        return [
            Explained(score, text, self._reason(score, text, right))
            for score, text, right in zip(self.equal(found, answer), found, answer, strict=True)
        ]

    def equal(self, found: Sequence[str | None], answer: Sequence[str]) -> list[float | None]:
        """Compare extracted answers with references, pair by pair."""
        scores = [_quick(a, b) for a, b in zip(found, answer, strict=True)]
        undecided = {(found[i] or "", answer[i]) for i, score in enumerate(scores) if score is None}
        if undecided:
            pairs = sorted(undecided)
            results = dict(zip(pairs, compare(pairs, self.timeout), strict=True))
            for i, score in enumerate(scores):
                if score is None:
                    scores[i] = results[found[i] or "", answer[i]]
        return scores

    def _reason(self, score: float | None, found: str | None, answer: str) -> str:
        if score is None:
            return f"not compared with {answer!r} within {self.timeout:g} s"
        if found is None:
            return "no answer found"
        return f"equals {answer!r}" if score else f"differs from {answer!r}"


def extract_answer(text: str) -> str | None:
    """The final answer in a completion, or None; see the module's docstring for the order."""
    rest = after_thinking(text)
    if rest is None:
        return None
    text = rest
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0].strip() or None
    if (tag := tagged(text)) is not None:
        return _inner(tag)
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
    """The exact value of a plain number (`1,234`, `$18.00`, `18.`, `-3/4`, `\\frac{1}{2}`, `2\\frac{1}{2}`,
    `50%`, `3 \\text{ cm}`, `2 million`), else None.

    A percentage keeps its figure: 50% is 50, as answer keys write it.
    """
    return _number(_tidy(text))


def _number(tidied: str) -> Fraction | None:
    match = _NUMERIC.fullmatch(tidied)
    if match is None:
        return None
    sign, top, bottom, whole, numerator, denominator = match.groups()
    if top is None:
        top, bottom = numerator, denominator
    divisor = Fraction(bottom or 1)
    if not divisor:
        return None
    value = Fraction(whole or 0) + Fraction(top) / divisor
    return -value if sign == "-" else value


def _quick(found: str | None, answer: str) -> float | None:
    """Decide without symbols where possible; None leaves the pair to math-verify."""
    if found is None or not answer.strip():
        return 0.0
    left, right = _tidy(found), _tidy(answer)
    if left == right or _tidy(found, thousands=False) == _tidy(answer, thousands=False):
        return 1.0
    if (_NAMED.match(left) is None) != (_NAMED.match(right) is None):
        left, right = _NAMED.sub("", left, count=1), _NAMED.sub("", right, count=1)
        if left == right:
            return 1.0
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        percents = _is_percentage(found) - _is_percentage(answer)
        return float(a == b or (percents == 1 and a == 100 * b) or (percents == -1 and b == 100 * a))
    if max(len(found), len(answer)) > _LONGEST:
        return 0.0
    if left.isalpha() and right.isalpha() and min(len(left), len(right)) > 2:
        return float(left.casefold() == right.casefold())
    if (a is None) != (b is None) and _never_a_number(right if b is None else left):
        return 0.0
    x, y = closed_form(left), closed_form(right)
    return 0.0 if x is not None and y is not None and surely_differ(x, y) else None


def _never_a_number(tidied: str) -> bool:
    """Whether a text that is no plain number isn't equal to one: a list, a matrix, a word, a term with a variable."""
    if "," in tidied or "\\begin" in tidied or (tidied.isalpha() and len(tidied) > 2):
        return True
    if re.search(r"\\(?:int|sum|prod|lim)", tidied):  # its variable is bound
        return False
    before, equals, _ = re.sub(r"\\[a-zA-Z]+", "", tidied).partition("=")
    if not re.search(r"[a-df-hj-zA-Z]", before):
        return False
    if equals:  # an equation in unknowns, but not a value with its name
        return re.search(r"[-+*/^]|\d[a-zA-Z]", before) is not None
    return not _MAYBE_UNIT.fullmatch(tidied)


def _is_percentage(text: str) -> bool:
    return "%" in text or "percent" in text.lower()


def _tidy(text: str, thousands: bool = True) -> str:
    """The text without accidents of spelling; `thousands` takes `1,234` for a number and not for a list."""
    text = text.strip().strip("$").removeprefix("\\(").removesuffix("\\)").removesuffix("\\").strip()
    text = _TEXT_UNIT.sub(_kept_scale, text.rstrip("."))
    text = _TEXT.sub(r"\1", text).replace("−", "-").replace("{,}", ",")
    text = _DROPPED.sub(lambda match: " " if match[0] == "\\ " else "", text)
    text = _TEX_FRACTION.sub(_spelled_out, text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if thousands and _one_number(text) else text
    text = _AND.sub(",", text) if not _WORDS.search(_AND.sub(",", text)) else text
    text = text.strip().rstrip(".").strip()
    if (scale := _SCALE.search(text)) and (number := _number(text[: scale.start()])) is not None:
        return str(number * _SCALES[scale[1].lower()])
    if _number(re.sub(r"\s+", "", bare := _UNITS.sub("", text))) is not None:
        text = bare
    text = re.sub(r"\s+", "", text)
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)", text) else text


def _kept_scale(unit: re.Match[str]) -> str:
    return f" {scale[0]}" if (scale := _SCALE_WORD.search(unit[1])) else ""


def _one_number(text: str) -> bool:
    """Whether commas between digits can be those of thousands: not within brackets."""
    return not re.search(r"[(\[{]\s*-?\d[^()\[\]{}]*,", text)


def _spelled_out(match: re.Match[str]) -> str:
    top = match[1] if match[1].startswith("{") else f"{{{match[1]}}}"
    return f"\\frac{top}" + (f"{{{match[3]}}}" if match[3] else "")


def _inner(text: str) -> str | None:
    """The answer within a short statement: the whole when it is a number, else its last number where there are
    words besides, else the whole."""
    text = text.strip().strip("*_`").strip()
    if as_number(text) is not None or not (numbers := NUMBER.findall(text)):
        return text or None
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+", "", text))
    return numbers[-1].strip() if words else text
