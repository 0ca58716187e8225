"""What a million rows cost: `python -m benchmarks.data` runs `prepare` and `validate` on made-up questions of three sizes.

Rows look like GSM8K's: a question of 20 to 60 words with numbers, and a solution that ends in `#### answer`. Each size is
a run in a workspace; seconds and peak memory are those that the stages record. It writes benchmarks/results/data.json
and the table in docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS, ROOT, machine, put, today
from tasks.tracking import open_store, run_that_made
from tasks.versioning import DVC, environment
from tasks.workspaces import claimed
from training.storage import write_json

RAW = RESULTS / "data.json"
SECTION, PAGE = "scale", ROOT / "docs" / "data.md"
SIZES = (100_000, 300_000, 1_000_000)
STAGES = ("prepare", "validate")
SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "lo", "mi", "nu", "pa", "ri", "so", "ta", "ve", "wo", "zu")
SETTINGS = (
    "prompt.template='{question}'",
    "prompt.completion='{solution}'",
    "rewards.grader=math",
    "rl.max_prompt_length=1024",
    "prepare.splits={validation: 0.01, test: 0.01}",
)


def row(draw: random.Random) -> dict[str, str]:
    """A question and its worked solution, in GSM8K's columns."""
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(draw.randint(20, 60))]
    first, second = draw.randint(2, 9999), draw.randint(2, 9999)
    words[draw.randrange(len(words))], words[-1] = str(first), str(second)
    total = first + second
    said = " ".join(draw.sample(words, 12))
    return {
        "question": f"{' '.join(words).capitalize()}?",
        "answer": f"{said}: {first} + {second} = <<{first}+{second}={total}>>{total}.\n#### {total}",
    }


def measure(size: int, folder: Path) -> dict[str, Any]:
    """Both stages on `size` rows: seconds and peak memory in GB by stage, and the rows that were left."""
    draw, file = random.Random(size), folder / f"{size}.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for _ in range(size):
            out.write(json.dumps(row(draw)) + "\n")
    source = f"prepare.sources=[{{kind: file, path: {file}, format: gsm8k}}]"
    with claimed(ROOT, "arithmetic-smollm2", [source, *SETTINGS], "data") as tree:
        command = [*DVC, "repro", "validate"]
        subprocess.run(command, cwd=tree, env=environment(), check=True, stdout=subprocess.DEVNULL)
        client, _ = open_store(tree)
        found: dict[str, Any] = {"rows": size}
        for stage in STAGES:
            made = run_that_made(tree, stage)
            assert made
            metrics = client.get_run(made).data.metrics
            found[stage] = {
                "seconds": metrics["seconds"],
                "peak_memory_gb": metrics["peak_memory_gb"],
            }
    print(json.dumps(found), flush=True)
    return found


def section(result: dict[str, Any]) -> str:
    """The table between the page's markers."""
    lines = [
        "| rows | `prepare`, s | µs a row | peak, GB | `validate`, s | µs a row | peak, GB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in result["runs"]:
        cells = [f"{run['rows']:,}"]
        for stage in STAGES:
            one = run[stage]
            each = 1e6 * one["seconds"] / run["rows"]
            cells += [f"{one['seconds']:.0f}", f"{each:.0f}", f"{one['peak_memory_gb']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    made = f"Made by `python -m benchmarks.data` on {result['date']}, {result['machine']}."
    return "\n".join([*lines, "", made])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="rows of each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(size, Path(folder)) for size in arguments.sizes]
    result = {"machine": machine(), "date": today(), "runs": runs}
    write_json(RAW, result)
    put(PAGE, SECTION, section(result))
    print(section(result))


if __name__ == "__main__":
    main()
