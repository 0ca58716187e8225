"""Runs the measurements in turn and writes benchmarks/results/latest.json and docs/performance.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench.work import GSM8K, VARIANTS, WORKS, Work
from benchmarks.pages import RESULTS, ROOT, machine, put, today
from training.storage import write_json

RAW = RESULTS / "latest.json"
SECTION, PAGE = "bench", ROOT / "docs" / "performance.md"
OLD_TRL = Path(sys.prefix) / "ppo"
"""Where `make bench` puts the last TRL that had PPO."""
PHASES = ("rollout", "scoring", "update", "rest", "total")
PEAK = """
import json, time, torch
a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
best = 1e9
for _ in range(12):
    began = time.perf_counter()
    a @ b
    best = min(best, time.perf_counter() - began)
print(json.dumps({"gflops": 2 * 2048**3 / best / 1e9, "threads": torch.get_num_threads(), "torch": torch.__version__}))
"""
"""Float32 matrix product of 2048 x 2048, the best of twelve."""


def child(*arguments: str, path: Path | None = None) -> dict[str, Any]:
    """The JSON object that a Python process prints last; `path` stands first among where it looks for packages."""
    variables = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(work: Work, rounds: int, steps: int, gsm8k: list[str]) -> dict[str, Any]:
    """`rounds` processes of each side, in turn, with the machine's matrix peak before each pair."""
    equal = child("-m", "benchmarks.bench.peer", work.name, "equal", *gsm8k) if work.kind == "grpo" else None
    found: dict[str, Any] = {"work": work.name, "equal": equal, "peak": [], "gradeline": [], "trl": []}
    for number in range(rounds):
        found["peak"].append(child("-c", PEAK))
        for side in ("gradeline", "trl"):
            began = time.monotonic()
            command = (work.name, str(steps), *gsm8k)
            if side == "gradeline":
                one = ours(work, steps, gsm8k)
            elif work.kind == "ppo":
                one = child("-m", "benchmarks.bench.ppo", *command, path=OLD_TRL)
            else:
                one = child("-m", "benchmarks.bench.peer", *command)
            found[side].append(one)
            total = statistics.median(step["total"] for step in one["steps"])
            print(
                f"{work.name}, round {number + 1}, {side}: {total:.1f} s a step, {one['peak_memory_gb']:.1f} GB "
                f"(the process took {time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return found


def ours(work: Work, steps: int, gsm8k: list[str], variant: str = "plain") -> dict[str, Any]:
    """One process of Gradeline's side."""
    options = ["--variant", variant, *(part for file in gsm8k for part in ("--gsm8k", file))]
    return child("-m", "benchmarks.bench.ours", work.name, str(steps), *options)


def apart(work: Work, rounds: int, steps: int, gsm8k: list[str]) -> dict[str, Any]:
    """Gradeline's variants of a work in turn with its plain step: seconds of a step by round."""
    found: dict[str, Any] = {"work": work.name, "plain": [], **{variant: [] for variant in VARIANTS}}
    for _ in range(rounds):
        for variant in ("plain", *VARIANTS):
            one = ours(work, steps, gsm8k, variant)
            found[variant].append(statistics.median(step["total"] for step in one["steps"]))
            print(f"{work.name}, {variant}: {found[variant][-1]:.1f} s a step", flush=True)
    return found


def medians(result: dict[str, Any], side: str) -> list[dict[str, float]]:
    """By round, the median step's seconds of each phase."""
    return [
        {phase: statistics.median(step[phase] for step in one["steps"]) for phase in PHASES}
        for one in result[side]
    ]


def section(result: dict[str, Any]) -> list[str]:
    """A work's part of the page: a row a phase."""
    work = WORKS[result["work"]]
    ours, theirs = medians(result, "gradeline"), medians(result, "trl")
    flops = result["gradeline"][0]["flops"]
    peak = max(one["gflops"] for one in result["peak"]) * 1e9
    tokens = result["gradeline"][0]["tokens"]
    unit = {"grpo": "prompts", "ppo": "prompts", "sft": "examples", "reward_model": "pairs"}[work.kind]
    sizes = f"{work.num_prompts} {unit}"
    if work.kind in ("grpo", "ppo"):
        sizes += f" x {work.num_generations} completions x {work.completion_length} tokens, β = {work.beta}"
    lines = [f"### `{work.name}`: {sizes}", ""]
    if result["equal"]:
        lines += [
            f"On one batch the two losses differ by {result['equal']['loss']:.0e} of their size, the gradients by "
            f"{result['equal']['gradient']:.0e} of theirs.",
            "",
        ]
    lines += [
        "| phase | Gradeline, s | TRL, s | times faster | of the matrix peak |",
        "|---|---:|---:|---:|---:|",
    ]
    for phase in PHASES:
        mine, other = ([row[phase] for row in side] for side in (ours, theirs))
        if max(mine + other) < 0.05:
            continue
        ratios = [b / a for a, b in zip(mine, other, strict=True) if a > 0.05]
        share = f"{flops[phase] / statistics.median(mine) / peak:.0%}" if phase in flops else ""
        if phase == "total":
            share = f"{sum(flops.values()) / statistics.median(mine) / peak:.0%}"
        lines.append(
            f"| {phase} | {statistics.median(mine):.1f} | {statistics.median(other):.1f} | {_spread(ratios)} | {share} |"
        )
    memory = {
        side: statistics.median(one["peak_memory_gb"] for one in result[side])
        for side in ("gradeline", "trl")
    }
    seconds = statistics.median(row["total"] for row in ours)
    lines += [
        "",
        f"Peak memory {memory['gradeline']:.1f} GB against {memory['trl']:.1f} GB ({memory['gradeline'] / memory['trl']:.2f} times); "
        f"{tokens / seconds:.0f} completion tokens a second; {len(ours)} round(s).",
        "",
    ]
    return lines


def section_apart(results: list[dict[str, Any]]) -> list[str]:
    """What a variant saves of the plain step's time."""
    if not results:
        return []
    lines = [
        "### Gradeline alone: variants of a step",
        "",
        "| work | variant | plain, s | variant, s | times faster |",
        "|---|---|---:|---:|---:|",
    ]
    for result in results:
        for variant, about in VARIANTS.items():
            ratios = [a / b for a, b in zip(result["plain"], result[variant], strict=True)]
            lines.append(
                f"| `{result['work']}` | {about} | {statistics.median(result['plain']):.1f} | "
                f"{statistics.median(result[variant]):.1f} | {_spread(ratios, 2)} |"
            )
    return [*lines, ""]


def tables(record: dict[str, Any]) -> str:
    """What `make bench` measured, for docs/performance.md."""
    head = f"""`make bench` runs Gradeline and TRL {record["trl"]} on the same work in turn, each measurement in a process of its own:
SmolLM2-135M-Instruct in float32 with full weights, the same prompts, AdamW, sampling and {record["threads"]} threads, no
activation checkpointing, a reward that is a hash of the completion (so every group has spread), end tokens ignored. A
step is measured after one that warms up. Ratios are TRL's seconds over Gradeline's within a round: median [lowest,
highest].

"Of the matrix peak" is the floating-point operations that a phase needs at least, over its seconds and the float32
matrix product of 2048 x 2048 measured in the same run ({record["peak"]:.0f} GFLOP/s): 2 for every matrix entry
of the layers and token, 4 x heads x head size x keys for every query and layer, 2 x hidden x vocabulary for every token whose
logits are needed, three times that with a gradient; a group's prompt counted once.
"""
    parts = [line for result in record["works"] for line in section(result)]
    parts += section_apart(record["apart"])
    foot = f"Made by `make bench` on {record['date']}, {record['machine']}, torch {record['torch']}."
    return "\n".join([head, *parts, foot])


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return ""
    middle, low, high = (f"{v:.{digits}f}" for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"


def _put(results: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """The result among the others, in the works' order, in the place of an earlier one of the same work."""
    order = list(WORKS)
    results[:] = [one for one in results if one["work"] != new["work"]] + [new]
    results.sort(key=lambda one: order.index(one["work"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps measured in each process")
    parser.add_argument("--gsm8k", type=Path, help=f"GSM8K's test split as JSONL (default: {GSM8K})")
    arguments = parser.parse_args()
    import trl

    gsm8k = [str(arguments.gsm8k.resolve())] if arguments.gsm8k else []
    record = json.loads(RAW.read_text()) if RAW.is_file() else {"works": [], "apart": []}
    results = []
    for name in arguments.work:
        work = WORKS[name]
        results.append(result := measure(work, arguments.rounds, arguments.steps, gsm8k))
        _put(record["works"], result)
        if name in ("add", "gsm8k"):
            _put(record["apart"], apart(work, arguments.rounds, arguments.steps, gsm8k))
        peaks = [one for kept in record["works"] for one in kept["peak"]]
        record |= {
            "machine": machine(),
            "date": today(),
            "trl": trl.__version__,
            "torch": peaks[0]["torch"],
            "threads": peaks[0]["threads"],
            "peak": max(one["gflops"] for one in peaks),
        }
        # each work is kept as it comes, so that an interrupted measurement loses one
        write_json(RAW, record)
        put(PAGE, SECTION, tables(record))
    print("\n".join(line for result in results for line in section(result)))


if __name__ == "__main__":
    main()
