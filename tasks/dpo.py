"""Stage `dpo`: direct preference optimisation of the SFT model on preference pairs."""

from __future__ import annotations

from tasks.stage import Stage, run_stage
from training.errors import BadInput


def dpo(stage: Stage) -> None:
    """Publish a reference to the SFT model."""
    if stage.params.dpo.enabled:
        raise BadInput("dpo is not available yet")
    stage.disable("sft")


if __name__ == "__main__":
    run_stage("dpo", dpo)
