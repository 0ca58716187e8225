"""Symbolic equality of answers by math-verify, which can take for ever: in workers that are killed when it does."""

from __future__ import annotations

from collections.abc import Sequence

from training.rewards.workers import Workers

server = Workers("training.rewards.symbolic:equal", ["training.rewards.parser"])


def compare(pairs: Sequence[tuple[str, str]], timeout: float) -> list[float | None]:
    """For each (found, answer): 1.0 equal, 0.0 not, None where it took more than `timeout` seconds or crashed."""
    return server.call(pairs, timeout)


def equal(found: str, answer: str) -> float:
    """What a worker does."""
    from math_verify import verify

    from training.rewards.parser import parsed

    return float(verify(parsed(answer), parsed(found), timeout_seconds=None))
