"""Stage `evaluate`: the same held-out problems for the base, SFT, DPO and RL models; Pass@K, Maj@K, accuracies.

Sampling is the dear part, so each model's samples are kept under `.gradeline/cache/evaluations/<key>/`, in
chunks written as they come: a killed stage goes on where it was, and a change of `rl.beta` samples only the
RL model again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import training
from tasks.config import Params
from tasks.stage import Stage, is_disabled, resolve_model
from tasks.tracking import output_digest
from tasks.tree import state
from training.errors import BadInput
from training.evaluation.metrics import problem_scores, summarize
from training.evaluation.sampling import Judge, Problem, graded, sample_problems
from training.models import (
    context_length,
    end_token_ids,
    load_model,
    load_tokenizer,
    pick_device,
    set_threads,
)
from training.prompts import PromptRenderer
from training.rollout.native import NativeEngine
from training.rollout.protocol import RolloutEngine, Sampling
from training.rows import read_rows
from training.storage import write_json

MODELS = {"base": "model", "sft": "sft", "dpo": "dpo", "rl": "rl"}
"""The models compared, and the stage that publishes each."""
SHOWN_IF_ENABLED = {"dpo"}
"""Models left out where their stage is disabled."""
CACHED_EVALUATIONS = 30
"""Evaluations kept for reuse; the longest unused go first."""
SHOWN_SAMPLES = 32
"""Rows in each model's table of samples in MLflow."""
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "prompt": pa.string(),
        "answer": pa.string(),
        "sample": pa.int32(),
        "completion": pa.string(),
        "extracted": pa.string(),
        "vote": pa.string(),
        "graded": pa.bool_(),
        "correct": pa.bool_(),
        "strict": pa.bool_(),
        "finish_reason": pa.string(),
        "num_tokens": pa.int32(),
        "logprob": pa.float64(),
    }
)
"""Columns of samples-<model>.parquet, one row a completion (see `training.evaluation.sampling.Judge.rows`)."""


def evaluate(stage: Stage) -> None:
    """Sample, grade and publish samples-<model>.parquet, summary.json and metrics.json."""
    params, config = stage.params, stage.params.evaluate
    set_threads(params.threads)
    test = stage.folder("prepare") / "test.parquet"
    problems, available = read_problems(test, config.num_problems)
    judge = Judge(params.rewards, needs_format="format" in params.rl.reward_funcs)
    evaluations = {
        name: Evaluation(stage, name, resolve_model(stage.folder(producer)), problems, judge)
        for name, producer in MODELS.items()
        if name not in SHOWN_IF_ENABLED or not is_disabled(stage.folder(producer))
    }
    first = {evaluation.model_digest: name for name, evaluation in reversed(evaluations.items())}
    distinct = [evaluations[name] for name in evaluations if name in first.values()]
    stage.run.input(test, "test", "evaluation")
    first_prompt = distinct[0].renderer.text(problems[0].prompt, problems[0].context)
    stage.run.text(first_prompt, "rendered_prompt.txt")

    measured: dict[str, dict[str, Any]] = {}
    total = sum(len(evaluation.chunks) for evaluation in distinct)
    for evaluation in distinct:
        done = sum(len(earlier.chunks) for earlier in distinct if earlier.name in measured)
        measured[evaluation.name] = measure(stage, evaluation, done, total)
    models = {
        name: measured[first[evaluation.model_digest]]
        | {
            "same_as": None if name in measured else first[evaluation.model_digest],
            "folder": evaluation.folder.relative_to(stage.root).as_posix(),
            "disabled": is_disabled(stage.folder(MODELS[name])),
        }
        for name, evaluation in evaluations.items()
    }
    with stage.publish(flat_metrics(models)) as folder:
        for evaluation in distinct:
            with pq.ParquetWriter(folder / models[evaluation.name]["samples"], SCHEMA) as writer:
                for table in evaluation.tables():
                    writer.write_table(table)
        summary = {
            "n": config.num_samples,
            "k": sorted(set(config.k)),
            "seed": params.seed,
            "sampling": asdict(_sampling(params)),
            "strict": [*judge.names, "stop"],
            "test_set": {
                "digest": problems_digest(problems),
                "problems": len(problems),
                "available": available,
            },
            "models": models,
        }
        write_json(folder / "summary.json", summary)
    for name, model in models.items():
        if model["same_as"]:
            print(
                f"evaluate: {name} is the same model as {model['same_as']} ({model['folder']}); sampled once",
                flush=True,
            )
    prune(distinct[0].cache.parent, CACHED_EVALUATIONS)


def measure(stage: Stage, evaluation: Evaluation, done: int, total: int) -> dict[str, Any]:
    """Every metric of one model with its interval; `done` of `total` chunks were there before its first."""
    config, name = stage.params.evaluate, evaluation.name
    scores: list[dict[str, float]] = []
    ungraded = 0
    for number, table in enumerate(evaluation.tables(), start=1):
        rows = table.to_pylist()
        if number == 1:
            stage.run.table(f"samples/{name}", _shown(rows))
        ungraded += sum(not row["graded"] for row in rows)
        for start in range(0, len(rows), config.num_samples):
            samples = [graded(row) for row in rows[start : start + config.num_samples]]
            scores.append(problem_scores(samples, config.k))
        accuracy = sum(score["accuracy_lenient"] for score in scores) / len(scores)
        stage.run.progress(done + number, total, **{f"{name} accuracy": accuracy})
    estimates = summarize(scores, stage.params.seed, config.bootstrap)
    return {
        "digest": evaluation.model_digest,
        "metrics": {metric: asdict(estimate) for metric, estimate in estimates.items()},
        "samples": f"samples-{name}.parquet",
        "ungraded": ungraded,
    }


class Evaluation:
    """The samples of one model, from the cache where they are there, else made chunk by chunk.

    A chunk is as many problems as fill one generation batch. The key of the cache folder covers everything
    that decides a sample or its grade: weights, prompts as token ids, answers, sampling, seed, batch layout,
    rewards, device, threads, versions and the code of `training/`.
    """

    def __init__(self, stage: Stage, name: str, folder: Path, problems: list[Problem], judge: Judge) -> None:
        self.name, self.folder, self.problems, self.judge = name, folder, problems, judge
        self.config, self.seed = stage.params.evaluate, stage.params.seed
        self.sampling = _sampling(stage.params)
        self.device = pick_device(stage.params.device)
        self.model_digest = output_digest(folder)
        self.tokenizer = load_tokenizer(folder)
        self.renderer = PromptRenderer(self.tokenizer, stage.params.prompt)
        self.prompt_ids = [self.renderer.ids(problem.prompt, problem.context) for problem in problems]
        self._check_context()
        size = max(1, self.config.batch_size // self.config.num_samples)
        self.chunks = [
            range(first, min(first + size, len(problems))) for first in range(0, len(problems), size)
        ]
        self.identity = {
            "model": self.model_digest,
            "problems": problems_digest(problems),
            "prompt_ids": _sha256(self.prompt_ids),
            "sampling": asdict(self.sampling),
            "num_samples": self.config.num_samples,
            "batch_size": self.config.batch_size,
            "seed": self.seed,
            "grading": {"strict": judge.names, "rewards": stage.params.rewards.model_dump()},
            "own_graders": {rule: _module_digest(rule) for rule in judge.names if ":" in rule},
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "versions": {
                package: importlib.metadata.version(package) for package in ("torch", "transformers")
            },
            "code": _code_digest(),
        }
        self.cache = state(stage.root) / "cache" / "evaluations" / _sha256(self.identity)[:32]

    def tables(self) -> Iterator[pa.Table]:
        """One table a chunk, in the order of the problems; a missing one is sampled, graded and kept."""
        self.cache.mkdir(parents=True, exist_ok=True)
        os.utime(self.cache)
        write_json(self.cache / "identity.json", self.identity)
        for chunk in self.chunks:
            path = self.cache / f"{chunk.start:06d}.parquet"
            table = _read_whole(path)
            if table is None:
                table = pa.Table.from_pylist(self._sample(chunk), schema=SCHEMA)
                _write_whole(path, table)
            yield table
        self.__dict__.pop("_engine", None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _sample(self, chunk: range) -> list[dict[str, Any]]:
        problems = self.problems[chunk.start : chunk.stop]
        prompt_ids = self.prompt_ids[chunk.start : chunk.stop]
        completions = sample_problems(
            self._engine, problems, prompt_ids, self.sampling, self.config.num_samples, self.seed
        )
        return self.judge.rows(problems, completions, self.renderer)

    @cached_property
    def _engine(self) -> RolloutEngine:
        model = load_model(self.folder, self.device)
        return NativeEngine(model, end_token_ids(model, self.tokenizer), self.config.batch_size)

    def _check_context(self) -> None:
        longest, context = max(map(len, self.prompt_ids)), context_length(self.folder)
        if longest + self.sampling.max_tokens > context:
            raise BadInput(
                f"evaluate.max_completion_length = {self.sampling.max_tokens}: with the longest prompt ({longest} tokens) "
                f"it exceeds the {self.name} model's context of {context} tokens; at most {context - longest} fit"
            )


def read_problems(test: Path, num_problems: int) -> tuple[list[Problem], int]:
    """The first `num_problems` rows of the test split, and how many it holds.

    Raises BadInput, naming both numbers, when it holds fewer.
    """
    available = pq.read_metadata(test).num_rows
    if num_problems > available:
        raise BadInput(
            f"evaluate.num_problems = {num_problems}: {test.name} holds {available} problems; "
            f"ask for at most {available}, or prepare more test data"
        )
    rows = read_rows(test)[:num_problems]
    columns = ("id", "prompt", "answer", "source", "context")
    return [
        Problem(index, **{name: row[name] for name in columns}) for index, row in enumerate(rows)
    ], available


def problems_digest(problems: list[Problem]) -> str:
    """Hex sha256 over ids, prompts and answers in order: equal digests mean comparable results."""
    return _sha256([[p.id, [*p.context, p.prompt], p.answer] for p in problems])


def flat_metrics(models: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`<model>/<metric>` of every model, for MLflow and metrics.json."""
    values = {
        f"{name}/{metric}": e["value"]
        for name, model in models.items()
        for metric, e in model["metrics"].items()
    }
    return values | {f"{name}/ungraded": float(model["ungraded"]) for name, model in models.items()}


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` most recently used evaluations."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[keep:]:
        shutil.rmtree(path)


def _sampling(params: Params) -> Sampling:
    config = params.evaluate
    return Sampling(
        temperature=config.temperature, max_tokens=config.max_completion_length, top_p=config.top_p
    )


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = (
        "prompt",
        "answer",
        "completion",
        "extracted",
        "correct",
        "strict",
        "finish_reason",
        "num_tokens",
    )
    return [{column: row[column] for column in columns} for row in rows[:SHOWN_SAMPLES]]


def _read_whole(path: Path) -> pa.Table | None:
    try:
        return pq.read_table(path, schema=SCHEMA)
    except (FileNotFoundError, pa.ArrowException):
        return None


def _write_whole(path: Path, table: pa.Table) -> None:
    """A reader sees the whole chunk or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _code_digest() -> str:
    folder = Path(training.__path__[0])
    return _sha256(
        {p.relative_to(folder).as_posix(): p.read_text("utf-8") for p in sorted(folder.rglob("*.py"))}
    )


def _module_digest(rule: str) -> str:
    """Digest of the file that holds a user's own grader."""
    spec = importlib.util.find_spec(rule.partition(":")[0])
    origin = spec.origin if spec else None
    return _sha256(Path(origin).read_text("utf-8") if origin and Path(origin).is_file() else None)
