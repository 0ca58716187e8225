"""A key-value cache that is written in place: transformers' own copies all it holds at every token."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

ROOM = 64
"""Tokens for which there is room after a copy."""


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, T, D] are the front of tensors with room behind, into which new tokens are written.

    They are copied only when the room is used up or rows were selected; a selection is packed anew.
    """

    _behind: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; the room is found by the memory that the held tensors lie in."""
        if not self.is_initialized:
            self.keys, self.values = super().update(key_states, value_states)
            return self.keys, self.values
        assert self.keys is not None
        assert self.values is not None
        held = self.keys.shape[-2]
        length = held + key_states.shape[-2]
        behind = self._behind
        if behind is None or behind[0].data_ptr() != self.keys.data_ptr() or behind[0].shape[-2] < length:
            behind = self._behind = (_with_room(self.keys, length), _with_room(self.values, length))
        behind[0][..., held:length, :] = key_states
        behind[1][..., held:length, :] = value_states
        self.keys, self.values = (tensor[..., :length, :] for tensor in behind)
        return self.keys, self.values


def roomy_cache(config: transformers.PreTrainedConfig) -> transformers.DynamicCache:
    """The model's dynamic cache; layers that keep every token are written in place, others (sliding) stay as they are."""
    cache = transformers.DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(held: torch.Tensor, length: int) -> torch.Tensor:
    behind = held.new_empty(*held.shape[:-2], length + ROOM, held.shape[-1])
    behind[..., : held.shape[-2], :] = held
    return behind
