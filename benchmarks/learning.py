"""Does every algorithm learn? `python -m benchmarks.learning` runs each on the tiny task and writes docs/results.md.

Each algorithm and seed is a process of its own (peak memory is the process's), starting at the same SFT model of
that seed, with the same problems and the same number of sampled completions. Raw rows, with the machine and the
date, go to benchmarks/results/learning.json, curves to docs/learning.png.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recipe import ROOT, machine, today

KL = {"beta": 0.02}
IN_REWARD = KL | {"kl_in": "reward"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {"loss_type": "grpo"},
    "GRPO with KL": {"loss_type": "grpo"} | KL,
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28, "dynamic_sampling_rounds": 2},
    "RLOO": {"advantage_estimator": "rloo"} | IN_REWARD,
    "REINFORCE++": {"advantage_estimator": "reinforce_plus_plus"} | KL,
    "GSPO": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
    "PPO": {"advantage_estimator": "gae", "lam": 0.95} | IN_REWARD,
    "PPO, shared trunk": {"advantage_estimator": "gae", "value_model": "trunk"} | IN_REWARD,
}
"""Each algorithm as the switches that differ from the tiny recipe."""
TWO_PASSES = {"num_iterations": 2, "num_minibatches": 2}
"""All take two passes of two minibatches over a rollout, so that ratios and clips matter."""


def run(name: str, seed: int) -> dict[str, Any]:
    """Train one algorithm with one seed in this process; its curve and what it scored on held-out problems."""
    import torch

    from tasks.config import load_params
    from tasks.rl import held
    from training.batches import Tree
    from training.critic import Critic
    from training.data.sources import read_examples
    from training.data.splits import divide
    from training.evaluation.metrics import problem_scores
    from training.evaluation.sampling import Judge, graded, sample_problems
    from training.evaluation.sampling import Problem as HeldOut
    from training.experience import Problem
    from training.models import bring_model, end_token_ids, load_model, load_tokenizer
    from training.policy import Policy
    from training.prompts import PromptRenderer
    from training.recorder import NullRecorder
    from training.rewards import RewardSum
    from training.rl import RLTrainer
    from training.rollout.native import NativeEngine
    from training.rollout.protocol import Sampling
    from training.sft import train_sft

    torch.set_num_threads(1)
    params = load_params(ROOT / "configs" / "tiny.yaml", [f"seed={seed}"])
    base = params.rl.model_dump() | TWO_PASSES | ALGORITHMS[name]
    config = type(params.rl).model_validate(base)
    source = params.prepare.sources[0]
    division = divide([(source, read_examples(source, seed, ROOT / str(source.path)))], params.prepare.splits)
    rows = {split: [row for _, row in division.split(split)] for split in ("train", "test")}
    cpu, recorder = torch.device("cpu"), NullRecorder()

    def prompt(question: str) -> str:
        return params.prompt.template.replace("{question}", question)

    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "base"
        bring_model(params.model, seed, start)
        tokenizer, model = load_tokenizer(start), load_model(start, cpu)
        renderer = PromptRenderer(tokenizer, params.prompt)
        examples = [
            Tree(renderer.ids(prompt(row.question)), [renderer.completion_ids(row.answer)])
            for row in rows["train"]
        ]
        train_sft(
            Policy(model, params.sft.lora, seed), examples, params.sft,
            seed=seed, pad_id=0, checkpoints=Path(folder) / "sft-steps", recorder=recorder,
        )  # fmt: skip
        sft = Path(folder) / "sft"
        model.save_pretrained(sft)
        ends = end_token_ids(model, tokenizer)

        def score() -> dict[str, float]:
            held_out = [
                HeldOut(i, str(i), prompt(row.question), row.answer, "tiny")
                for i, row in enumerate(rows["test"][: params.evaluate.num_problems])
            ]
            ids = [renderer.ids(p.prompt) for p in held_out]
            sampling = Sampling(1.0, params.evaluate.max_completion_length)
            n = params.evaluate.num_samples
            completions = sample_problems(NativeEngine(model, ends, 256), held_out, ids, sampling, n, seed)
            judged = Judge(params.rewards, needs_format=False).rows(held_out, completions, renderer)
            scores = [
                problem_scores([graded(row) for row in judged[i * n : (i + 1) * n]], [1, 8])
                for i in range(len(held_out))
            ]
            return {
                key: statistics.mean(s[key] for s in scores) for key in ("pass_at_1", "pass_at_8", "maj_at_8")
            }

        before = score()
        critic = None
        if config.advantage_estimator == "gae":
            shared = config.value_model == "trunk"
            critic = Critic(model if shared else load_model(sft, cpu), shared)
        reference = load_model(sft, cpu) if config.beta else None
        problems = [
            Problem(prompt(row.question), tuple(renderer.ids(prompt(row.question))), {"answer": row.answer})
            for row in rows["train"]
        ]
        began = time.monotonic()
        history = RLTrainer(
            Policy(model, config.lora, seed), reference, NativeEngine(model, ends, 256),
            RewardSum(config.reward_funcs, config.reward_weights, params.rewards), renderer, problems, config,
            seed=seed, pad_id=0, checkpoints=Path(folder) / "rl-steps", recorder=recorder, critic=critic,
        ).train()  # fmt: skip
        return {
            "algorithm": name,
            "seed": seed,
            "before": before,
            "after": score(),
            "reward": [row["reward"] for row in history],
            "kl": history[-1].get("kl"),
            "tokens": sum(row["num_tokens"] for row in history),
            "seconds": time.monotonic() - began,
            "models": held({"policy": model, "reference": reference, "value": critic}, {}),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def page(result: dict[str, Any]) -> str:
    """docs/results.md from the rows."""
    lines = [
        "# What each algorithm learns on the tiny task",
        "",
        "A Llama of 0.1 M parameters names the largest of three digits (`configs/tiny.yaml`). Every algorithm starts at the",
        "same SFT model of its seed and samples the same number of completions: 40 steps of 16 prompts x 16, in two passes",
        "of two minibatches. Mean over seeds [lowest, highest] on 64 held-out problems, 16 samples each.",
        "",
        "| algorithm | Pass@1 before | Pass@1 | Pass@8 | Maj@8 | KL, nats | tokens | models held | peak memory, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|",
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
        kl = [row["kl"] for row in rows if row["kl"] is not None]
        cells += [
            f"{statistics.mean(kl):.2f}" if kl else "",
            f"{statistics.mean(row['tokens'] for row in rows):.0f}",
            ", ".join(model["model"] for model in rows[0]["models"]),
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
        f"Made by `python -m benchmarks.learning` on {result['date']}, {result['machine']}. Memory is the whole process's, most of",
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
    figure, axes = plt.subplots(3, 4, figsize=(11, 7), sharex=True, sharey=True, squeeze=False)
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
    figure.supylabel("reward (share of right answers)")
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
    parser.add_argument("--one", nargs=2, metavar=("ALGORITHM", "SEED"), help="run one and print its row")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments.one[0], int(arguments.one[1]))))
        return
    runs = []
    for name in arguments.algorithms:
        for seed in arguments.seeds:
            command = [sys.executable, "-m", "benchmarks.learning", "--one", name, str(seed)]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            before, after = runs[-1]["before"]["pass_at_1"], runs[-1]["after"]["pass_at_1"]
            print(f"{name}, seed {seed}: Pass@1 {before:.3f} → {after:.3f}", flush=True)
    result = {"machine": machine(), "date": today(), "runs": runs}
    if arguments.algorithms == list(ALGORITHMS):
        (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
        (ROOT / "benchmarks" / "results" / "learning.json").write_text(json.dumps(result) + "\n")
        (ROOT / "docs" / "results.md").write_text(page(result), encoding="utf-8")
        draw(result, ROOT / "docs" / "learning.png")
    print(page(result))


if __name__ == "__main__":
    main()
