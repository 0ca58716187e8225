"""One measurement of TRL: `python -m benchmarks.bench.peer WORK STEPS [GSM8K]` prints a JSON object.

`python -m benchmarks.bench.peer WORK equal [GSM8K]` shows instead that both sides compute the same loss and gradient
on one batch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.bench import ours
from benchmarks.bench.work import (
    LEARNING_RATE,
    SEED,
    TEMPLATE,
    WORKS,
    Work,
    hashed,
    model_folder,
    rows,
    worse,
)
from training.experience import Rollout
from training.models import load_tokenizer
from training.objective import loss_weights
from training.recorder import NullRecorder
from training.rewards import Scores
from training.rollout.protocol import Completion


class Timed(GRPOTrainer):
    """TRL's trainer, with the seconds of its phases."""

    seconds: dict[str, float]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("rollout", super()._generate_single_turn, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        phase = "update" if torch.is_grad_enabled() else "scoring"
        return self._timed(phase, super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("scoring", super()._calculate_rewards, *args, **kwargs)

    def _timed(self, phase: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = function(*args, **kwargs)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began
        return result


class Steps(TrainerCallback):
    """Seconds of every step and its phases; what is neither rollout nor scoring is the update, the optimizer included."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.of_phases: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of_phases.clear()
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total, phases = time.monotonic() - self.began, self.of_phases
        rollout, scoring = phases.get("rollout", 0.0), phases.get("scoring", 0.0)
        update = total - rollout - scoring
        self.rows.append(
            {"rollout": rollout, "scoring": scoring, "update": update, "rest": 0.0, "total": total}
        )


def tokenizer() -> Any:
    """The model's, with the work's chat template."""
    made = load_tokenizer(model_folder())
    made.chat_template = TEMPLATE
    return made


def common(folder: str, batch: int, num_steps: int) -> dict[str, Any]:
    """Settings of every trainer: one batch a step, plain float32 on the CPU, no checkpoints."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "max_steps": num_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": num_steps + 1,
        "seed": SEED,
        "disable_tqdm": True,
    }


def trainer(work: Work, data: list[dict[str, str]], num_steps: int, folder: str, steps: Steps) -> Any:
    """TRL's trainer for the work."""
    kind, number = work.kind, work.num_prompts
    if kind == "grpo":
        model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
        arguments = GRPOConfig(
            **common(folder, number * work.num_generations, num_steps),
            num_generations=work.num_generations,
            max_completion_length=work.completion_length,
            beta=work.beta,
            loss_type="grpo",
            scale_rewards="group",
            temperature=1.0,
            generation_kwargs={"min_new_tokens": work.completion_length},
        )
        prompts = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in data]
        made = Timed(
            model,
            reward_funcs=hashed,
            args=arguments,
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer(),
            callbacks=[steps],
        )
        made.seconds = steps.of_phases
        return made
    if kind == "sft":
        model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
        conversations = [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["solution"]}],
            }
            for row in data
        ]
        return SFTTrainer(
            model,
            args=SFTConfig(**common(folder, number, num_steps), max_length=None, completion_only_loss=True),
            train_dataset=Dataset.from_list(conversations),
            processing_class=tokenizer(),
            callbacks=[steps],
        )
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder(), num_labels=1, dtype=torch.float32
    )
    pairs = [
        {
            "chosen": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["solution"]},
            ],
            "rejected": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": worse(row)},
            ],
        }
        for row in data
    ]
    return RewardTrainer(
        model,
        args=RewardConfig(**common(folder, number, num_steps), max_length=None),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        callbacks=[steps],
    )


def measure(work: Work, num_steps: int, gsm8k: Path | None) -> dict[str, Any]:
    """Steps of the work after one that warms up: seconds by phase and peak memory."""
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer(work, rows(work, gsm8k, work.num_prompts), num_steps + 1, folder, steps).train()
    return {
        "steps": steps.rows[1:],
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def equal(work: Work, gsm8k: Path | None) -> dict[str, float]:
    """Loss and gradient of both sides on one batch: relative differences.

    The policies are the reference with equal noise on their weights, so that the KL term counts where there is one.
    """
    data = rows(work, gsm8k, work.num_prompts)
    draw = torch.Generator().manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        mine = ours.trainer(work, data, 1, NullRecorder(), Path(folder))
        theirs = trainer(work, data, 1, folder, Steps())
        own = dict(mine.policy.model.named_parameters())
        with torch.no_grad():
            for name, parameter in theirs.model.named_parameters():
                parameter.add_(1e-3 * torch.randn(parameter.shape, generator=draw))
                own[name].copy_(parameter)
        ids = [
            torch.randint(100, 40_000, (work.completion_length,), generator=draw).tolist()
            for _ in range(work.num_prompts * work.num_generations)
        ]
        rewards = torch.rand(len(ids), generator=draw, dtype=torch.float64).tolist()
        completions = [Completion(one, [0.0] * len(one), "length") for one in ids]
        rollout = Rollout(list(mine.problems), completions, [""] * len(ids), Scores(rewards, {}), {}, {})
        batch, _ = mine.compare(rollout)
        weights = loss_weights(batch.loss_mask, mine.config)
        loss = mine._backward(batch, batch.groups, weights, int(batch.mask.sum()))["loss"]

        prompts = [list(p.prompt_ids) for p in mine.problems for _ in range(work.num_generations)]
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        shown = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        assert batch.advantages is not None
        inputs = {
            "prompt_ids": padded,
            "prompt_mask": shown,
            "completion_ids": torch.tensor(ids),
            "completion_mask": torch.ones(len(ids), work.completion_length, dtype=torch.long),
            "advantages": batch.advantages[:, 0],
            "num_items_in_batch": torch.tensor(len(ids) * work.completion_length),
        }
        if batch.ref_logprobs is not None:
            inputs["ref_per_token_logps"] = batch.ref_logprobs
        theirs.current_gradient_accumulation_steps = 1
        theirs.seconds = {}
        theirs.model.train()
        their_loss = theirs._compute_loss(theirs.model, inputs)
        their_loss.backward()
    pairs = [(own[name].grad, p.grad) for name, p in theirs.model.named_parameters()]
    difference = sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
    size = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    value = float(their_loss.detach())
    return {"loss": abs(loss - value) / abs(value), "gradient": difference / size}


if __name__ == "__main__":
    path = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    task = WORKS[sys.argv[1]]
    found = equal(task, path) if sys.argv[2] == "equal" else measure(task, int(sys.argv[2]), path)
    print(json.dumps(found))
