"""Stage `validate`: the gate that prepared data passes before anything is trained on it.

Publishes report.json (every expectation, by split), hygiene.json and contamination.jsonl (tasks/hygiene.py), and
data_docs/ (Great Expectations' pages).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.config import Params
from tasks.expectations import check
from tasks.hygiene import evaluation_sets, hygiene_report, measure_hygiene, write_hygiene
from tasks.roles import check_further_models
from tasks.stage import Stage
from tasks.tracking import output_digest
from training.data.splits import SPLITS
from training.data.table import COLUMNS, REQUIRED
from training.errors import BadInput
from training.models import context_length, load_tokenizer
from training.prompts import PromptRenderer
from training.rewards import Reward, load_reward
from training.rewards.explained import finished
from training.rollout.installed import check_installed

_GRADED_AT_ONCE = 4096


def validate(stage: Stage) -> None:
    """Publish the report if every expectation holds; otherwise keep it in scratch and raise BadInput."""
    params = stage.params
    model, data = stage.folder("model"), stage.folder("prepare")
    tokenizer = load_tokenizer(model)
    check_further_models(stage, tokenizer)
    if params.rl.enabled:
        check_installed(params.rl.engine)
    renderer = PromptRenderer(tokenizer, params.prompt)
    grader = load_reward(params.rewards.grader, params.rewards)
    frames = {split: read_frame(data / f"{split}.parquet") for split in SPLITS}
    further = evaluation_sets(stage)
    for split in SPLITS:
        stage.run.input(data / f"{split}.parquet", split, split)
    draft = stage.scratch / "validation"
    shutil.rmtree(draft, ignore_errors=True)
    if all(is_sound(frame) for frame in frames.values()):
        measure(frames, renderer, grader, params)
        pairs = measure_hygiene(frames, further, params)
        write_hygiene(hygiene_report(frames, further, pairs, params), pairs, draft)
        stage.run.artifact(draft / "hygiene.json")
        stage.run.artifact(draft / "contamination.jsonl")
    report = check(frames | further, params, context_length(model), f"data-{output_digest(data)[:12]}", draft)
    stage.run.artifact(draft / "report.json")
    failures = [
        failure
        for split, outcomes in report["splits"].items()
        for failure in describe_failures(split, outcomes)
    ]
    if failures:
        stage.run.client.log_artifacts(stage.run.run_id, str(draft / "data_docs"), "data_docs")
        pages = draft / "data_docs" / "index.html"
        raise BadInput(
            "\n".join([*failures, f"the whole report: {draft / 'report.json'}, as pages: {pages}"])
        )
    with stage.publish(_metrics(frames)) as folder:
        shutil.copytree(draft, folder, dirs_exist_ok=True)
    number = sum(map(len, report["splits"].values()))
    print(f"validate: {number} expectations hold over {sum(map(len, frames.values()))} rows", flush=True)


def read_frame(path: Path) -> pd.DataFrame:
    """A prepared split as it stands, whatever its columns; BadInput when it is no whole parquet file."""
    try:
        return pq.read_table(path).to_pandas()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; stage prepare makes it") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: not a whole parquet file: {error}") from None


def is_sound(frame: pd.DataFrame) -> bool:
    """Whether every column is there and holds nothing but texts (or null, where it may), so that its rows can be
    measured."""
    return all(
        name in frame
        and all(isinstance(v, str) or (name not in REQUIRED and pd.isna(v)) for v in frame[name])
        for name in COLUMNS
    )


def measure(
    frames: dict[str, pd.DataFrame], renderer: PromptRenderer, grader: Reward, params: Params
) -> None:
    """Add the columns that expectations look at.

    In tokens: `prompt_tokens`, `completion_tokens` (with the end token), `sequence_tokens` (both together) and
    `rollout_tokens` (the prompt and the longest completion that RL may sample). `other_split` names another
    split with the same prompt and the same messages before it, else is null. `grade` is the grader's verdict on the
    reference completion, read as a model's would be: right, wrong, or no verdict; null where a row lacks the
    completion or the answer. A row without a completion counts as if it had an empty one; in one without an answer,
    which is never sampled from, `prompt_tokens` and `rollout_tokens` are null.
    """
    asked = {split: list(_asked(frame)) for split, frame in frames.items()}
    for split, frame in frames.items():
        prompts = _lengths(renderer.ids(*question) for question in asked[split])
        frame["prompt_tokens"] = prompts.where(frame["answer"].notna())
        frame["completion_tokens"] = _lengths(
            renderer.completion_ids("" if pd.isna(text) else text) for text in frame["completion"]
        )
        frame["sequence_tokens"] = prompts + frame["completion_tokens"]
        frame["rollout_tokens"] = frame["prompt_tokens"] + params.rl.max_completion_length
        graded = frame[frame["completion"].notna() & frame["answer"].notna()]
        grades = list(_grades(graded, grader, params.rewards.grader))
        frame["grade"] = pd.Series(grades, index=graded.index, dtype="str").reindex(frame.index)
        frame["other_split"] = pd.Series(None, index=frame.index, dtype="str")
        for other in (name for name in frames if name != split):
            elsewhere = {json.dumps(question) for question in asked[other]}
            there = [json.dumps(question) in elsewhere for question in asked[split]]
            frame.loc[there, "other_split"] = other


def describe_failures(split: str, outcomes: list[dict[str, Any]]) -> Iterator[str]:
    """One text for each failed expectation: split, expectation, column, what was expected and found, sample rows."""
    for outcome in outcomes:
        if outcome["success"]:
            continue
        column, observed = outcome["column"], outcome["observed"]
        name = f"split {split}: {outcome['expectation']}" + (f" of column {column}" if column else "")
        expected = ", ".join(f"{key} {value}" for key, value in outcome["expected"].items())
        found = (
            f"{observed['failing']} of {observed['rows']} rows fail"
            if isinstance(observed, dict)
            else f"found {observed}"
        )
        rows = [
            "\n    "
            + ", ".join(
                f"{key} {row[key]!r}"
                for key in dict.fromkeys(("id", column, "prompt", "completion", "answer"))
                if key in row
            )
            for row in outcome["failing_rows"]
        ]
        yield "".join([name, f" ({expected})" if expected else "", f": {found}", *rows])


def _asked(frame: pd.DataFrame) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Each row's prompt and the messages before it."""
    contexts = frame["context"] if "context" in frame else [None] * len(frame)
    for prompt, context in zip(frame["prompt"], contexts, strict=True):
        yield prompt, [] if context is None else list(context)


def _lengths(sequences: Iterator[list[int]]) -> pd.Series:
    return pd.Series([len(ids) for ids in sequences], dtype="Int64")


def _grades(frame: pd.DataFrame, grader: Reward, name: str) -> Iterator[str]:
    for first in range(0, len(frame), _GRADED_AT_ONCE):
        rows = frame.iloc[first : first + _GRADED_AT_ONCE]
        columns = {column: rows[column].tolist() for column in COLUMNS}
        prompts, completions = columns.pop("prompt"), columns.pop("completion")
        reasons = ["stop"] * len(rows)
        [values] = finished(
            [grader(prompts=prompts, completions=completions, finish_reason=reasons, **columns)]
        )
        if len(values) != len(rows):
            raise BadInput(
                f"rewards.grader {name!r}: returned {len(values)} values for {len(rows)} completions"
            )
        for value in values:
            yield "no verdict" if value is None or value != value else "right" if value == 1 else "wrong"


def _metrics(frames: dict[str, pd.DataFrame]) -> dict[str, float]:
    every = pd.concat([frame[["prompt_tokens", "completion_tokens", "grade"]] for frame in frames.values()])
    if every.empty:
        return {}
    graded = every["grade"].dropna()
    return {
        "max_prompt_tokens": float(every["prompt_tokens"].max()),
        "max_completion_tokens": float(every["completion_tokens"].max()),
        "accepted_answers": float((graded == "right").mean()) if len(graded) else 0.0,
    }
