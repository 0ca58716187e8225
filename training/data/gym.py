"""Problems of reasoning-gym's tasks, made in a process of their own.

Some tasks depend on the order of sets, which Python changes from process to process: there, and where the reward
`reasoning_gym` makes a problem again, the hash seed is fixed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.config import SourceConfig
from training.data.files import Column, Record, require_columns
from training.errors import BadInput

ACCEPT_ANYTHING = frozenset({"game_of_life_halting"})
"""Tasks whose scorers take any text to be right (this one's compares the truth of two texts that aren't empty)."""


def read_task(source: SourceConfig, seed: int, columns: Sequence[Column]) -> Iterator[Record]:
    """The problems of the source's task: question, answer (null where the task gives none), `task`, its metadata,
    and `problem`, JSON that says how to make it again.

    Raises BadInput for an unknown task or setting, naming those that there are.
    """
    request = {
        "task": source.task,
        "size": source.size,
        "seed": seed if source.seed is None else source.seed,
        "settings": source.settings,
        "graded": source.format == "reasoning_gym",
        "columns": sorted({name for column in columns for name in column.names}),
    }
    with subprocess.Popen(
        [sys.executable, "-c", "from training.data.gym import serve; serve()"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        reply: dict[str, Any] = {}
        try:
            for number, line in enumerate(process.stdout, 1):
                reply = json.loads(line)
                if "end" in reply or "error" in reply:
                    break
                place = f"{source.label}, row {number}"
                require_columns(columns, reply["present"], place)
                yield place, reply["record"]
        finally:
            process.kill()
    if "error" in reply:
        raise BadInput(f"reasoning_gym task {source.task!r}: {reply['error']}")
    if "end" not in reply:
        raise RuntimeError(
            f"reasoning_gym task {source.task!r}: its process ended early; what it said stands above"
        )


def serve() -> None:
    """Answer one request on standard input: a JSON line for each problem, then one that says how it ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some tasks print
    request = json.load(sys.stdin)
    try:
        for line in problems(**request):
            answers.write(json.dumps(line, default=str) + "\n")
        answers.write(json.dumps({"end": True}) + "\n")
    except BadInput as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
    answers.flush()


def problems(
    task: str, size: int, seed: int, settings: dict[str, Any], graded: bool, columns: list[str]
) -> Iterator[dict[str, Any]]:
    """The problems' records, cut down to `columns` and whatever those lead into, and the names that there were.

    `graded` says that the task's own scorer will grade. Raises BadInput as `read_task` does.
    """
    import dataclasses
    import difflib

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise BadInput(
            f"unknown; did you mean {close!r}? It knows {len(DATASETS)} tasks, reasoning_gym.factory.DATASETS lists them"
        )
    if task == "composite":
        raise BadInput("it mixes other tasks; give each of them a source of its own, with a weight")
    if graded and task in ACCEPT_ANYTHING:
        raise BadInput(
            "its own scorer accepts any text; give it format columns, and let another reward compare the answers"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("seed", "size")]
    for name in settings:
        if name not in known:
            raise BadInput(f"unknown setting {name!r}; accepted: {', '.join(known)}")
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise BadInput(f"settings {settings} refused: {error}") from error
    tops = {name for column in columns for name in (column, column.partition(".")[0])}
    again = {"task": task, "settings": settings, "seed": seed, "size": size}
    for index in range(size):
        made = dataset[index]
        problem = json.dumps(again | {"index": index, "answer": made["answer"]})
        record = {
            **made["metadata"], "question": made["question"], "answer": made["answer"], "task": task, "problem": problem
        }  # fmt: skip
        yield {"record": {k: v for k, v in record.items() if k in tops}, "present": list(record)}
