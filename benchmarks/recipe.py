"""Measure a recipe over several seeds and write the README's table: `python -m benchmarks.recipe`.

Each seed is a whole pipeline run in a workspace of its own. Raw figures, with the machine and the date, go to
benchmarks/results/<recipe>.json; the table between the README's markers is made from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.pages import RESULTS, ROOT, machine, put, today
from training.storage import write_json

SECTION, PAGE = "results", ROOT / "README.md"
MODELS = {"base": "Base", "sft": "SFT", "rl": "SFT + GRPO"}


def measure(recipe: str, seed: int) -> dict[str, Any]:
    """Run the pipeline with one seed; the evaluation's metrics and the seconds the run took."""
    name = f"{recipe}-seed{seed}"
    command = [sys.executable, "-m", "flows.cli", "run", "-c", recipe, "-S", f"seed={seed}", "--name", name]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = round(time.monotonic() - began)
    folder = ROOT / ".gradeline" / "workspaces" / name / "data" / "evaluation"
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seed": seed,
        "seconds": seconds,
        "problems": summary["test_set"]["problems"],
        "samples": summary["n"],
        "metrics": json.loads((folder / "metrics.json").read_text()),
    }


def table(result: dict[str, Any], k: int = 8) -> str:
    """Markdown: mean over seeds and, in brackets, the lowest and highest seed."""
    rows = result["runs"]
    columns = [("Pass@1", "pass_at_1"), (f"Pass@{k}", f"pass_at_{k}"), (f"Maj@{k}", f"maj_at_{k}")]
    lines = ["| Model | " + " | ".join(name for name, _ in columns) + " |", "|---|" + "---:|" * len(columns)]
    for key, label in MODELS.items():
        cells = []
        for _, metric in columns:
            values = [row["metrics"][f"{key}/{metric}"] for row in rows]
            cells.append(f"{statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    gains = [row["metrics"]["rl/pass_at_1"] - row["metrics"]["base/pass_at_1"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    lines += [
        "",
        f"Mean over {len(rows)} seeds [lowest, highest]; {rows[0]['problems']} held-out problems, {rows[0]['samples']} samples each. "
        f"Pass@1 rose by {min(gains):.2f} to {max(gains):.2f}. A run took {min(seconds)} to {max(seconds)} s on {result['machine']}. "
        f"Made by `make results` on {result['date']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="arithmetic-smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    result = {
        "recipe": arguments.recipe,
        "machine": machine(),
        "date": today(),
        "runs": [measure(arguments.recipe, seed) for seed in arguments.seeds],
    }
    write_json(RESULTS / f"{arguments.recipe}.json", result)
    print(table(result))
    if arguments.recipe == "arithmetic-smollm2":
        put(PAGE, SECTION, table(result))


if __name__ == "__main__":
    main()
