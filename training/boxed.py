"""The answer in a LaTeX box, which data sets end their solutions with and models their completions."""

from __future__ import annotations

import re


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{}` (or `\\fbox{}`, or `\\boxed 2`) holds; None where there is none or it is empty."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("x")[2] if text.startswith("\\fbox", start) else text[start + 6 :]
    if not rest.startswith("{"):
        return found[1] if (found := re.match(r"\s+([^\s$.,\\]+)", rest)) else None
    depth = 0
    for position, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[1:position].strip() or None
    return None
