"""Where real data sets lie that the tests may read and the repository does not hold."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_SHARED = Path(os.environ.get("GRADELINE_SHARED", ROOT.parent / "shared"))
SHARED = _SHARED / "data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason=f"no data sets at {SHARED}; set GRADELINE_SHARED to the folder that holds data/",
)


def reference_values() -> list[Path]:
    """The files named in REFERENCE_VALUES, which must exist, or the default one; empty where there is none."""
    if named := os.environ.get("REFERENCE_VALUES"):
        return [Path(name).resolve(strict=True) for name in named.split(":")]
    default = _SHARED / "golden" / "rl_math.json"
    return [default] if default.is_file() else []


def needs_sandbox() -> pytest.MarkDecorator:
    """Skips where programs can't be run in a sandbox, and says why."""
    from training.sandbox.bubblewrap import why_unavailable

    reason = why_unavailable()
    return pytest.mark.skipif(reason is not None, reason=f"no sandbox: {reason}")
