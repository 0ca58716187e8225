"""Step checkpoints that resume exactly: trained tensors, optimizer moments, the metrics so far.

Randomness is a function of the step, so nothing else is needed. A checkpoint is published whole or not at all,
verified when it is loaded, and a damaged one gives way to the one before it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.storage import CorruptFolder, publishing, verify

KEEP = 2


class Checkpoints:
    """Checkpoints of one training run in `folder`; `parameters` are the tensors that change, by name.

    Each is looked up in the optimizer that trains it; one that none trains (a moving reference) has no moments.
    """

    def __init__(
        self, folder: Path, parameters: dict[str, torch.nn.Parameter], *optimizers: torch.optim.Optimizer
    ) -> None:
        self.folder = folder
        self.parameters = parameters
        self.state: dict[torch.nn.Parameter, Any] = {
            parameter: optimizer.state
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def save(self, step: int, history: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> None:
        """Write the state after `step` steps and drop all but the last two checkpoints."""
        tensors = {f"parameter.{name}": p.detach().cpu().contiguous() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.state.get(parameter, {}).get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach().cpu().contiguous()
        with publishing(self.folder / f"step-{step:06d}") as folder:
            save_file(tensors, folder / "state.safetensors")
            (folder / "history.jsonl").write_text(history_text(history))
            (folder / "extra.json").write_text(json.dumps(extra or {}))
        for old in self._folders()[:-KEEP]:
            shutil.rmtree(old)

    def restore(self) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        """Load the latest whole checkpoint: (steps done, history, extra); (0, [], {}) when there is none."""
        for folder in reversed(self._folders()):
            try:
                verify(folder)
            except CorruptFolder as error:
                print(f"checkpoint ignored, going back to the one before: {error}", flush=True)
                continue
            self._load(load_file(folder / "state.safetensors"))
            history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
            return (
                int(folder.name.removeprefix("step-")),
                history,
                json.loads((folder / "extra.json").read_text()),
            )
        return 0, [], {}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"parameter.{name}"])
                keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in tensors]
                if keys:
                    self.state[parameter][parameter] = {
                        k: tensors[f"{k}.{name}"].to(parameter.device if k != "step" else "cpu") for k in keys
                    }

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def history_text(history: list[dict[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row) + "\n" for row in history)
