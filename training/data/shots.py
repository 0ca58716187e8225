"""Few-shot examples: solved questions of the train split, shown before a question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from training.config import PromptConfig
from training.data.chats import Message
from training.data.splits import Row
from training.data.text import fill_row
from training.errors import BadInput

BETWEEN = "\n\n"
"""What stands between a solved question and the next where there is no chat template."""


@dataclass(frozen=True)
class Shots:
    """The first rows of the train split, in the order of their keys, that have a completion and no conversation.

    One more than are shown, so that a row that is among them is shown the next one instead of itself.
    """

    prompt: PromptConfig
    rows: list[tuple[str, str, str]]
    """(question, user message, completion)."""

    @staticmethod
    def of(train: Iterable[tuple[str, Row]], prompt: PromptConfig) -> Shots:
        """Raises BadInput when the train split has too few such rows."""
        if not prompt.few_shot:
            return Shots(prompt, [])
        usable = (
            (row.question, *texts)
            for _, row in train
            if not row.context and (texts := fill_row(row, prompt))[1] is not None
        )
        rows = list(islice(usable, prompt.few_shot + 1))
        if len(rows) <= prompt.few_shot:
            raise BadInput(
                f"prompt.few_shot = {prompt.few_shot}: the train split has only {len(rows)} rows with a completion that can "
                "be shown, and one more than are shown is needed (no row is shown itself)"
            )
        return Shots(prompt, rows)  # type: ignore[arg-type]

    def shown(self, row: Row, user: str) -> tuple[list[Message], str]:
        """The messages before a row's user message, and that message.

        Shots are earlier turns of the conversation; without a chat template they stand in the message itself. A
        row that has a conversation of its own is shown that alone.
        """
        if row.context or not self.rows:
            return list(row.context), user
        others = [(q, a) for question, q, a in self.rows if question != row.question]
        shots = others[: self.prompt.few_shot]
        if self.prompt.chat_template == "none":
            return [], "".join(f"{q}{a}{BETWEEN}" for q, a in shots) + user
        return [
            {"role": role, "content": text}
            for shot in shots
            for role, text in zip(("user", "assistant"), shot, strict=True)
        ], user
