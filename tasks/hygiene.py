"""The hygiene checks of stage `validate`: what each measures, what it allows, and what the report tells of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.config import Params
from tasks.prepare import checked_digest, local_files
from tasks.stage import Stage
from training.config import PromptConfig, SourceConfig
from training.data.hygiene.checks import deviations, leaked, script_share, unsafe_characters, usual_scripts
from training.data.hygiene.overlap import Overlap, find_overlaps
from training.data.hygiene.twins import find_twins
from training.data.hygiene.words import Words
from training.data.sources import read_examples
from training.data.text import unfill
from training.languages import SCRIPTS
from training.storage import write_json

HELD_OUT = ("validation", "test")
SHOWN = 20
"""Contaminated pairs, and failing rows of a check, that hygiene.json shows; contamination.jsonl has all pairs."""
BINS = 30
_SCRIPTS_FROM = 2_000
"""Train questions from which the usual script is told."""


@dataclass(frozen=True)
class Check:
    """One column that must be null, or within `bounds`, in all but `max_share` of the rows."""

    name: str
    column: str
    max_share: float
    bounds: tuple[float, float] | None = None

    def expectation(self, gxe: Any) -> Any:
        """The check as Great Expectations has it."""
        mostly = 1 - self.max_share
        if self.bounds is None:
            return gxe.ExpectColumnValuesToBeNull(column=self.column, mostly=mostly)
        low, high = self.bounds
        return gxe.ExpectColumnValuesToBeBetween(
            column=self.column, min_value=low, max_value=high, mostly=mostly
        )

    def failing(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows that fail."""
        values = frame[self.column]
        return frame[values.notna() if self.bounds is None else ~values.between(*self.bounds)]


def checks(params: Params) -> list[Check]:
    """Every check with the limits of section `validate`."""
    limits = params.validation
    deviation = limits.lengths.max_deviation
    return [
        Check("near_duplicates", "twin_of", limits.near_duplicates.max_share),
        Check("contamination", "contaminated_by", limits.contamination.max_share),
        Check("contamination", "found_in_train", limits.contamination.max_share),
        Check("leaks", "leak", limits.leaks.max_share),
        Check("lengths", "prompt_deviation", limits.lengths.max_share, (-deviation, deviation)),
        Check("lengths", "completion_deviation", limits.lengths.max_share, (-deviation, deviation)),
        Check("language", "script_share", limits.language.max_share, (limits.language.min_letters, 1.0)),
        Check("unicode", "unsafe_characters", limits.unicode.max_share),
    ]


def evaluation_sets(stage: Stage) -> dict[str, pd.DataFrame]:
    """The sets of validate.contamination.against by label: columns id (`row 12`, counted from 1) and prompt (the question)."""
    return {
        source.label: pd.DataFrame(
            {"id": f"row {number}", "prompt": example.question}
            for number, example in enumerate(_examples(stage, source), 1)
        )
        for source in stage.params.validation.contamination.against
    }


def measure_hygiene(
    frames: dict[str, pd.DataFrame], further: dict[str, pd.DataFrame], params: Params
) -> list[dict[str, Any]]:
    """Add the columns that `checks` names, to the splits (which have their tokens counted) and the further evaluation sets.

    `twin_of` and `contaminated_by` name the rows that a train question repeats or holds, `found_in_train` the train rows
    that hold an evaluation question, `leak` and `unsafe_characters` what was found; `script_share` is the share of letters
    in the expected scripts; `…_deviation` is in robust standard deviations. Returns all contaminating pairs.
    """
    questions = {split: list(_questions(frame, params.prompt)) for split, frame in frames.items()}
    languages = params.validation.language.languages
    scripts = {script for code in languages for script in SCRIPTS[code]} or usual_scripts(
        questions["train"][:_SCRIPTS_FROM]
    )
    for split, frame in frames.items():
        completions, answers = (frame[name].fillna("") for name in ("completion", "answer"))
        frame["leak"] = _texts(map(leaked, questions[split], completions, answers), frame)
        for part, lengths in _lengths(frame).items():
            frame[f"{part}_deviation"] = deviations(lengths, frame["source"].tolist())
        shares = [script_share(text, sorted(scripts)) for text in questions[split]]
        frame["script_share"] = pd.Series(shares, index=frame.index, dtype="float64")
        frame["unsafe_characters"] = _texts(map(_unsafe, frame["prompt"], completions, answers), frame)
    order = [*HELD_OUT, "train"]
    words = Words.of(
        [text for split in order for text in questions[split]],
        [name for split in order for name in frames[split]["source"]],
    )
    parts, start = {}, 0
    for split in order:
        parts[split] = words[start : start + len(frames[split])]
        start += len(frames[split])
    _name_twins(frames, words, params)
    return _name_overlaps(frames, parts, further, params)


def hygiene_report(
    frames: dict[str, pd.DataFrame],
    further: dict[str, pd.DataFrame],
    pairs: list[dict[str, Any]],
    params: Params,
) -> dict[str, Any]:
    """What the page shows: how many rows fail each check, by split; histograms of tokens; contamination by set."""
    return {
        "checks": [
            {
                "check": check.name,
                "column": check.column,
                "split": split,
                "rows": len(frame),
                "failing": len(failing),
                "max_share": check.max_share,
                "examples": [
                    {"id": row["id"], "value": _plain(row[check.column]), "prompt": row["prompt"][:200]}
                    for row in failing.head(SHOWN).to_dict("records")
                ],
            }
            for split, frame in (frames | further).items()
            for check in checks(params)
            if check.column in frame and len(frame)
            for failing in (check.failing(frame),)
        ],
        "lengths": {
            f"{part}_tokens": _histogram({split: _lengths(frame)[part] for split, frame in frames.items()})
            for part in ("prompt", "completion")
        },
        "contamination": [
            {
                "set": name,
                "rows": len(frame),
                "found": int(frame["found_in_train"].notna().sum()),
                "train_rows": len({pair["train"] for pair in pairs if pair["set"] == name}),
                "pairs": [pair for pair in pairs if pair["set"] == name][:SHOWN],
            }
            for name, frame in ({split: frames[split] for split in HELD_OUT} | further).items()
        ],
    }


def write_hygiene(report: dict[str, Any], pairs: list[dict[str, Any]], folder: Path) -> None:
    """Write hygiene.json, and contamination.jsonl with every pair."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "hygiene.json", report)
    lines = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    (folder / "contamination.jsonl").write_text(lines, encoding="utf-8")


def _examples(stage: Stage, source: SourceConfig) -> Iterator[Any]:
    files = local_files(stage, str(source.path)) if source.kind == "file" else {}
    checked_digest(str(source.path), files, source.sha256)
    return read_examples(source, stage.params.seed, files)


def _name_twins(frames: dict[str, pd.DataFrame], words: Words, params: Params) -> None:
    rows = pd.concat([frames[split].assign(split=split) for split in (*HELD_OUT, "train")])
    ids, splits, answers = (rows[name].tolist() for name in ("id", "split", "answer"))
    fixed = len(rows) - len(frames["train"])
    twins = find_twins(words, params.validation.near_duplicates.threshold, fixed, answers)
    frames["train"]["twin_of"] = _texts(
        (
            f"{splits[twins[i][0]]} {ids[twins[i][0]]} ({twins[i][1]:.2f})" if i in twins else None
            for i in range(fixed, len(rows))
        ),
        frames["train"],
    )


def _name_overlaps(
    frames: dict[str, pd.DataFrame], parts: dict[str, Words], further: dict[str, pd.DataFrame], params: Params
) -> list[dict[str, Any]]:
    limits, train = params.validation.contamination, frames["train"]
    train_ids, train_prompts = train["id"].tolist(), train["prompt"].tolist()
    named: dict[int, list[str]] = {}
    pairs = []
    sets = {split: (frames[split], parts[split]) for split in HELD_OUT}
    sets |= {name: (frame, Words.of(frame["prompt"])) for name, frame in further.items()}
    for name, (frame, words) in sets.items():
        overlaps = find_overlaps(parts["train"], words, limits.ngram, limits.overlap)
        ids, prompts = frame["id"].tolist(), frame["prompt"].tolist()
        holders: dict[int, list[Overlap]] = {}
        for one in overlaps:
            named.setdefault(one.train, []).append(f"{name} {ids[one.evaluation]} ({one.covered:.2f})")
            holders.setdefault(one.evaluation, []).append(one)
        frame["found_in_train"] = _texts(
            (_listed([train_ids[one.train] for one in holders.get(row, [])]) for row in range(len(frame))),
            frame,
        )
        pairs += [
            {
                "set": name,
                "train": train_ids[one.train],
                "evaluation": ids[one.evaluation],
                "covered": round(one.covered, 4),
                "train_prompt": train_prompts[one.train],
                "evaluation_prompt": prompts[one.evaluation],
            }
            for one in overlaps
        ]
    train["contaminated_by"] = _texts((_listed(named.get(row, [])) for row in range(len(train))), train)
    return pairs


def _questions(frame: pd.DataFrame, prompt: PromptConfig) -> Iterator[str]:
    """What each row asks, without the recipe's frame around it; of a conversation, all that was said.

    Where solved questions are shown before each (`few_shot`), they are the frame, and the last message is what is asked.
    """
    contexts = frame["context"] if "context" in frame and not prompt.few_shot else [None] * len(frame)
    for text, context in zip(frame["prompt"], contexts, strict=True):
        said = [] if context is None else [message["content"] for message in context]
        yield "\n".join([*said, unfill(prompt.template, text)])


def _lengths(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Tokens of each row's prompt, whatever it is for, and of its reference completion."""
    completions = frame["completion_tokens"].to_numpy()
    return {"prompt": frame["sequence_tokens"].to_numpy() - completions, "completion": completions}


def _listed(names: list[str]) -> str | None:
    if not names:
        return None
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unsafe(*texts: str) -> str | None:
    for part, text in zip(("prompt", "completion", "answer"), texts, strict=True):
        if found := unsafe_characters(text):
            return f"{found} in the {part}"
    return None


def _texts(values: Any, frame: pd.DataFrame) -> pd.Series:
    return pd.Series(list(values), index=frame.index, dtype="str")


def _plain(value: Any) -> Any:
    return round(float(value), 3) if isinstance(value, float | np.floating) else value


def _histogram(lengths: dict[str, np.ndarray]) -> dict[str, Any]:
    """Counts of each split in equal bins over all."""
    every = np.concatenate(list(lengths.values()))
    if not len(every):
        return {"edges": [], "counts": {}}
    low, high = int(every.min()), int(every.max()) + 1
    edges = np.linspace(low, high, min(BINS, high - low) + 1)
    counts = {split: np.histogram(values, edges)[0].tolist() for split, values in lengths.items()}
    return {"edges": edges.tolist(), "counts": counts}
