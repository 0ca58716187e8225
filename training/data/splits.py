"""Which split a question belongs to: duplicates removed, no question in two splits, no row moved by another.

A question's key is a hash of its text; the key decides the split, the order within it and the row's id. So
the first n rows of a split are a fair sample of it, and adding or removing rows changes nothing for the rest.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from training.config import SourceConfig, SplitsConfig
from training.data.chats import Message
from training.data.formats import Example
from training.errors import BadInput

SPLITS = ("train", "validation", "test")


class Row(NamedTuple):
    """An example with its place; `source` counts the sources from 0."""

    split: str
    source: int
    question: str
    solution: str | None
    answer: str | None
    level: str | None = None
    subject: str | None = None
    context: tuple[Message, ...] = ()


@dataclass
class Division:
    """Distinct questions by key, and what was left out. Memory: one Row a question."""

    rows: dict[bytes, Row] = field(default_factory=dict)
    duplicates: Counter[int] = field(default_factory=Counter)
    """Rows left out because their question was there before, by source."""
    contradictions: Counter[int] = field(default_factory=Counter)
    """Those among the duplicates that give another answer, by source."""

    def split(self, name: str) -> Iterator[tuple[str, Row]]:
        """Rows of one split as (id, row), ordered by id."""
        keys = sorted(key for key, row in self.rows.items() if row.split == name)
        return ((key.hex(), self.rows[key]) for key in keys)

    def counts(self) -> Counter[tuple[str, int]]:
        """Number of rows by (split, source)."""
        return Counter((row.split, row.source) for row in self.rows.values())


def question_key(question: str) -> bytes:
    """16 bytes that identify a question: its text with Unicode composed (NFC) and runs of white space made one space."""
    text = " ".join(unicodedata.normalize("NFC", question).split())
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def split_of(key: bytes, shares: SplitsConfig) -> str:
    """The split of a key: test at the low end of the hash's range, validation at its high end, train between.

    So another share of one held-out split never moves a row of the other.
    """
    position = int.from_bytes(key[:8], "big") / 2**64
    if position < shares.test:
        return "test"
    return "validation" if position >= 1 - shares.validation else "train"


def divide(sources: Sequence[tuple[SourceConfig, Iterable[Example]]], shares: SplitsConfig) -> Division:
    """Give every distinct question one split.

    Sources with a split of their own come first, but for those that leave overlaps out, so a question that an `auto` source repeats stays where they
    put it; otherwise the first of several equal questions is kept. Two conversations are the same question when
    all that was said before is the same too. Raises BadInput when two sources put one question into different splits,
    when an `auto` split with a share gets no row, and for rows without an answer outside of train.
    """
    division = Division()
    overlaps: list[tuple[Row, str, int]] = []
    yielding = [config.split == "auto" or config.overlap == "leave_out" for config, _ in sources]
    for index in sorted(range(len(sources)), key=lambda i: yielding[i]):
        config, examples = sources[index]
        for example in examples:
            if example.answer is None and config.split != "train":
                raise BadInput(
                    f"prepare.sources.{index} ({config.label}): the question {example.question[:80]!r} has no answer to grade, so "
                    "it can't be tested on; give the source `split: train`, or name the column of the answer "
                    "(columns: {answer: …})"
                )
            key = question_key("\n".join([*(m["content"] for m in example.context), example.question]))
            first = division.rows.get(key)
            if first is None:
                split = split_of(key, shares) if config.split == "auto" else config.split
                division.rows[key] = Row(split, index, *example)
                continue
            division.duplicates[index] += 1
            division.contradictions[index] += first.answer != example.answer
            if config.split not in ("auto", first.split) and config.overlap == "refuse":
                overlaps.append((first, config.split, index))
    _refuse_overlaps(overlaps, [config for config, _ in sources])
    _refuse_empty(division, [config for config, _ in sources], shares)
    return division


def _refuse_overlaps(overlaps: list[tuple[Row, str, int]], sources: list[SourceConfig]) -> None:
    if not overlaps:
        return
    row, split, index = overlaps[0]
    others = f" ({len(overlaps)} questions are in two splits)" if len(overlaps) > 1 else ""
    raise BadInput(
        f"the question {row.question!r} is in split {row.split} (prepare.sources.{row.source}, {sources[row.source].label}) "
        f"and in split {split} (prepare.sources.{index}, {sources[index].label}){others}; "
        "keep each question in one split, give both sources `split: auto`, or one of them `overlap: leave_out`"
    )


def _refuse_empty(division: Division, sources: list[SourceConfig], shares: SplitsConfig) -> None:
    automatic = [index for index, source in enumerate(sources) if source.split == "auto"]
    if not automatic:
        return
    counts = division.counts()
    number = sum(counts[split, index] for split in SPLITS for index in automatic)
    wanted = {
        "train": 1 - shares.validation - shares.test,
        "validation": shares.validation,
        "test": shares.test,
    }
    for split, share in wanted.items():
        if share > 0 and not any(counts[split, index] for index in range(len(sources))):
            labels = ", ".join(f"prepare.sources.{index} ({sources[index].label})" for index in automatic)
            raise BadInput(
                f"split {split} is empty: {number} distinct questions of {labels} are too few for a share of {share:.3g}; "
                f"give more rows (size), a larger prepare.splits.{split}, or a source with `split: {split}`"
                if split != "train"
                else f"split train is empty: {number} distinct questions of {labels} all went to validation and test; "
                "give more rows (size) or smaller prepare.splits"
            )
