"""The value model of PPO: what is still to be earned, seen before each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from training.adapters import attach, base_of, is_adapter
from training.batches import Layout
from training.config import LoraConfig
from training.logprobs import hidden_states
from training.models import load_checkpoint
from training.policy import Policy
from training.randomness import derive_seed

HEAD = "value_head.safetensors"


class Critic:
    """A linear head on the last hidden states of a model's transformer.

    A language model's output layer is let go, and the head starts at 0, so that so does every value; a reward
    model's head is what the value head starts as (Ouyang et al. 2022, arXiv:2203.02155, appendix C). With a trunk
    of its own, all of it is trained, or adapters to it; on the policy's trunk (`shared`), the trunk's gradient is
    the policy optimizer's and only the head is the critic's.
    """

    def __init__(self, model: Any, shared: bool, lora: LoraConfig | None = None, seed: int = 0) -> None:
        self.trunk: transformers.PreTrainedModel = model if shared else model.base_model
        if getattr(model, "is_loaded_in_4bit", False):
            self.trunk.is_loaded_in_4bit = True  # peft asks the module that it adapts
        self.shared = shared
        size = int(self.trunk.config.hidden_size)
        self.head = torch.nn.Linear(size, 1).to(device=self.trunk.device, dtype=self.trunk.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        if hasattr(model, "score"):
            self.head.load_state_dict(model.score.state_dict(), strict=False)  # most have no bias
        self.parameters: dict[str, torch.nn.Parameter] = dict(
            self.head.named_parameters(prefix="critic.head")
        )
        if not shared:
            self._own = Policy(self.trunk, lora or LoraConfig(), derive_seed(seed, "critic"))
            self.parameters |= {f"critic.trunk.{n}": p for n, p in self._own.parameters.items()}

    def __call__(self, layout: Layout, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Value before each branch token of the layout, [N]; `hidden` [N, H] are the shared trunk's states."""
        states = hidden_states(self.trunk, layout, layout.sources) if hidden is None else hidden
        return self.head(states).squeeze(-1).float()

    def save(self, folder: Path, start: Path) -> None:
        """Write the head, and the trunk where it is the critic's own: whole, or as adapters to that of `start`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: p.detach().contiguous() for n, p in self.head.named_parameters()}, folder / HEAD)
        if not self.shared:
            self._own.write(folder, start, lambda: load_checkpoint(start, torch.device("cpu")).base_model)

    def load_head(self, folder: Path) -> None:
        """Read a head that `save` wrote."""
        self.head.load_state_dict(load_file(folder / HEAD))


def load_critic(folder: Path, device: torch.device) -> Critic:
    """A critic that `save` wrote with a trunk of its own."""
    if is_adapter(folder):
        trunk = attach(load_checkpoint(base_of(folder), device).base_model, folder)
    else:
        trunk = load_checkpoint(folder, device)
    critic = Critic(trunk, shared=False)
    critic.load_head(folder)
    return critic
