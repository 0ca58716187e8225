"""Values of closed forms such as `\\frac{3\\sqrt{2}}{4} - 2i`, to float64: enough to see that two differ.

Only what is certain is read: numbers, + - * / ^, brackets, `\\frac`, `\\sqrt`, `\\pi` and i; products without a
sign too, but no mixed numbers.
"""

from __future__ import annotations

import cmath
import math
import re

_TOKEN = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)|(?P<command>\\[a-zA-Z]+)|(?P<sign>\S)")
_TIMES, _OVER = {"*", "×", "·", "\\cdot", "\\times"}, {"/", "÷", "\\div"}
_BRACKETS = {"(": ")", "{": "}"}
_FRACTIONS = {"\\frac", "\\dfrac", "\\tfrac"}
_LONGEST = 200
"""Characters beyond which nothing is read."""


def closed_form(text: str) -> complex | None:
    """The value of an expression without variables, None where it can't be read or has none."""
    if len(text) > _LONGEST:
        return None
    reader = _Reader([match[0] for match in _TOKEN.finditer(text)])
    try:
        value = reader.sum()
    except (ValueError, ArithmeticError):
        return None
    return value if reader.next is None and cmath.isfinite(value) else None


def surely_differ(a: complex, b: complex) -> bool:
    """Whether two values are further apart than math-verify's rounding to six places could bridge."""
    return abs(a - b) > 1e-5 + 1e-9 * max(abs(a), abs(b))


class _Reader:
    """Recursive descent; raises ValueError at what it can't read."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place = tokens, 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self) -> str:
        if (token := self.next) is None:
            raise ValueError("nothing left")
        self.place += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise ValueError(f"expected {token}")

    def sum(self) -> complex:
        value = self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> complex:
        value = self.factor()
        while (token := self.next) is not None:
            if token in _TIMES or token in _OVER:
                self.take()
                value = value * self.factor() if token in _TIMES else value / self.factor()
            elif token in ("(", "\\sqrt", "\\pi", "π", "i"):
                value *= self.factor()
            else:
                break
        return value

    def factor(self) -> complex:
        if self.next in ("+", "-"):
            return -self.factor() if self.take() == "-" else self.factor()
        value = self.atom()
        if self.next == "^":
            self.take()
            value = complex(value) ** self.argument()
        return value

    def argument(self) -> complex:
        """What follows `\\frac`, `\\sqrt` or ^: a group, or a single digit, as TeX has it."""
        token = self.next
        if token in ("{", "(") or token in ("\\pi", "π"):
            return self.atom()
        if token is not None and token.isdigit():
            self.tokens[self.place : self.place + 1] = [token[0], *([token[1:]] if token[1:] else [])]
            self.place += 1
            return float(token[0])
        raise ValueError(f"no argument: {token}")

    def atom(self) -> complex:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            if self.next in _FRACTIONS or (self.next or "")[:1].isdigit():
                raise ValueError("a mixed number, or two numbers")
            return float(token)
        if token in _BRACKETS:
            value = self.sum()
            self.expect(_BRACKETS[token])
            return value
        if token in _FRACTIONS:
            return self.argument() / self.argument()
        if token == "\\sqrt":
            degree = 2.0
            if self.next == "[":
                self.take()
                degree = self.sum().real
                self.expect("]")
            value = self.argument()
            if value.imag == 0 and value.real < 0 and degree % 2 == 1:
                return -((-value.real) ** (1 / degree))
            return complex(value) ** (1 / degree)
        if token in ("\\pi", "π"):
            return math.pi
        if token == "i":
            return 1j
        raise ValueError(f"unknown: {token}")
