"""Where questions come from, and how they become text."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from training.config.base import Count, Fraction, PositiveReal, Section

SourceFormat = Literal[
    "columns", "gsm8k", "math", "math500", "aime", "amc", "humaneval", "mbpp", "countdown", "reasoning_gym",
    "openai", "sharegpt", "alpaca"
]  # fmt: skip
"""What a source's rows hold; `training.data.formats` says what becomes of each."""


class PromptConfig(Section):
    """How a question becomes the text that the model reads; the same in SFT, RL and evaluation."""

    template: str = "{question}"
    """User message; `{question}` stands for the row's question."""
    system: str | None = None
    """System message; null leaves the choice to the chat template (some add their own), "" sends none."""
    chat_template: str | None = None
    """Jinja chat template instead of the tokenizer's own; `none` feeds the user message as plain text."""
    completion: str = "{solution}"
    """Reference completion for SFT; `{question}`, `{solution}` and `{answer}` stand for the row's fields."""
    few_shot: Annotated[int, Field(ge=0)] = 0
    """Solved questions of the train split, never the row's own, that are shown before each question."""

    @model_validator(mode="after")
    def _needs_question(self) -> PromptConfig:
        if "{question}" not in self.template:
            raise ValueError(f"template {self.template!r} must contain {{question}}")
        return self


class SourceConfig(Section):
    """One source of questions with known answers."""

    name: str | None = None
    """Name recorded in the `source` column; null means the kind and path or task."""
    kind: Literal["reasoning_gym", "file", "hub"]
    """`reasoning_gym` makes problems by rule, `file` reads JSONL, parquet or CSV, `hub` reads a hub data set."""
    task: str | None = None
    """reasoning_gym: name of the task, for example chain_sum."""
    size: Count | None = None
    """reasoning_gym: number of problems to make; file and hub: take at most this many rows."""
    settings: dict[str, Any] = {}
    """reasoning_gym: settings of the task, for example {min_terms: 2}."""
    seed: int | None = None
    """reasoning_gym: seed of the generator; null means the run's seed."""
    path: str | None = None
    """file: path (from the tree's root), glob or URL of .jsonl, .json, .csv (each also with .gz) or .parquet; hub: the id owner/name."""
    revision: str | None = None
    """hub: commit hash or tag; required, so that a rerun reads the same rows."""
    config: str | None = None
    """hub: name of the data set's configuration."""
    hub_split: str = "train"
    """hub: which of the data set's own splits to read."""
    split: Literal["auto", "train", "validation", "test"] = "auto"
    """Where the rows go; auto divides them by a hash of the question."""
    overlap: Literal["refuse", "leave_out"] = "refuse"
    """What of a question that another source puts into another split: end the stage, or leave it out of this source."""
    format: SourceFormat = "columns"
    """What rows hold and become (docs/data.md); `columns` has a question, an answer and perhaps a solution."""
    columns: dict[str, str] = {}
    """Which column holds what where its name isn't the format's: {question: problem, answer: final}; dots lead into nested cells."""
    where: dict[str, Annotated[list[str | int], Field(min_length=1)]] = {}
    """Only rows whose columns have one of these values: {level: [Level 1, Level 2], type: [Algebra]}."""
    answer_pattern: str | None = None
    """Regular expression whose first group is the answer inside the answer's column; null means the format's own."""
    question_remove: str | None = None
    """Regular expression removed from the question, for example instructions that the recipe's template gives itself."""
    solution_remove: str | None = None
    """Regular expression removed from the solution; null means the format's own, "" keeps all."""
    skip_bad_rows: Annotated[int, Field(ge=0)] = 0
    """Rows that can't be used (no answer, an empty turn) which may be left out, counted and shown; one more ends the stage."""
    weight: PositiveReal | None = None
    """Share of the train split, in proportion to the other sources' weights; null on all of them takes every row once."""
    sha256: str | None = None
    """file: hex digest the file must have (of a glob, that of the list `sha256sum` prints); null takes any. A changed file alone starts no rerun, a changed digest does."""
    license: str | None = None
    """Licence of the data, recorded in the manifest; null means the format's, where that is one data set's."""

    @model_validator(mode="after")
    def _complete(self) -> SourceConfig:
        if self.kind == "reasoning_gym" and (self.task is None or self.size is None):
            raise ValueError("a reasoning_gym source needs task and size")
        if self.kind in ("file", "hub") and self.path is None:
            raise ValueError(f"a {self.kind} source needs path")
        if self.kind == "hub" and self.revision is None:
            raise ValueError(
                f"hub source {self.path!r} needs revision (a commit hash or tag), so that reruns read the same rows"
            )
        if self.format == "reasoning_gym" and self.kind != "reasoning_gym":
            raise ValueError(
                f"format reasoning_gym is for kind reasoning_gym, whose tasks grade; this source is of kind {self.kind}"
            )
        return self

    @model_validator(mode="after")
    def _patterns(self) -> SourceConfig:
        for key in ("answer_pattern", "question_remove", "solution_remove"):
            pattern = getattr(self, key)
            try:
                groups = re.compile(pattern or "").groups
            except re.error as error:
                raise ValueError(f"{key} {pattern!r} is not a regular expression: {error}") from None
            if key == "answer_pattern" and pattern is not None and not groups:
                raise ValueError(
                    f"answer_pattern {pattern!r} has no group; put the answer's part in parentheses"
                )
        return self

    @property
    def label(self) -> str:
        """Name recorded in the `source` column."""
        return self.name or f"{self.kind}:{self.task or self.path}"


class SplitsConfig(Section):
    """Shares of the questions that `split: auto` sends to validation and test; the rest is train."""

    validation: Fraction = 0.1
    """Share of the questions kept for validation."""
    test: Fraction = 0.2
    """Share of the questions held out for evaluation."""

    @model_validator(mode="after")
    def _leaves_train(self) -> SplitsConfig:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation {self.validation} + test {self.test} leave nothing to train on; keep the sum below 1"
            )
        return self
