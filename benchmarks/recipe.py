"""Measure a recipe over several seeds and write the README's table: `python -m benchmarks.recipe`.

Each seed is a whole pipeline run in a workspace of its own. Raw figures, with the machine and the date, go to
benchmarks/results/<recipe>.json; the table between the README's markers is made from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
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


def machine() -> str:
    """Processor, cores and memory in words."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, {memory:.0f} GiB of memory"


def today() -> str:
    """The date of a measurement."""
    return datetime.date.today().isoformat()


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
    path = ROOT / "benchmarks" / "results" / f"{arguments.recipe}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if arguments.recipe == "arithmetic-smollm2":
        before, rest = readme.split(BEGIN)
        after = rest.split(END)[1]
        (ROOT / "README.md").write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
