"""Templates of the recipe, filled with a row's texts."""

from __future__ import annotations

import re

from training.config import PromptConfig
from training.data.splits import Row


def fill(template: str, **fields: str) -> str:
    """Put the fields' texts where `{name}` stands, all at once: braces in the texts, or other braces, stay as they are."""
    return re.sub(
        r"\{(" + "|".join(map(re.escape, fields)) + r")\}", lambda match: fields[match[1]], template
    )


def unfill(template: str, text: str) -> str:
    """The question in a prompt that `fill` made of a template; the text itself where that can't be told."""
    before, _, after = template.partition("{question}")
    if "{question}" in after or not text.startswith(before) or not text.endswith(after):
        return text
    return text[len(before) : len(text) - len(after)]


def fill_row(row: Row, prompt: PromptConfig) -> tuple[str, str | None]:
    """The user message and the reference completion of a row, None where the row lacks what the template names."""
    fields = {"question": row.question, "solution": row.solution, "answer": row.answer}
    known = {name: text for name, text in fields.items() if text is not None}
    lacks = any(f"{{{name}}}" in prompt.completion for name in fields.keys() - known.keys())
    completion = None if lacks else fill(prompt.completion, **known)
    return fill(prompt.template, question=row.question), completion
