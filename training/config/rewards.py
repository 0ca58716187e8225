"""How completions are graded: a section for every reward that has settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from training.config.base import Count, PositiveReal, Real, Section
from training.languages import SCRIPTS


class MathRewardConfig(Section):
    """Settings of the `math` reward."""

    timeout: PositiveReal = 5.0
    """Seconds one symbolic comparison may take before it is given up and counted (score: none)."""


class ReasoningGymRewardConfig(Section):
    """Settings of the `reasoning_gym` reward."""

    timeout: PositiveReal = 5.0
    """Seconds that a task's scorer may take for one completion before it is given up and counted (score: none)."""


class FormatRewardConfig(Section):
    """Settings of the `format` reward."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
    """Regular expression that the whole completion must match (`.` matches line ends too)."""


class OverlongRewardConfig(Section):
    """Settings of the `overlong` reward (DAPO, arXiv:2503.14476 eq. 13)."""

    max_length: Count = 64
    """Tokens from which on a completion scores -1."""
    buffer: Count = 16
    """Tokens before max_length over which the score falls from 0 to -1."""


class RepetitionRewardConfig(Section):
    """Settings of the `repetition` reward (arXiv:2502.03373 appendix C.2)."""

    ngram_size: Count = 3
    """Words in an n-gram."""
    max_penalty: Annotated[Real, Field(le=0)] = -1.0
    """Score that a completion approaches whose n-grams are all repeats; at most 0."""


class LanguageRewardConfig(Section):
    """Settings of the `language` reward (DeepSeek-R1, arXiv:2501.12948 §2.3.2)."""

    target: str = "en"
    """ISO 639-1 code of the language in which completions shall be written; languages of one script count as one."""

    @model_validator(mode="after")
    def _is_known(self) -> LanguageRewardConfig:
        if self.target not in SCRIPTS:
            raise ValueError(f"target {self.target!r}: unknown; accepted: {', '.join(sorted(SCRIPTS))}")
        return self


class JudgeRewardConfig(Section):
    """Settings of the `judge` reward."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """OpenAI-compatible endpoint, without `/chat/completions`."""
    model: str = "judge"
    """Name by which the endpoint knows the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""
    rubric: str = "Grade the answer to the question.\n\n<question>\n{prompt}\n</question>\n\n<answer>\n{completion}\n</answer>"
    """What the judge is told; `{prompt}`, `{completion}` and `{answer}` (the reference) stand for the row's texts."""
    minimum: Real = 0.0
    """Score that counts as 0."""
    maximum: Real = 10.0
    """Score that counts as 1."""
    temperature: Annotated[Real, Field(ge=0)] = 0.0
    """Temperature at which the judge writes."""
    max_tokens: Count = 512
    """Tokens that the judge may write."""
    timeout: PositiveReal = 60.0
    """Seconds one request may take."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Times a request that failed for a passing reason is sent again."""
    backoff: Annotated[Real, Field(ge=0)] = 1.0
    """Seconds before the first retry at most; doubled before each further one, up to a minute."""
    concurrency: Count = 8
    """Requests under way at the same time."""
    requests_per_minute: PositiveReal | None = None
    """Requests started per minute at most; null sets no limit."""
    cache: str | None = ".gradeline/cache/judge.sqlite"
    """File (from the tree's root) that keeps scores by content; null keeps them for the process alone."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> JudgeRewardConfig:
        if "{completion}" not in self.rubric:
            raise ValueError(f"rubric {self.rubric!r} must contain {{completion}}")
        if self.minimum >= self.maximum:
            raise ValueError(f"minimum {self.minimum} must be less than maximum {self.maximum}")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.base_url):
            raise ValueError(
                f"base_url {self.base_url!r} is no address; expected http://HOST/v1 or https://HOST/v1"
            )
        return self


class StepsConfig(Section):
    """What a step of a completion is, for process supervision."""

    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text that ends a step and belongs to it; the last step ends with the completion."""


class CodeRewardConfig(Section):
    """Settings of the `code` reward."""

    timeout: PositiveReal = 10.0
    """Seconds, of the clock and of CPU time, that a program may take for all its assertions, or for one case of input and output."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory that a program may take, in MiB of address space."""
    partial: bool = False
    """Score the share of the tests that pass, instead of 1 where all do and else 0."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Programs run at once; 0 means one more than there are cores."""
    unsafe: bool = False
    """Where no sandbox can be had, run programs without one, with your rights; recorded with the run. False refuses."""


class RewardsConfig(Section):
    """Rules that grade completions; RL adds them up, evaluation uses the grader."""

    grader: str = "math"
    """Reward that decides whether an answer is right: used by validate and evaluate, 1.0 means right."""
    math: MathRewardConfig = MathRewardConfig()
    """How `math` compares answers."""
    reasoning_gym: ReasoningGymRewardConfig = ReasoningGymRewardConfig()
    """How `reasoning_gym` asks a task's own scorer."""
    format: FormatRewardConfig = FormatRewardConfig()
    """What `format` asks for."""
    code: CodeRewardConfig = CodeRewardConfig()
    """How `code` runs programs against their tests."""
    overlong: OverlongRewardConfig = OverlongRewardConfig()
    """From which length on `overlong` punishes."""
    repetition: RepetitionRewardConfig = RepetitionRewardConfig()
    """What `repetition` punishes."""
    language: LanguageRewardConfig = LanguageRewardConfig()
    """Which language `language` asks for."""
    judge: JudgeRewardConfig = JudgeRewardConfig()
    """Which model `judge` asks, and what."""
    steps: StepsConfig = StepsConfig()
    """How completions are divided where rewards are given for steps (`rl.supervision: process`)."""
