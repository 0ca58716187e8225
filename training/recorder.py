"""The one way out of `training/`: numbers, tables and progress, implemented by `tasks.tracking` on MLflow."""

from __future__ import annotations

from typing import Any, Protocol


class Recorder(Protocol):
    """Receives what happened; implementations decide where it goes."""

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Numbers of one optimizer or rollout step, all at once."""

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Rows to look at, for example the completions of one step with their rewards."""

    def progress(self, step: int, total: int, **shown: float) -> None:
        """`step` of `total` is done; `shown` are the few numbers worth a line."""


class NullRecorder:
    """Records nothing."""

    def metrics(self, values: dict[str, float], step: int) -> None: ...

    def table(self, name: str, rows: list[dict[str, Any]]) -> None: ...

    def progress(self, step: int, total: int, **shown: float) -> None: ...


def replay(history: list[dict[str, Any]], recorder: Recorder) -> None:
    """Record the steps that a resumed run took before, so that its record is whole."""
    for row in history:
        recorder.metrics({name: value for name, value in row.items() if name != "step"}, row["step"])
