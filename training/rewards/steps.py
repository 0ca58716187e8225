"""The steps of a completion: its texts between separators, and the token at which each ends.

A separator belongs to the step that it ends, and the last step ends at the completion's last token (the end
token, where one was drawn). A step without content, nothing but white space and separators, is part of the step
before it; at the very beginning, of the one after it. So the texts of the steps, put together, are the
completion's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step's text, and the index of its last token in the completion."""

    text: str
    end: int


def split_text(text: str, separator: str) -> list[str]:
    """The texts of the steps, at least one; together they are `text`."""
    *ended, rest = text.split(separator)
    steps = [""]
    for piece in [*(part + separator for part in ended), rest]:
        if all(part.replace(separator, "").strip() for part in (steps[-1], piece)):
            steps.append(piece)
        else:
            steps[-1] += piece
    return steps


def split_completion(ids: Sequence[int], decode: Callable[[list[int]], str], separator: str) -> list[Step]:
    """The steps of a completion of at least one token; ends increase strictly, the last one is `len(ids) - 1`.

    A step ends at the first token with which the decoded ids begin with all of its text and the texts before
    it: of a character that is spread over several tokens, the last of them. A token that holds the end of one
    step and the beginning of the next is the former's; steps that end within one token are one step.
    """
    text, last = decode(list(ids)), len(ids) - 1
    steps: list[Step] = []
    done = ""
    for part in split_text(text, separator):
        done += part
        first = steps[-1].end if steps else 0
        if done == text:
            end = last
        else:
            end = bisect_left(
                range(last), True, lo=first, key=lambda i: decode(list(ids[: i + 1])).startswith(done)
            )
        if steps and end == first:
            part = steps.pop().text + part
        steps.append(Step(part, end))
    return steps
