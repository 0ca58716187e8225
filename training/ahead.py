"""Rollouts one step ahead of the update (Noukhovitch et al. 2024, arXiv:2410.18252): sampling never waits for learning."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Hands out `make(step)` for the steps in order, each made while its caller works on the one before.

    `catch_up` brings what `make` reads up to date. It runs when a step is taken and before the next is begun, so that
    a step is made from what the caller had when it took the step before. None: steps are made when they are taken.
    """

    def __init__(self, make: Callable[[int], T], steps: range, catch_up: Callable[[], None] | None) -> None:
        self._make, self._steps, self._catch_up = make, steps, catch_up
        self._begun: Future[T] | None = None

    def take(self, step: int) -> tuple[T, float]:
        """The step's result, and the seconds that this call waited for it."""
        began = time.monotonic()
        result = self._make(step) if self._begun is None else self._begun.result()
        waited = time.monotonic() - began
        if self._catch_up is not None and step + 1 in self._steps:
            self._catch_up()
            # a thread of its own for each: none outlives the last step, and one that fails ends with its error
            pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
            self._begun = pool.submit(self._make, step + 1)
            pool.shutdown(wait=False)
        return result, waited
