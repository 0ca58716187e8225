"""Stage `model`: bring the base model to data/models/base as safetensors + tokenizer."""

from __future__ import annotations

from tasks.stage import Stage, run_stage
from training.models import bring_model
from training.storage import write_json


def model(stage: Stage) -> None:
    """Publish the base model with a note of where it came from."""
    with stage.publish({}) as folder:
        origin = bring_model(stage.params.model, stage.params.seed, folder)
        write_json(folder / "source.json", origin)
    stage.run.tag(
        base_model=origin["source"], base_revision=str(origin["revision"]), license=str(origin["license"])
    )
    print(
        f"model: {origin['source']} ({origin['revision']}) is in {stage.output.relative_to(stage.root)}",
        flush=True,
    )


if __name__ == "__main__":
    run_stage("model", model)
