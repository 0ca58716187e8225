"""One measurement of the PPO of TRL 1.11, the last release that had it: `python -m benchmarks.bench.ppo WORK STEPS`.

Four models of one size, one pass over the rollout in one batch, as Gradeline's side has it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.bench.work import LEARNING_RATE, SEED, TEMPLATE, WORKS, Work, model_folder, rows
from training.models import load_tokenizer


class Clock(TrainerCallback):
    """Seconds of every step by phase; a step ends where the next begins."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.phases = {"rollout": 0.0, "scoring": 0.0}

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its seconds counted, where it runs without a gradient."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = function(*args, **kwargs)
            if not torch.is_grad_enabled():
                self.phases[phase] += time.monotonic() - began
            return result

        return call

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        total = now - self.began
        update = total - sum(self.phases.values())
        self.steps.append({**self.phases, "update": update, "rest": 0.0, "total": total})
        self.phases = dict.fromkeys(self.phases, 0.0)
        self.began = now


def measure(work: Work, num_steps: int) -> dict[str, Any]:
    """Steps of the work after one that warms up: seconds by phase and peak memory."""
    clock = Clock()
    ppo_trainer.batch_generation = clock.timed("rollout", ppo_trainer.batch_generation)
    ppo_trainer.forward = clock.timed("scoring", ppo_trainer.forward)
    ppo_trainer.get_reward = clock.timed("scoring", ppo_trainer.get_reward)
    tokenizer = load_tokenizer(model_folder())
    tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "left"

    def language_model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)

    def scorer() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            model_folder(), num_labels=1, dtype=torch.float32
        )

    questions = [
        {
            "input_ids": tokenizer.apply_chat_template(
                [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_dict=False
            )
        }
        for row in rows(work, None, work.num_prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        PPOTrainer(
            args=PPOConfig(
                output_dir=folder,
                per_device_train_batch_size=work.num_prompts,
                gradient_accumulation_steps=1,
                local_rollout_forward_batch_size=work.num_prompts,
                num_mini_batches=1,
                num_ppo_epochs=1,
                num_sample_generations=0,
                total_episodes=work.num_prompts * (num_steps + 1),
                response_length=work.completion_length,
                kl_coef=work.beta,
                temperature=1.0,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                seed=SEED,
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            model=language_model(),
            ref_model=language_model(),
            reward_model=scorer(),
            value_model=scorer(),
            train_dataset=Dataset.from_list(questions),
            callbacks=[clock],
        ).train()
    return {
        "steps": clock.steps[1:],
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    print(json.dumps(measure(WORKS[sys.argv[1]], int(sys.argv[2]))))
