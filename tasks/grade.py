"""`gradeline grade`: try a reward on a file of rows before a run is paid for.

A row is a JSON object with `completion`, `prompt` where the reward reads it, and the columns that the reward asks for
(`answer`, say). What is written has one row for each, in order: the row itself with `score`, `extracted` and
`reason`. Rows are read and graded in batches, so that a file of any length fits.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from training.config import RewardsConfig
from training.errors import BadInput
from training.rewards import Reward, as_number, load_reward
from training.rewards.explained import Explained, finished
from training.storage import replacing

_AT_ONCE = 512
_SHOWN_FAULTS = 5
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "score", "extracted", "reason")
"""Keys of a row that are no columns for the reward; the last three are what `grade` writes."""


def grade_file(name: str, config: RewardsConfig, source: Path, output: Path) -> dict[str, Any]:
    """Grade every row of `source` into `output`; returns rows, ungraded rows and the mean score.

    `output` appears when all is graded. Raises BadInput, before anything is graded, for a reward that can't be used
    and for rows that aren't complete, with the numbers of their lines.
    """
    reward = load_reward(name, config)
    if output.exists() and source.exists() and output.samefile(source):
        raise BadInput(f"--output {output}: the file that is read; give another one")
    needed = ["completion", *_needed_columns(reward)]
    faults = (fault for _, fault in _rows(source, needed) if fault is not None)
    if shown := [f"{source} line {fault}" for fault in islice(faults, _SHOWN_FAULTS)]:
        rest = sum(1 for _ in faults)
        raise BadInput("\n".join([*shown, *([f"and {rest} more"] if rest else [])]))
    count, total, ungraded = 0, 0.0, 0
    with replacing(output) as file:
        stream = (row for row, _ in _rows(source, needed))
        while rows := list(islice(stream, _AT_ONCE)):
            for row, grade in zip(rows, _explained(name, reward, rows), strict=True):
                count, total = count + 1, total + (grade.score or 0.0)
                ungraded += grade.score is None
                graded = {"score": grade.score, "extracted": grade.extracted, "reason": grade.reason}
                file.write(json.dumps(row | graded, ensure_ascii=False) + "\n")
    graded_rows = count - ungraded
    return {"rows": count, "ungraded": ungraded, "mean": total / graded_rows if graded_rows else None}


def _explained(name: str, reward: Reward, rows: Sequence[dict[str, Any]]) -> list[Explained]:
    """A grade for each row, with reasons where the reward can tell them."""
    keys = {key: None for row in rows for key in row if key not in _NOT_COLUMNS}
    columns = {key: [row.get(key) for row in rows] for key in keys}
    columns.setdefault("finish_reason", ["stop"] * len(rows))
    call = getattr(reward, "explain", reward)
    prompts, completions = [row.get("prompt", "") for row in rows], [row["completion"] for row in rows]
    [values] = finished([call(prompts=prompts, completions=completions, **columns)])
    if len(values) != len(rows):
        raise BadInput(f"reward {name!r}: returned {len(values)} values for {len(rows)} completions")
    return [
        value if isinstance(value, Explained) else _plain(as_number(value, name, i))
        for i, value in enumerate(values)
    ]


def _plain(score: float | None) -> Explained:
    return Explained(score, reason="the reward returned None" if score is None else "")


def _needed_columns(reward: Reward) -> list[str]:
    """Columns that a reward can't be called without."""
    call = getattr(reward, "explain", reward)
    return [
        parameter.name
        for parameter in inspect.signature(call).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in ("prompts", "completions")
    ]


def _rows(source: Path, needed: Sequence[str]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Each row, and the number of its line with what is wrong with it; blank lines are no rows."""
    try:
        with source.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    row, fault = _row(text, needed)
                    yield row, None if fault is None else f"{line}: {fault}"
    except (FileNotFoundError, IsADirectoryError):
        raise BadInput(f"{source}: no such file; expected rows as JSON, one a line") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{source}: not UTF-8 text: {error}") from None


def _row(text: str, needed: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return {}, f"not JSON: {error.msg} at character {error.pos + 1}"
    if not isinstance(row, dict):
        return {}, f"{type(row).__name__}, expected an object with {', '.join(needed)}"
    if missing := [key for key in needed if row.get(key) is None]:
        return {}, f"no {' and no '.join(map(repr, missing))}; it has {', '.join(row) or 'nothing'}"
    for key in ("completion", "prompt", "answer"):
        if not isinstance(row.get(key, ""), str):
            return {}, f"{key!r} is {type(row[key]).__name__}, expected text"
    return row, None
