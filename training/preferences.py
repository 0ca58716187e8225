"""Preference pairs: people's choices from a file, or graded completions of one prompt, right against wrong."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training.batches import Tree
from training.config import PreferencesConfig
from training.curriculum import SolveRate
from training.data.chats import read_dialogue, read_messages
from training.data.files import Record
from training.data.splits import question_key
from training.errors import BadInput
from training.prompts import Message, PromptRenderer
from training.randomness import derive_seed, generator
from training.recorder import Recorder
from training.rewards import RewardSum
from training.rollout.protocol import Request, RolloutEngine, Sampling

SPLITS = ("train", "validation")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("context", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("chosen", pa.string(), nullable=False),
        pa.field("rejected", pa.string(), nullable=False),
        pa.field("margin", pa.float64(), nullable=False),
    ]
)
"""Columns of data/preferences/{train,validation}.parquet (see Pair)."""


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt. All are texts before any chat template.

    `prompt` is the user's last message, `context` the messages before it; `margin` says how much better `chosen`
    is, in the rewards' unit, 0 where that isn't known.
    """

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0
    context: tuple[Message, ...] = ()

    @property
    def id(self) -> str:
        """32 hex digits that identify the texts."""
        texts = json.dumps([*self.context, self.prompt, self.chosen, self.rejected])
        return hashlib.blake2b(texts.encode(), digest_size=16).hexdigest()

    def tree(self, renderer: PromptRenderer) -> Tree:
        """The rendered prompt's ids with two branches, chosen first, each with the end token."""
        completions = [renderer.completion_ids(text) for text in (self.chosen, self.rejected)]
        return Tree(renderer.ids(self.prompt, self.context), completions)


def pair_columns(config: PreferencesConfig) -> list[str]:
    """The columns that rows of choices must have."""
    columns = [] if config.format == "hh" else [config.prompt_column]
    columns += [config.chosen_column, config.rejected_column]
    return [*columns, *([config.margin_column] if config.margin_column else [])]


def read_choices(records: Iterable[Record], config: PreferencesConfig) -> tuple[list[Pair], Counter[str]]:
    """Pairs of records in their order, and how many there were (`rows`) and were left out (`equal`: both completions
    the same; `bad_rows`, of which there may be `skip_bad_rows`).

    Prompts and completions are texts or chat messages, `{role, content}` or ShareGPT's `{from, value}`; a
    completion may be given as the whole conversation, and format hh gives both as whole dialogues. Raises BadInput
    naming the line or row, column and value.
    """
    counts: Counter[str] = Counter(rows=0, equal=0, bad_rows=0)
    pairs = []
    for place, record in records:
        counts["rows"] += 1
        try:
            pair = _pair(record, config, place)
        except BadInput as error:
            counts["bad_rows"] += 1
            if counts["bad_rows"] > config.skip_bad_rows:
                raise error
            continue
        if pair.chosen == pair.rejected:
            counts["equal"] += 1
        else:
            pairs.append(pair)
    return pairs, counts


def _pair(record: dict[str, Any], config: PreferencesConfig, place: str) -> Pair:
    columns = (config.chosen_column, config.rejected_column)
    margin = 0.0
    if config.margin_column:
        margin = _margin(record[config.margin_column], f"{place}: column {config.margin_column!r}")
    answers = [record[column] for column in columns]
    if config.format == "hh":
        answers = [read_dialogue(record[column], f"{place}: column {column!r}") for column in columns]
        before = answers[0][:-1]
        if not before:
            raise BadInput(
                f"{place}: column {columns[0]!r}: one message alone, expected a question before it"
            )
    else:
        where = f"{place}: column {config.prompt_column!r}"
        before = read_messages(record[config.prompt_column], where, "user")
    if before[-1]["role"] != "user":
        column = config.chosen_column if config.format == "hh" else config.prompt_column
        raise BadInput(
            f"{place}: column {column!r}: its last message is the {before[-1]['role']}'s, expected the user's"
        )
    chosen, rejected = (
        _completion(answer, before, f"{place}: column {column!r}")
        for column, answer in zip(columns, answers, strict=True)
    )
    return Pair(before[-1]["content"], chosen, rejected, margin, tuple(before[:-1]))


def pairs_from_rollouts(
    rows: Sequence[dict[str, Any]],
    engine: RolloutEngine,
    renderer: PromptRenderer,
    grader: RewardSum,
    config: PreferencesConfig,
    seed: int,
    recorder: Recorder,
) -> tuple[list[Pair], Counter[str], list[SolveRate]]:
    """Sample each row's prompt, grade, and pair completions of different reward, the better one chosen.

    Rows are those of a prepared split; `pair_up` says which completions become pairs. Returns the pairs, problem by
    problem, the counts of `problems`, `completions`, `truncated`, `ungraded` and `problems_with_pairs`, and each problem's
    solve rate: the share of its completions with reward 1.
    """
    sampling = Sampling(config.temperature, config.max_completion_length)
    counts: Counter[str] = Counter(truncated=0, ungraded=0, problems_with_pairs=0)
    pairs: list[Pair] = []
    rates: list[SolveRate] = []
    at_once = max(1, config.batch_size // config.num_samples)
    for first in range(0, len(rows), at_once):
        chunk = rows[first : first + at_once]
        owners = [row for row in chunk for _ in range(config.num_samples)]
        requests = [
            Request(ids, derive_seed(seed, "preferences/sample", first + i, sample))
            for i, ids in enumerate(tuple(renderer.ids(row["prompt"], _context(row))) for row in chunk)
            for sample in range(config.num_samples)
        ]
        completions = engine.generate(requests, sampling)
        texts = [renderer.decode(completion.ids) for completion in completions]
        columns = {name: [row[name] for row in owners] for name in owners[0] if name != "prompt"}
        reasons = [completion.finish_reason for completion in completions]
        prompts = [row["prompt"] for row in owners]
        rewards = grader.score(prompts, texts, finish_reason=reasons, **columns).total
        counts.update(problems=len(chunk), completions=len(completions))
        counts.update(truncated=reasons.count("length"), ungraded=rewards.count(None))
        for i, row in enumerate(chunk):
            own = slice(i * config.num_samples, (i + 1) * config.num_samples)
            rates.append(SolveRate(row["id"], rewards[own].count(1.0), config.num_samples))
            random = generator(seed, "preferences/pairs", first + i)
            most = config.max_pairs_per_problem
            made = pair_up(row["prompt"], texts[own], rewards[own], reasons[own], most, random, _context(row))
            counts["problems_with_pairs"] += bool(made)
            pairs += made
        recorder.progress(first + len(chunk), len(rows), pairs=len(pairs))
    return pairs, counts, rates


def pair_up(
    prompt: str,
    texts: Sequence[str],
    rewards: Sequence[float | None],
    finish_reasons: Sequence[str],
    most: int,
    random: np.random.Generator,
    context: Sequence[Message] = (),
) -> list[Pair]:
    """Pairs of a prompt's completions of different reward, at most `most` of them, drawn evenly.

    A pair's margin is the difference of its rewards. Completions that were cut off (`length`) or got no verdict
    (None) are not paired; equal texts count once.
    """
    graded = {
        text: reward
        for text, reward, reason in zip(texts, rewards, finish_reasons, strict=True)
        if reward is not None and reason == "stop"
    }
    pairs = [
        Pair(prompt, better, worse, graded[better] - graded[worse], tuple(context))
        for better, worse in itertools.permutations(graded, 2)
        if graded[better] > graded[worse]
    ]
    if len(pairs) <= most:
        return pairs
    return [pairs[i] for i in sorted(random.choice(len(pairs), most, replace=False))]


def divide_pairs(pairs: Iterable[Pair], validation: float) -> dict[str, list[Pair]]:
    """Distinct pairs by split, in their order; a hash of the prompt decides, so that no prompt is in both.

    The hash is another than the one that divides questions, so that every share of questions has its part in both.
    """
    found: dict[str, dict[str, Pair]] = {split: {} for split in SPLITS}
    for pair in pairs:
        text = "\n".join([*(message["content"] for message in pair.context), pair.prompt])
        key = hashlib.blake2b(question_key(text), digest_size=8, person=b"preferences").digest()
        held_out = int.from_bytes(key, "big") / 2**64 < validation
        found["validation" if held_out else "train"].setdefault(pair.id, pair)
    return {split: list(distinct.values()) for split, distinct in found.items()}


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Write a split's table; equal pairs give equal bytes."""
    rows = [
        {
            "id": pair.id,
            "context": list(pair.context),
            "prompt": pair.prompt,
            "chosen": pair.chosen,
            "rejected": pair.rejected,
            "margin": pair.margin,
        }
        for pair in pairs
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a table that `write_pairs` wrote."""
    return [
        Pair(row["prompt"], row["chosen"], row["rejected"], row["margin"], tuple(row["context"]))
        for row in pq.read_table(path, schema=SCHEMA).to_pylist()
    ]


def _completion(value: Any, prompt: list[Message], place: str) -> str:
    *before, last = read_messages(value, place, "assistant")
    if last["role"] != "assistant":
        raise BadInput(f"{place}: its last message is the {last['role']}'s, expected the assistant's")
    if before and before != prompt:
        raise BadInput(f"{place}: the messages before its last one are not the prompt's")
    return last["content"]


def _context(row: dict[str, Any]) -> Sequence[Message]:
    return row.get("context") or ()


def _margin(value: Any, place: str) -> float:
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin) or isinstance(value, bool):
        raise BadInput(f"{place}: holds {repr(value)[:80]}; expected a number")
    return margin
