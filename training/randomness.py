"""Randomness as a function of (seed, purpose, step, index): no state, so that resuming needs none.

Step s draws the same numbers whenever and wherever it runs.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(seed: int, purpose: str, step: int = 0, index: int = 0) -> int:
    """A seed in [0, 2**63) for one purpose, step and index; equal arguments give equal seeds."""
    key = f"{seed}\x1f{purpose}\x1f{step}\x1f{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, step: int = 0, index: int = 0) -> np.random.Generator:
    """A counter-based (Philox) generator for one purpose, step and index."""
    return np.random.Generator(np.random.Philox(derive_seed(seed, purpose, step, index)))


def batch_indices(seed: int, purpose: str, step: int, batch_size: int, num_rows: int) -> list[int]:
    """Rows of batch `step` (0-based) when `num_rows` are visited in a new random order every epoch.

    Batches run on across the end of an epoch, so no row is left out and none comes twice in an epoch.
    Raises ValueError when a batch is larger than the data.
    """
    if batch_size > num_rows:
        raise ValueError(
            f"{purpose}: a batch of {batch_size} needs at least as many rows, the data has {num_rows}"
        )
    first = step * batch_size
    rows: list[int] = []
    for position in range(first, first + batch_size):
        epoch, offset = divmod(position, num_rows)
        if not rows or offset == 0:
            order = generator(seed, f"{purpose}/order", epoch).permutation(num_rows)
        rows.append(int(order[offset]))
    return rows
