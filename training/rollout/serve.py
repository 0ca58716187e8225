"""A server for the engine `vllm-server`: `python -m training.rollout.serve MODEL --port 8001 --max-length 512`.

Runs vLLM's own server with what the engine needs, and starts it again when it dies or no longer samples. MODEL is a
model's folder, of which only the shape is used: the weights come from the trainer. Further arguments go to vLLM.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import httpx

from training.adapters import whole_model
from training.rollout.vllm import START_SECONDS, room_for, vllm_environment
from training.rollout.vllm_process import EXTENSION

PROBE_EVERY = 5.0
"""Seconds between probes, each of which samples one token."""


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    options, further = _options()
    command, environment = command_of(options, further)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    while True:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            why = _watch(process, f"http://{options.host}:{options.port}", options.patience)
        finally:
            _kill(process)
        print(f"serve: {why}; starting vLLM again", file=sys.stderr, flush=True)


def command_of(options: argparse.Namespace, further: list[str]) -> tuple[list[str], dict[str, str]]:
    """vLLM's own server as the engine needs it, and its environment. `vllm serve` lacks in the CPU's package."""
    from vllm.platforms import current_platform

    environment = vllm_environment(current_platform.device_type)
    # what the engine calls to push weights and to reset the cache
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    settings = {
        "model": str(whole_model(options.model)),
        "host": options.host,
        "port": options.port,
        "dtype": options.dtype,
        "max-model-len": options.max_length,
        "kv-cache-memory-bytes": int(options.kv_cache_gib * 2**30),
        "load-format": "dummy",
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": EXTENSION,
        "gpu-memory-utilization": 0.01,
    }
    if options.lora_rank:
        settings |= {"max-loras": 1, "max-lora-rank": room_for(options.lora_rank)}
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    command += ["--skip-tokenizer-init", "--tokens-only"]
    command += ["--enable-lora"] if options.lora_rank else []
    # a compiled graph would keep the CPU's first packed weights
    command += ["--enforce-eager"] if current_platform.is_cpu() else []
    return command + further, environment


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m training.rollout.serve", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model that the policy starts from")
    add(
        "--host", default="127.0.0.1", help="address to listen on; whoever reaches it can replace the weights"
    )
    add("--port", type=int, default=8001)
    add("--max-length", type=int, required=True, help="longest prompt with its completion, in tokens")
    add("--dtype", default="auto", help="the trainer's: float32 on a CPU")
    add("--kv-cache-gib", type=float, default=1.0, help="memory for keys and values, in GiB")
    add("--lora-rank", type=int, default=0, help="rl.lora.r, for a policy with adapters")
    add("--patience", type=float, default=120.0, help="seconds without a sampled token that count as hung")
    return parser.parse_known_args()


def _watch(process: subprocess.Popen[bytes], url: str, patience: float) -> str:
    """Return, with the reason, when the server has to be replaced."""
    deadline = time.monotonic() + START_SECONDS
    message = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"vLLM ended with exit status {process.returncode}"
        try:
            left = max(1.0, deadline - time.monotonic())
            answer = httpx.post(f"{url}/inference/v1/generate", json=message, timeout=min(left, patience))
            if answer.is_success:
                deadline = time.monotonic() + patience
        except httpx.HTTPError:
            pass
        time.sleep(PROBE_EVERY)
    return "vLLM no longer samples"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
