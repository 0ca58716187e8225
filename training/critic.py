"""The value model of PPO: what is still to be earned, seen before each token."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from training.batches import Layout
from training.logprobs import hidden_states

HEAD = "value_head.safetensors"


class Critic:
    """A linear head on a transformer's last hidden states; the head starts at 0, so that so does every value.

    With a trunk of its own, all of it is trained; on the policy's trunk, the trunk's gradient is the policy
    optimizer's and only the head is the critic's.
    """

    def __init__(self, trunk: PreTrainedModel, shared: bool) -> None:
        self.trunk = trunk
        self.shared = shared
        size = int(trunk.config.hidden_size)
        self.head = torch.nn.Linear(size, 1).to(device=trunk.device, dtype=trunk.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters: dict[str, torch.nn.Parameter] = dict(
            self.head.named_parameters(prefix="critic.head")
        )
        if not shared:
            output = {id(p) for p in trunk.get_output_embeddings().parameters()}
            tied = {id(p) for p in trunk.get_input_embeddings().parameters()}
            self.parameters |= {
                f"critic.trunk.{name}": p
                for name, p in trunk.named_parameters()
                if id(p) not in output or id(p) in tied
            }

    def __call__(self, layout: Layout, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Value before each branch token of the layout, [N]; `hidden` [N, H] are the shared trunk's states."""
        states = hidden_states(self.trunk, layout, layout.sources) if hidden is None else hidden
        return self.head(states).squeeze(-1).float()

    def save(self, folder: Path) -> None:
        """Write the head, and the trunk where it is the critic's own."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: p.detach().contiguous() for n, p in self.head.named_parameters()}, folder / HEAD)
        if not self.shared:
            self.trunk.save_pretrained(folder)

    def load_head(self, folder: Path) -> None:
        """Read a head that `save` wrote."""
        self.head.load_state_dict(load_file(folder / HEAD))
