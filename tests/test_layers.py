"""flows → tasks → training: imports go one way, and each library has its layer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config import STAGES
from tests.project import REPOSITORY

FORBIDDEN = {
    "training": {"flows", "tasks", "prefect", "mlflow", "dvc", "great_expectations"},
    "tasks": {"flows", "prefect"},
}


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {
                a.value.split(".")[0]
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return found


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_does_not_import_what_is_above_it(layer: str) -> None:
    files = list((REPOSITORY / layer).rglob("*.py"))
    assert files
    wrong = {
        str(file.relative_to(REPOSITORY)): found
        for file in files
        if (found := imported(file) & FORBIDDEN[layer])
    }
    assert wrong == {}


def test_the_command_line_starts_without_anything_heavy() -> None:
    heavy = ["torch", "transformers", "mlflow", "prefect", "dvc", "pandas", "great_expectations", "pydantic"]
    code = f"import sys, flows.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_stage_that_learns_nothing_starts_without_torch() -> None:
    """A stage that is switched off needs `tasks.stage` alone."""
    code = "import sys, tasks.stage, tasks.prepare, tasks.report; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_stage_starts_without_what_only_a_switched_on_one_needs() -> None:
    """These take seconds to import; `transformers`, imported as a module, loads its parts when they are used."""
    heavy = ["transformers.modeling_utils", "peft", "great_expectations"]
    modules = ", ".join(f"tasks.{stage}" for stage in STAGES)
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
