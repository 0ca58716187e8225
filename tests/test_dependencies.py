"""dvc.yaml names the code that each stage runs, so that a change of it reruns the stage."""

import ast

import pytest
import yaml

from tasks.config import STAGES
from tests.shared import ROOT

NOT_RESULTS = {f"training/{name}.py" for name in ("__init__", "errors", "recorder", "storage")} | {
    str(path.relative_to(ROOT)) for path in (ROOT / "training" / "config").glob("*.py")
}
"""Settings reach a stage through params.yaml; errors, records and how files are written change no result."""


def imported(path: str) -> set[str]:
    """Files of training/ that a file imports, at any level of its code."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith("training"):
                module = name.replace(".", "/")
                found |= {p for p in (f"{module}.py", f"{module}/__init__.py") if (ROOT / p).is_file()}
    return found


def closure(path: str) -> set[str]:
    """All files of training/ behind a file."""
    found, open_ = set(), {path}
    while open_:
        new = imported(open_.pop()) - found
        found |= new
        open_ |= new - NOT_RESULTS
    return found - NOT_RESULTS


@pytest.mark.parametrize("stage", STAGES)
def test_every_module_behind_a_stage_is_among_its_dependencies(stage):
    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    assert f"tasks/{stage}.py" in deps
    missing = {
        module
        for module in closure(f"tasks/{stage}.py")
        if not any(module == d or module.startswith(f"{d}/") for d in deps)
    }
    assert not missing


@pytest.mark.parametrize("stage", STAGES)
def test_no_dependency_on_code_is_idle(stage):
    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    behind = closure(f"tasks/{stage}.py")
    idle = [
        d
        for d in deps
        if d.startswith("training") and not any(m == d or m.startswith(f"{d}/") for m in behind)
    ]
    assert not idle
