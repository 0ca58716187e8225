"""Stage `model`: bring the base model to data/models/base and further ones to data/models/more/<name>.

Each is safetensors + tokenizer, with a note of where it came from.
"""

from __future__ import annotations

from tasks.stage import Stage
from tasks.tracking import FURTHER_MODELS
from training.models import bring_checkpoint, bring_model
from training.storage import publishing, write_json, write_manifest


def model(stage: Stage) -> None:
    """Publish the base model, and the further models of model.more before it."""
    with publishing(stage.root / FURTHER_MODELS) as more:
        for name, config in stage.params.model.more.items():
            origin = bring_checkpoint(config, more / name, f"model.more.{name}")
            write_json(more / name / "source.json", origin)
            write_manifest(more / name)  # by which an adapter to it knows it
            print(
                f"model: {origin['source']} ({origin['revision']}) is in {FURTHER_MODELS}/{name}", flush=True
            )
            stage.run.tag(**{f"more.{name}": f"{origin['source']} {origin['revision']} {origin['license']}"})
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
