"""What the gate asks of the data: each check has a threshold and the share of the rows that may fail it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from training.config.base import Count, Fraction, PositiveReal, Real, Section
from training.config.data import SourceConfig
from training.languages import SCRIPTS

Similarity = Annotated[Real, Field(gt=0, le=1)]


class NearDuplicatesConfig(Section):
    """Train questions that say what another question says (training/data/hygiene/twins.py)."""

    threshold: Similarity = 0.9
    """Jaccard similarity of word trigrams from which on questions with the same figures are near-duplicates."""
    max_share: Fraction = 0.01
    """Share of the train split that may be near-duplicates of held-out or of earlier train questions."""


class ContaminationConfig(Section):
    """Train questions that hold questions of an evaluation set (training/data/hygiene/overlap.py)."""

    against: list[SourceConfig] = []
    """Further evaluation sets, read as sources are; validation and test splits are always compared."""
    ngram: Count = 13
    """Words in an n-gram; shorter questions are compared whole."""
    overlap: Similarity = 0.8
    """Part of an evaluation question's words that n-grams shared with one train question must cover."""
    max_share: Fraction = 0.02
    """Share of the train split, and of each evaluation set, that may be found in the other."""


class LeaksConfig(Section):
    """Questions that give their answer away (training.data.hygiene.checks.leaked)."""

    max_share: Fraction = 0.01
    """Share of a split's questions that may."""


class LengthsConfig(Section):
    """Prompts and completions of a length unlike the others of their source."""

    max_deviation: PositiveReal = 5.0
    """Robust standard deviations of log tokens from the source's median, beyond which a length is an outlier."""
    max_share: Fraction = 0.05
    """Share of a split's rows that may be outliers."""


class LanguageConfig(Section):
    """Questions in another script than the data's languages are written in."""

    languages: list[str] = []
    """ISO 639-1 codes of the languages expected; empty means the script that most of train is written in."""
    min_letters: Fraction = 0.5
    """Share of the letters of a question's words that must be of these languages' scripts."""
    max_share: Fraction = 0.05
    """Share of a split's questions that may have fewer."""

    @model_validator(mode="after")
    def _are_known(self) -> LanguageConfig:
        for code in self.languages:
            if code not in SCRIPTS:
                raise ValueError(f"languages {code!r}: unknown; accepted: {', '.join(sorted(SCRIPTS))}")
        return self


class UnicodeConfig(Section):
    """Characters that a reader doesn't see as what they are (training.data.hygiene.checks.unsafe_characters)."""

    max_share: Fraction = 0.01
    """Share of a split's rows that may hold one in prompt, completion or answer."""
