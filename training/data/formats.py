"""What rows of a source hold and become, by format: parts, the columns that hold them, licence, where the set lies.

docs/data.md shows a row of each and the example that is made of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from training.boxed import last_boxed
from training.config import SourceConfig
from training.data import code
from training.data.chats import Message, last_turn, read_messages
from training.data.files import Column, cell
from training.errors import BadInput


class Example(NamedTuple):
    """One question with what is known of it; None stands for what a row lacks.

    `solution` is the worked one, or the answer where there is none; `answer` is what the grader needs: a text, or
    JSON for those that need more. `context` are the messages before the question.
    """

    question: str
    solution: str | None
    answer: str | None
    level: str | None = None
    subject: str | None = None
    context: tuple[Message, ...] = ()


class Row:
    """A record's parts, as a source names them."""

    def __init__(self, record: dict[str, Any], columns: Mapping[str, Column], place: str) -> None:
        self.record, self.columns, self.place = record, columns, place

    def __contains__(self, part: str) -> bool:
        """Whether the record has the part and it isn't null."""
        return part in self.columns and cell(self.record, self.columns[part], self.place) is not None

    def where(self, part: str) -> str:
        """Where a part stands, for errors."""
        column = self.columns[part]
        return f"{self.place}: column {column.within(self.record) or column.names[0]!r}"

    def __getitem__(self, part: str) -> Any:
        return cell(self.record, self.columns[part], self.place)

    def text(self, part: str, empty: bool = False) -> str:
        """The text in a cell, without space at its ends; numbers as they are written (18.0 is 18)."""
        value, place = self[part], self.where(part)
        if isinstance(value, str):
            text = value.strip()
            if not text and not empty:
                raise BadInput(f"{place} is empty; every row needs a text or a number")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise BadInput(
                    f"{place} holds {value[error.start]!r}, half of a surrogate pair, which is no character"
                ) from None
            return text
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise BadInput(f"{place} is null; every row needs a text or a number")
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return str(int(value))
        if isinstance(value, int | float | Decimal):
            return str(value)
        raise BadInput(
            f"{place} holds a {type(value).__name__}, {short(value)}; accepted: a text or a number"
        )

    def optional(self, part: str) -> str | None:
        """The text in a cell, None where there is none or it is empty."""
        return (self.text(part, empty=True) or None) if part in self else None


@dataclass(frozen=True)
class Rules:
    """Patterns of a source."""

    answer: re.Pattern[str] | None
    question_remove: re.Pattern[str] | None
    solution_remove: re.Pattern[str] | None


@dataclass(frozen=True)
class Format:
    """A kind of rows. `columns` names each part's column (the first of several that is there)."""

    columns: Mapping[str, str | tuple[str, ...]]
    make: Callable[[Row, Rules], Example]
    optional: Mapping[str, str | None] = field(default_factory=dict)
    """Parts that a row may lack, with their columns; None stands for one that only a source's settings can name."""
    license: str | None = None
    hub: tuple[str, ...] = ()
    """Where the set, or what looks like it, lies on the hub."""
    answer_pattern: str | None = None
    solution_remove: str | None = None

    def parts(self, source: SourceConfig) -> dict[str, Column]:
        """The column of each part that `source` may have; raises BadInput for a part that there is not."""
        for part in source.columns:
            if part not in self.columns and part not in self.optional:
                accepted = ", ".join([*self.columns, *self.optional])
                raise BadInput(
                    f"{source.label}: columns.{part}: format {source.format} has no such part; accepted: {accepted}"
                )
        found = {
            part: Column(names if isinstance(names, tuple) else (names,))
            for part, names in self.columns.items()
        }
        found |= {part: Column((name,), True) for part, name in self.optional.items() if name is not None}
        return found | {part: Column((name,)) for part, name in source.columns.items()}

    def rules(self, source: SourceConfig) -> Rules:
        """The source's patterns, or the format's."""

        def compiled(pattern: str | None, own: str | None = None) -> re.Pattern[str] | None:
            pattern = own if pattern is None else pattern
            return re.compile(pattern) if pattern else None

        return Rules(
            compiled(source.answer_pattern, self.answer_pattern),
            compiled(source.question_remove),
            compiled(source.solution_remove, self.solution_remove),
        )


def _plain(row: Row, rules: Rules) -> Example:
    """A question and an answer in columns; the answer is also the solution unless there is one."""
    whole = row.text("answer")
    solution = row.text("solution") if "solution" in row.columns else whole
    return _example(row, rules, solution, _extracted(rules.answer, whole, row))


def _boxed(row: Row, rules: Rules) -> Example:
    """A question with a solution that ends in a box, or with an answer besides (Hendrycks et al. 2021)."""
    solution = row.text("solution")
    answer = row.text("answer") if "answer" in row.columns else last_boxed(solution)
    if answer is None:
        raise BadInput(
            f"{row.where('solution')}: no answer in a \\boxed{{}} in {short(solution[-60:])}; name the column of the answer "
            "(columns: {answer: …}), or let such rows be left out (skip_bad_rows)"
        )
    return _example(row, rules, solution, answer)


def _example(row: Row, rules: Rules, solution: str, answer: str) -> Example:
    return Example(
        _removed(rules.question_remove, row.text("question")),
        _removed(rules.solution_remove, solution),
        answer,
        _level(row.optional("level")),
        row.optional("subject"),
    )


def _level(level: str | None) -> str | None:
    """MATH-500's `3` is MATH's `Level 3`."""
    return f"Level {level}" if level is not None and level.isdigit() else level


def _extracted(pattern: re.Pattern[str] | None, text: str, row: Row) -> str:
    if pattern is None:
        return text
    match = pattern.search(text)
    answer = (match[1] or "").strip() if match else ""
    if not answer:
        raise BadInput(
            f"{row.place}: answer_pattern {pattern.pattern!r} finds no answer in {row.where('answer').rpartition(': ')[2]}, {short(text)}"
        )
    return answer


def _removed(pattern: re.Pattern[str] | None, text: str) -> str:
    return text if pattern is None else pattern.sub("", text).strip()


def _program(make: Callable[..., tuple[str, str, dict[str, Any]]]) -> Callable[[Row, Rules], Example]:
    """A row of a data set of programming problems (`training.data.code`)."""

    def example(row: Row, rules: Rules) -> Example:
        for part in row.columns:
            texts = row[part] if isinstance(row[part], list) else [row[part]]
            if not all(isinstance(text, str) for text in texts):
                raise BadInput(
                    f"{row.where(part)} holds {short(row[part])}; accepted: a text or a list of texts"
                )
        try:
            question, solution, tests = make(**{part: row[part] for part in row.columns})
        except (AttributeError, IndexError, SyntaxError, TypeError) as error:
            raise BadInput(f"{row.place}: not such a row as the format says: {error}") from None
        return Example(question, solution, json.dumps(tests))

    return example


def _countdown(row: Row, rules: Rules) -> Example:
    """Numbers and a target (TinyZero's wording); the answer is both as JSON, for reward `countdown`."""
    numbers, target = row["numbers"], row["target"]
    if isinstance(numbers, str):  # CSV has no lists
        try:
            numbers = json.loads(numbers)
        except ValueError:
            numbers = None
    if isinstance(target, str) and re.fullmatch(r"-?\d+", target.strip()):
        target = int(target)
    whole = isinstance(numbers, list) and numbers and all(type(n) is int and n >= 0 for n in numbers)
    if not whole:
        raise BadInput(
            f"{row.where('numbers')} holds {short(row['numbers'])}; accepted: a list of whole numbers"
        )
    if type(target) is not int:
        raise BadInput(f"{row.where('target')} holds {short(row['target'])}; accepted: a whole number")
    question = (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number must be used exactly once."
    )
    solution = row.optional("solution")
    solution = None if solution is None else _removed(rules.solution_remove, solution)
    return Example(question, solution, json.dumps({"numbers": numbers, "target": target}))


def _reasoning_gym(row: Row, rules: Rules) -> Example:
    """A task's problem; the answer is what reward `reasoning_gym` needs to make it again."""
    return Example(row.text("question"), row.optional("answer"), row.text("problem"), None, row.text("task"))


def _messages(row: Row, rules: Rules) -> Example:
    """A conversation: what the assistant said last is the solution, all before it the prompt."""
    messages = read_messages(row["messages"], row.where("messages"))
    if messages[0]["role"] != "system" and (system := row.optional("system")):
        messages.insert(0, {"role": "system", "content": system})
    context, question, solution = last_turn(messages, row.where("messages"))
    return _chat(row, rules, question, solution, context)


def _alpaca(row: Row, rules: Rules) -> Example:
    """An instruction, perhaps an input after it, and the output; `history` are earlier pairs."""
    question = row.text("instruction")
    if text := row.optional("input"):
        question = f"{question}\n{text}"
    context: list[Message] = []
    if system := row.optional("system"):
        context.append({"role": "system", "content": system})
    history = row["history"] if "history" in row.columns else None
    for pair in history if isinstance(history, list) else [] if history is None else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadInput(
                f"{row.where('history')} holds {short(pair)}; accepted: pairs [instruction, output]"
            )
        for role, said in zip(("user", "assistant"), pair, strict=True):
            context += read_messages(said, row.where("history"), role)
    return _chat(row, rules, question, row.text("output"), tuple(context))


def _chat(row: Row, rules: Rules, question: str, solution: str, context: tuple[Message, ...]) -> Example:
    return Example(
        _removed(rules.question_remove, question),
        _removed(rules.solution_remove, solution),
        _extracted(rules.answer, row.text("answer"), row) if "answer" in row else None,
        row.optional("level"),
        row.optional("subject"),
        context,
    )


_KINDS = {"level": None, "subject": None}
_MAA = "problems by the Mathematical Association of America, who state no licence"
FORMATS: dict[str, Format] = {
    "columns": Format(
        {"question": "question", "answer": "answer"}, _plain, {"solution": None, **_KINDS}
    ),
    "gsm8k": Format(
        {"question": "question", "answer": "answer"},
        _plain,
        {"solution": None, **_KINDS},
        license="MIT",
        hub=("openai/gsm8k",),
        answer_pattern=r"####\s*(.+)",
        solution_remove="<<[^>]*>>",
    ),
    "math": Format(
        {"question": "problem", "solution": "solution"},
        _boxed,
        {"answer": None, "level": "level", "subject": "type"},
        license="MIT",
        hub=("EleutherAI/hendrycks_math", "DigitalLearningGmbH/MATH-lighteval"),
    ),
    "math500": Format(
        {"question": "problem", "solution": "solution", "answer": "answer"},
        _boxed,
        {"level": "level", "subject": "subject"},
        license="MIT",
        hub=("HuggingFaceH4/MATH-500",),
    ),
    "aime": Format(
        {"question": ("problem", "question"), "answer": "answer"},
        _plain,
        {"solution": None, **_KINDS},
        license=_MAA,
        hub=("HuggingFaceH4/aime_2024", "math-ai/aime25"),
    ),
    "amc": Format(
        {"question": ("problem", "question"), "answer": "answer"},
        _plain,
        {"solution": None, **_KINDS},
        license=_MAA,
        hub=("math-ai/amc23",),
    ),
    "humaneval": Format(
        {name: name for name in ("prompt", "canonical_solution", "test", "entry_point")},
        _program(code.humaneval),
        license="MIT",
        hub=("openai/openai_humaneval",),
    ),
    "mbpp": Format(
        {"prompt": ("prompt", "text"), "code": "code", "test_imports": "test_imports", "test_list": "test_list"},
        _program(code.mbpp),
        license="CC-BY-4.0",
        hub=("google-research-datasets/mbpp",),
    ),
    "countdown": Format(
        {"numbers": ("nums", "numbers"), "target": "target"},
        _countdown,
        {"solution": None},
        license="made by rule; the copies on the hub state their own",
        hub=("Jiayi-Pan/Countdown-Tasks-3to4",),
    ),
    "reasoning_gym": Format(
        {name: name for name in ("question", "answer", "problem", "task")},
        _reasoning_gym,
        license="Apache-2.0",
    ),
    "openai": Format({"messages": "messages"}, _messages, {"system": None, "answer": None, **_KINDS}),
    "sharegpt": Format(
        {"messages": "conversations"}, _messages, {"system": "system", "answer": None, **_KINDS}
    ),
    "alpaca": Format(
        {"instruction": "instruction", "output": "output"},
        _alpaca,
        {"input": "input", "system": "system", "history": "history", "answer": None, **_KINDS},
    ),
}  # fmt: skip


def license_of(source: SourceConfig) -> str | None:
    """The licence that a source states, or its data set's."""
    return source.license or FORMATS[source.format].license


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
