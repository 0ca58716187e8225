"""How far can the grader `math` be trusted? `python -m benchmarks.graders` measures it and writes docs/rewards.md's tables.

It reads GSM8K, MATH, GSM8K's labelled model solutions and 800 labelled answers to MATH problems from the folder that
GRADELINE_SHARED names. Figures and every disagreement go to benchmarks/results/graders.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages import RESULTS, ROOT, machine, put, today
from training.boxed import last_boxed
from training.config import RewardsConfig
from training.rewards.math import MathReward, extract_answer
from training.storage import write_json

RAW = RESULTS / "graders.json"
SECTION, PAGE = "agreement", ROOT / "docs" / "rewards.md"
SHARED = Path(os.environ.get("GRADELINE_SHARED", ROOT.parent / "shared")) / "data"


def gsm8k(data: Path) -> tuple[list[str], list[str]]:
    """Golden solutions of both splits and their answers."""
    rows = [row for name in ("train", "test") for row in _lines(data / f"gsm8k/{name}.jsonl")]
    solutions = [row["answer"] for row in rows]
    return solutions, [text.rpartition("####")[2].strip() for text in solutions]


def competition_math(data: Path) -> tuple[list[str], list[str], list[str]]:
    """MATH's golden solutions of both splits, their boxed answers, and the answers as this copy respells them."""
    frames = [pd.read_parquet(data / f"math/{name}.parquet") for name in ("train", "test")]
    truths = [row["ground_truth"] for row in pd.concat(frames)["reward_model"]]
    solutions = [truth["solution"] for truth in truths]
    return solutions, [last_boxed(text) or "" for text in solutions], [truth["target"] for truth in truths]


def labelled_gsm8k(data: Path) -> tuple[list[str], list[str], list[float]]:
    """Four models' solutions of GSM8K's test problems, the answers, and whether each is labelled right."""
    solutions, answers, labels = [], [], []
    for row in _lines(data / "gsm8k/example_model_solutions.jsonl"):
        for one in (value for value in row.values() if isinstance(value, dict)):
            solutions.append(one["solution"])
            answers.append(row["ground_truth"].rpartition("A:")[2].strip())
            labels.append(float(one["is_correct"]))
    return solutions, answers, labels


def labelled_math(data: Path) -> tuple[list[str], list[str], list[float]]:
    """Eight responses to each of 100 MATH problems, the answers, and whether each is labelled right."""
    rows = _lines(data / "preferences/math_cot_100.jsonl")
    return (
        [text for row in rows for text in row["response"]],
        [row["gt"] for row in rows for _ in row["response"]],
        [float(label) for row in rows for label in row["score"]],
    )


def of_another_problem(answers: Sequence[str], same: Callable[[str, str], bool]) -> list[str]:
    """For each problem the answer of a later one, the next that is not plainly the same."""
    n = len(answers)
    return [
        next(answers[(i + k) % n] for k in range(1, n) if not same(answers[i], answers[(i + k) % n]))
        for i in range(n)
    ]


def measure(
    name: str, solutions: Sequence[str], answers: Sequence[str], expected: Sequence[float]
) -> dict[str, Any]:
    """Agreement of the grader with what is expected, the seconds it took, and every disagreement."""
    reward = MathReward(RewardsConfig().math.timeout)
    began = time.monotonic()
    scores = reward(prompts=[""] * len(solutions), completions=solutions, answer=answers)
    seconds = time.monotonic() - began
    wrong = [
        {"found": extract_answer(text), "answer": answer, "expected": want, "score": score}
        for text, answer, want, score in zip(solutions, answers, expected, scores, strict=True)
        if score != want
    ]
    print(f"{name}: {len(solutions) - len(wrong)} of {len(solutions)} in {seconds:.1f} s", flush=True)
    return {
        "name": name,
        "rows": len(solutions),
        "agree": len(solutions) - len(wrong),
        "seconds_per_1000": round(1000 * seconds / len(solutions), 2),
        "disagreements": wrong,
    }


def measure_all(data: Path) -> list[dict[str, Any]]:
    """Every row of the table."""
    MathReward(60).equal(["x+1"], ["1+x"])  # starts the workers
    solutions, answers = gsm8k(data)
    others = of_another_problem(answers, lambda a, b: plain(a) == plain(b))
    boxed_solutions, boxed, respelled = competition_math(data)
    boxed_others = of_another_problem(boxed, lambda a, b: plain(a) == plain(b))
    return [
        measure("GSM8K, golden solutions: accepted", solutions, answers, [1.0] * len(answers)),
        measure("GSM8K, answers of other problems: rejected", solutions, others, [0.0] * len(others)),
        measure("MATH, golden solutions: accepted", boxed_solutions, boxed, [1.0] * len(boxed)),
        measure(
            "MATH, answers of other problems: rejected", boxed_solutions, boxed_others, [0.0] * len(boxed)
        ),
        measure("MATH, answers respelled: accepted", boxed_solutions, respelled, [1.0] * len(respelled)),
        measure("GSM8K, four models' solutions: as labelled", *labelled_gsm8k(data)),
        measure("MATH, 100 × 8 responses: as labelled", *labelled_math(data)),
    ]


WHY = {
    "MATH, golden solutions: accepted": "Their `\\boxed{}` is empty, so that they state no answer.",
    "MATH, answers of other problems: rejected": "The problems share their answer, which one of them spells otherwise.",
    "MATH, answers respelled: accepted": (
        "This copy's tidying damaged the reference: rows of matrices lost their `\\\\`, `\\text` and units were cut "
        "to braces or to nothing, commas and spaces vanished."
    ),
    "MATH, 100 × 8 responses: as labelled": "The label is wrong: `10{,}000` is 10000.",
}
"""Why each set's disagreements are there."""


def section(result: dict[str, Any]) -> str:
    """The part of docs/rewards.md between its markers."""
    lines = ["| set | rows | agree | | s / 1,000 |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['rows']:,} | {row['agree']:,} | {100 * row['agree'] / row['rows']:.2f} % | {row['seconds_per_1000']:.2f} |"
        for row in result["sets"]
    ]
    lines += ["", f"Made by `python -m benchmarks.graders` on {result['date']}, {result['machine']}.", ""]
    for row in result["sets"]:
        if row["disagreements"]:
            lines += [f"**{row['name']}**: {len(row['disagreements'])} not. {WHY[row['name']]}", ""]
            lines += ["| found | reference | score |", "|---|---|---:|"]
            lines += [
                f"| {_code(one['found'])} | {_code(one['answer'])} | {one['score']} |"
                for one in row["disagreements"]
            ]
            lines.append("")
    return "\n".join(lines).strip()


def _code(text: str | None) -> str:
    if not text:
        return "nothing"
    shown = text.replace("\n", " ").replace("|", "\\|")
    return f"`{shown if len(shown) <= 100 else shown[:97] + '...'}`"


def plain(answer: str) -> str:
    return answer.replace(",", "").replace(" ", "").replace("\\!", "").replace("$", "").replace("\\", "")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with gsm8k, math and preferences")
    arguments = parser.parse_args()
    result = {"machine": machine(), "date": today(), "sets": measure_all(arguments.data)}
    write_json(RAW, result)
    put(PAGE, SECTION, section(result))


if __name__ == "__main__":
    main()
