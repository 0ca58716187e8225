"""How sequences are laid out for one forward pass.

A row holds one or several trees; a tree is a prefix with branches that continue it. A group of completions is
one tree: the prompt once, the completions side by side. An SFT example is a tree without branches; several are
packed in a row. A token sees the earlier tokens of its own branch and its tree's prefix, nothing else, and its
position counts from its tree's start, so every branch computes what it would alone.

    tokens     p0 p1 p2 | a0 a1 | b0 b1 b2 | (next tree or padding)
    positions   0  1  2    3  4    3  4  5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tree:
    """A prefix and the branches that continue it, as token ids. The prefix is never empty."""

    prefix: list[int]
    branches: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.branches))


@dataclass(frozen=True)
class Layout:
    """Rows ready for the model.

    input_ids, position_ids: [R, T]; attention_mask: [R, 1, T, T] bool, True where a query (dim 2) sees a key.
    sources, targets: [N] for every branch token in order of trees, branches, tokens: the flat index (r * T + t)
    of the position that predicts it, and its id.
    ends: [M] for every branch: the flat index of its last token (the prefix's last for an empty branch).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor


def lay_out(rows: list[list[Tree]], pad_id: int, device: torch.device) -> Layout:
    """Place each list of trees in a row, padded at the end to the longest."""
    length = max(sum(tree.num_tokens for tree in row) for row in rows)
    ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    trees = torch.full((len(rows), length), -1, dtype=torch.long)
    branches = torch.zeros(len(rows), length, dtype=torch.long)
    sources: list[int] = []
    targets: list[int] = []
    ends: list[int] = []
    for r, row in enumerate(rows):
        t = 0
        for number, tree in enumerate(row):
            prefix_end = t + len(tree.prefix)
            for branch, tokens in enumerate([tree.prefix, *tree.branches]):
                end = t + len(tokens)
                start = 0 if branch == 0 else len(tree.prefix)
                ids[r, t:end] = torch.tensor(tokens, dtype=torch.long)
                positions[r, t:end] = torch.arange(start, start + len(tokens))
                trees[r, t:end] = number
                branches[r, t:end] = branch
                if branch and tokens:
                    sources += [r * length + prefix_end - 1, *range(r * length + t, r * length + end - 1)]
                    targets += tokens
                if branch:
                    ends.append(r * length + (end if tokens else prefix_end) - 1)
                t = end
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same_tree = trees[:, :, None] == trees[:, None, :]
    same_branch = branches[:, :, None] == branches[:, None, :]
    visible = causal & same_tree & (same_branch | (branches[:, None, :] == 0))
    return Layout(
        ids.to(device),
        positions.to(device),
        visible[:, None].to(device),
        torch.tensor(sources, dtype=torch.long, device=device),
        torch.tensor(targets, dtype=torch.long, device=device),
        torch.tensor(ends, dtype=torch.long, device=device),
    )


def split_by_tokens(sizes: list[int], budget: int) -> list[list[int]]:
    """Indices of items in micro-batches of at most `budget` padded tokens (rows x longest), longest first.

    An item larger than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * sizes[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(sizes: list[int], capacity: int) -> list[list[int]]:
    """Indices of items packed into rows of at most `capacity` tokens (first fit, longest first).

    An item larger than the capacity gets a row of its own.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        row = next((r for r, space in enumerate(free) if space >= sizes[index]), None)
        if row is None:
            rows.append([index])
            free.append(capacity - sizes[index])
        else:
            rows[row].append(index)
            free[row] -= sizes[index]
    return rows
