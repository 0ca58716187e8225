"""Run one stage of the working directory's tree: `python -m tasks STAGE`."""

import sys
from importlib import import_module

from tasks.config import STAGES
from tasks.stage import Stage, run_stage


def body(stage: Stage) -> None:
    """What the stage's own module does; it is imported now, for a stage that is switched off needs none of it."""
    getattr(import_module(f"tasks.{stage.name}"), stage.name)(stage)


if len(sys.argv) != 2 or sys.argv[1] not in STAGES:
    sys.exit(f"usage: python -m tasks STAGE, one of {', '.join(STAGES)}")
run_stage(sys.argv[1], body)
