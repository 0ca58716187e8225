"""Does every algorithm learn? `python -m benchmarks.learning` runs each on the tiny task and writes docs/results.md.

Every row is a whole pipeline run in a workspace, with the same SFT model and the same number of RL samples per
seed. Raw rows, with the machine and the date, go to benchmarks/results/learning.json, curves to docs/learning.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.recipe import ROOT, machine, today
from tasks.tracking import OUTPUTS, open_store, run_that_made
from tasks.versioning import DVC, environment
from tasks.workspaces import claimed
from training.storage import read_json

ALGORITHMS = {
    "GRPO": "tiny+grpo",
    "GRPO, curriculum": "tiny+grpo-curriculum",
    "Dr. GRPO": "tiny+dr-grpo",
    "DAPO": "tiny+dapo",
    "RLOO": "tiny+rloo",
    "REINFORCE++": "tiny+reinforce-plus-plus",
    "GSPO": "tiny+gspo",
    "CISPO": "tiny+cispo",
    "SAPO": "tiny+sapo",
    "PPO": "tiny+ppo",
    "PPO, shared trunk": "tiny+ppo-shared-trunk",
    "R1-Zero": "tiny+r1-zero",
    "R1": "tiny+r1",
    "DPO": "tiny+dpo",
    "IPO": "tiny+ipo",
    "RLHF (PPO)": "tiny+rlhf-ppo",
    "DeepSeekMath, outcome": "tiny+deepseekmath",
    "DeepSeekMath, iterative": "tiny+deepseekmath-iterative",
    "DeepSeekMath, process": "tiny-steps+deepseekmath-process",
}
"""Each algorithm and its recipe."""


def run(name: str, seed: int, workspace: str) -> dict[str, Any]:
    """Run one algorithm with one seed in a workspace; its curve, its cost and what it scored on held-out problems."""
    with claimed(ROOT, ALGORITHMS[name], [f"seed={seed}"], workspace) as tree:
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


def page(result: dict[str, Any]) -> str:
    """docs/results.md from the rows."""
    lines = [
        "# What each algorithm learns on the tiny task",
        "",
        "A Llama of 0.1 M parameters names the largest of three digits (`configs/tiny.yaml`; for process supervision with its",
        "work shown, `configs/tiny-steps.yaml`). Every row is the recipe `tiny+ALGORITHM` run through the whole pipeline, with the",
        "same SFT model and 40 steps of 16 prompts x 16 completions of RL; R1-Zero has no SFT, DPO and IPO no RL. Mean over",
        f"{len({row['seed'] for row in result['runs']})} seed(s) [lowest, highest] on 64 held-out problems, 16 samples each. Reward is the first and the last step's, of the",
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
        "![Reward by step](learning.png)",
        "",
        f"Made by `python -m benchmarks.learning` on {result['date']}, {result['machine']}. Memory is the stage's whole process, most of",
        "it the libraries'.",
        "",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Reward by step, mean over seeds, one small plot an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in ALGORITHMS if any(row["algorithm"] == name for row in result["runs"])]
    figure, axes = plt.subplots(5, 4, figsize=(11, 12), squeeze=False)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    arguments = parser.parse_args()
    free: Queue[str] = Queue()
    for number in range(arguments.jobs):
        free.put(f"learning-{number}")

    def one(name: str, seed: int) -> dict[str, Any]:
        workspace = free.get()
        try:
            return run(name, seed, workspace)
        finally:
            free.put(workspace)

    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:  # what is measured is kept after every seed
        with ThreadPoolExecutor(arguments.jobs) as pool:
            runs += pool.map(one, arguments.algorithms, [seed] * len(arguments.algorithms))
        result = {"machine": machine(), "date": today(), "runs": runs}
        if arguments.algorithms == list(ALGORITHMS):
            (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
            (ROOT / "benchmarks" / "results" / "learning.json").write_text(json.dumps(result) + "\n")
            (ROOT / "docs" / "results.md").write_text(page(result), encoding="utf-8")
            draw(result, ROOT / "docs" / "learning.png")
    print(page(result))


if __name__ == "__main__":
    main()
