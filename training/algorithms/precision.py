"""The least precision that log-probabilities, ratios and means are worked out in."""

from __future__ import annotations

import torch


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its values in float32 where it holds fewer bits, integers or booleans."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
