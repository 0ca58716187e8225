"""Does every algorithm learn? `python -m benchmarks.learning` runs each on the tiny task and writes docs/results.md.

With `--algorithms` or `--seeds` it measures those again, or more of them, and keeps the other rows.

With `--task arithmetic-smollm2` it runs the named recipes on a real model and writes docs/results-smollm2.md. Every
row is a whole pipeline run in a workspace, with the same SFT model and the same number of RL steps per seed. Raw
rows, with the machine and the date, go to benchmarks/results/, curves to docs/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from benchmarks.pages import RESULTS, ROOT, machine, today
from tasks.config import load_params
from tasks.tracking import OUTPUTS, open_store, run_that_made
from tasks.versioning import DVC, environment
from tasks.workspaces import claimed, find_recipe
from training.storage import read_json, write_text

ALGORITHMS = {
    "GRPO": "grpo",
    "GRPO, curriculum": "grpo-curriculum",
    "GRPO, one step off": "one-step-off",
    "Dr. GRPO": "dr-grpo",
    "DAPO": "dapo",
    "RLOO": "rloo",
    "REINFORCE++": "reinforce-plus-plus",
    "GSPO": "gspo",
    "CISPO": "cispo",
    "SAPO": "sapo",
    "PPO": "ppo",
    "PPO, shared trunk": "ppo-shared-trunk",
    "R1-Zero": "r1-zero",
    "R1": "r1",
    "DPO": "dpo",
    "IPO": "ipo",
    "RLHF (PPO)": "rlhf-ppo",
    "DeepSeekMath, outcome": "deepseekmath",
    "DeepSeekMath, iterative": "deepseekmath-iterative",
    "DeepSeekMath, process": "deepseekmath-process",
}
"""Each algorithm and its recipe in configs/algorithms/."""


@dataclass(frozen=True)
class Task:
    """What the algorithms are run on, and where it is told."""

    recipe: str
    steps: str
    """The task with its work shown, for process supervision."""
    about: str
    page: str
    """Page in docs/, without its ending."""
    curves: str
    """Picture in docs/, without its ending."""
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def command(self) -> str:
        """What makes the page."""
        return "python -m benchmarks.learning" + ("" if self.recipe == "tiny" else f" --task {self.recipe}")

    def recipe_of(self, algorithm: str) -> str:
        """Task and algorithm, laid over each other."""
        name = ALGORITHMS[algorithm]
        return f"{self.steps if name == 'deepseekmath-process' else self.recipe}+{name}"


TASKS = {
    "tiny": Task(
        "tiny",
        "tiny-steps",
        "A Llama of 0.1 M parameters names the largest of three digits",
        "results",
        "learning",
        tuple(ALGORITHMS),
        (1, 2, 3),
    ),
    "arithmetic-smollm2": Task(
        "arithmetic-smollm2",
        "arithmetic-steps-smollm2",
        "SmolLM2-135M-Instruct adds and subtracts digits",
        "results-smollm2",
        "learning-smollm2",
        (
            "GRPO",
            "PPO",
            "R1-Zero",
            "R1",
            "DAPO",
            "DPO",
            "RLHF (PPO)",
            "DeepSeekMath, outcome",
            "DeepSeekMath, iterative",
            "DeepSeekMath, process",
        ),
        (1,),
    ),
}


def run(task: Task, name: str, seed: int, workspace: str) -> dict[str, Any]:
    """Run one algorithm with one seed in a workspace; its curve, its cost and what it scored on held-out problems."""
    with claimed(ROOT, task.recipe_of(name), [f"seed={seed}"], workspace) as tree:
        subprocess.run(
            [*DVC, "repro", "evaluate"], cwd=tree, env=environment(), check=True, stdout=subprocess.DEVNULL
        )
    metrics = read_json(tree / OUTPUTS["evaluate"] / "metrics.json")
    keys = ("pass_at_1", "pass_at_8", "maj_at_8")
    stage = "dpo" if "dpo/pass_at_1" in metrics else "rl"
    made, (client, _) = run_that_made(tree, stage), open_store(tree)
    assert made
    history_file = tree / OUTPUTS[stage] / "history.jsonl"
    history = [json.loads(line) for line in history_file.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        table = json.loads(Path(client.download_artifacts(made, "models.json", folder)).read_text())
    print(
        f"{name}, seed {seed}: Pass@1 {metrics['sft/pass_at_1']:.3f} → {metrics['rl/pass_at_1']:.3f}",
        flush=True,
    )
    return {
        "algorithm": name,
        "seed": seed,
        "before": {key: metrics[f"sft/{key}"] for key in keys},
        "after": {key: metrics[f"rl/{key}"] for key in keys},
        "reward": [row["reward" if stage == "rl" else "rewards/margins"] for row in history],
        "kl": history[-1].get("kl"),
        "tokens": sum(row["num_tokens"] for row in history),
        "models": [row[table["columns"].index("model")] for row in table["data"]],
        "peak_memory_mib": 1024 * client.get_run(made).data.metrics["peak_memory_gb"],
    }


def page(task: Task, result: dict[str, Any]) -> str:
    """The page from the rows."""
    params = load_params(find_recipe(ROOT, task.recipe))
    lines = [
        f"# What each algorithm learns on `{task.recipe}`",
        "",
        f"{task.about} (`configs/{task.recipe}.yaml`; for process supervision with the",
        f"work shown, `configs/{task.steps}.yaml`). Every row is the recipe `{task.recipe}+ALGORITHM` run through the whole",
        f"pipeline, with the same SFT model and {params.rl.num_steps} steps of RL on {params.rl.prompts_per_step} prompts x {params.rl.num_generations} completions each (R1 and R1-Zero: 16); R1-Zero",
        f"has no SFT, DPO and IPO no RL. Mean over {len({row['seed'] for row in result['runs']})} seed(s) [lowest, highest] on {params.evaluate.num_problems} held-out problems,",
        f"{params.evaluate.num_samples} samples each. Reward is the first and the last step's, of the",
        "recipe's own rewards (a reward model's has no unit; DPO's and IPO's is the implicit reward's margin).",
        "",
        "| algorithm | Pass@1 before | Pass@1 | Pass@8 | Maj@8 | reward | KL, nats | tokens | models held | peak memory, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for name in ALGORITHMS:
        rows = [row for row in result["runs"] if row["algorithm"] == name]
        if not rows:
            continue
        cells = [
            _spread([row[when][key] for row in rows])
            for when, key in (
                ("before", "pass_at_1"),
                ("after", "pass_at_1"),
                ("after", "pass_at_8"),
                ("after", "maj_at_8"),
            )
        ]
        first, last = (statistics.mean(row["reward"][end] for row in rows) for end in (0, -1))
        kl = [row["kl"] for row in rows if row["kl"] is not None]
        cells += [
            f"{first:.2f} → {last:.2f}",
            f"{statistics.mean(kl):.2f}" if kl else "",
            f"{statistics.mean(row['tokens'] for row in rows):.0f}",
            ", ".join(rows[0]["models"]),
            f"{statistics.mean(row['peak_memory_mib'] for row in rows):.0f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    behind = [
        name
        for name in ALGORITHMS
        if any(
            row["after"]["pass_at_1"] <= row["before"]["pass_at_1"]
            for row in result["runs"]
            if row["algorithm"] == name
        )
    ]
    verdict = (
        "Every algorithm raised Pass@1 with every seed."
        if not behind
        else f"Not raised with every seed: {', '.join(behind)}."
    )
    lines += [
        "",
        verdict,
        "",
        f"![Reward by step]({task.curves}.png)",
        "",
        f"Made by `{task.command}` on {result['date']}, {result['machine']}. Memory is the whole",
        "process of the stage that learns, libraries included.",
        "",
    ]
    return "\n".join(lines)


def merged(before: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, Any]:
    """All rows that were measured; of an algorithm and seed measured again, the new one."""
    again = {(row["algorithm"], row["seed"]) for row in new}
    kept = [row for row in before if (row["algorithm"], row["seed"]) not in again]
    return {"machine": machine(), "date": today(), "runs": kept + new}


def draw(result: dict[str, Any], path: Path) -> None:
    """Reward by step, mean over seeds, one small plot an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in ALGORITHMS if any(row["algorithm"] == name for row in result["runs"])]
    rows = -(-len(names) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(11, 2.4 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        curves = [row["reward"] for row in result["runs"] if row["algorithm"] == name]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color="#9db8d9", linewidth=0.8)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(mean) + 1), mean, color="#1f4e8c", linewidth=1.6)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("reward")
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the task's page")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), help="default: the page's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    names = arguments.algorithms or task.algorithms
    free: Queue[str] = Queue()
    for number in range(arguments.jobs):
        free.put(f"learning-{number}")

    raw = RESULTS / f"{task.curves}.json"
    writing = Lock()

    def one(name: str, seed: int) -> None:
        workspace = free.get()
        try:
            row = run(task, name, seed, workspace)
        finally:
            free.put(workspace)
        with writing:  # each row is kept as it comes, so that an interrupted measurement loses one
            before = read_json(raw)["runs"] if raw.is_file() else []
            write_text(raw, json.dumps(merged(before, [row])) + "\n")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(one, name, seed) for seed in arguments.seeds or task.seeds for name in names]
    for measured in runs:
        measured.result()
    result = read_json(raw)
    write_text(ROOT / "docs" / f"{task.page}.md", page(task, result))
    draw(result, ROOT / "docs" / f"{task.curves}.png")
    print(page(task, result))


if __name__ == "__main__":
    main()
