"""The process that vLLM runs in: `python -m training.rollout.vllm_process FD`, and how its workers take weights.

FD is one end of a socket. Both sides write JSON; nothing is pickled. The first message holds the settings, and
every other asks for one thing; each gets one answer, with `error` in it when it failed.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

EXTENSION = "training.rollout.vllm_process.TakesWeights"
"""What vLLM's workers are extended with."""
RECEIVED = ("model.safetensors", "adapter_model.safetensors", "adapter_config.json")
"""Files that come over the network: the whole model's weights, and an adapter's."""


class TakesWeights:
    """Mixed into vLLM's worker, whose `model_runner` and `reload_weights` it uses."""

    model_runner: Any
    reload_weights: Any
    _received: tempfile.TemporaryDirectory[str] | None = None

    def take_weights(self, path: str) -> None:
        """Load a safetensors file in place. Raises RuntimeError when a layer would go on with older weights."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
        for name, layer in self.model_runner.get_model().named_modules():
            # On a CPU, layers multiply with a packed copy of their weight. Reloading packs anew where the file names
            # the weight itself; an output layer tied to the embedding kept the old copy.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
                _check(name, layer)

    def receive(self, name: str, data: str, begin: str) -> str:
        """Append base64 `data` to the file `name`, a new one where `begin` is "yes"; returns the folder it is in."""
        if name not in RECEIVED:
            raise ValueError(f"{name!r}: expected one of {', '.join(RECEIVED)}")
        if self._received is None:
            self._received = tempfile.TemporaryDirectory(prefix="gradeline-weights-")
        with (Path(self._received.name) / name).open("wb" if begin == "yes" else "ab") as file:
            file.write(base64.b64decode(data))
        return self._received.name

    def take_received(self) -> None:
        """`take_weights` of the received whole model, which is then deleted."""
        assert self._received is not None
        path = Path(self._received.name) / RECEIVED[0]
        self.take_weights(str(path))
        path.unlink()


def _check(name: str, layer: Any) -> None:
    """Compare one product with the weight's own, to within what rounding can do."""
    weight = layer.weight
    probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
    wide, exact = weight.double(), probe.double()
    off = (layer.cpu_linear(probe, weight, None).double() - exact @ wide.T).abs()
    if (off > 64 * torch.finfo(weight.dtype).eps * (exact.abs() @ wide.abs().T)).any():
        raise RuntimeError(f"{name}: this build of vLLM multiplies with other weights than it was given")


def serve(connection: Connection) -> None:
    """Start vLLM with the settings that arrive first, then answer until the other side is gone."""
    engine = None
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        answer: dict[str, Any] = {}
        try:
            if engine is None:
                engine = _Engine(message)
            else:
                answer = getattr(engine, message.pop("do"))(**message)
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.send_bytes(json.dumps(answer).encode())


class _Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        device = settings.pop("device")
        if device != current_platform.device_type:
            raise RuntimeError(
                f"device is {device}, and this vLLM is built for {current_platform.device_type}"
            )
        self.sleeps = current_platform.is_sleep_mode_available()
        self.llm = LLM(
            **settings,
            enable_sleep_mode=self.sleeps,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            # a compiled graph would keep the CPU's first packed weights
            enforce_eager=current_platform.is_cpu(),
            # the cache's size is given, so this is only what must be free
            gpu_memory_utilization=0.01,
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
        )
        self.asleep = False

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        temperature: float,
        max_tokens: int,
        end_ids: list[int],
        adapter: str | None,
        version: int,
    ) -> dict[str, Any]:
        """Ids and log-probabilities (null where vLLM gives none) of a completion for each prompt."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._wake()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                SamplingParams(
                    temperature=temperature,
                    seed=seed,
                    max_tokens=max_tokens,
                    stop_token_ids=end_ids,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                )
                for seed in seeds
            ],
            lora_request=None if adapter is None else LoRARequest(f"policy-{version}", version, adapter),
            use_tqdm=False,
        )
        found = []
        for output in (o.outputs[0] for o in outputs):
            if output.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
            given = [at.get(t) for at, t in zip(output.logprobs or [], output.token_ids, strict=False)]
            logprobs = [None if one is None else one.logprob for one in given]
            missing = len(output.token_ids) - len(logprobs)
            found.append([list(output.token_ids), logprobs + [None] * missing])
        self._sleep()
        return {"completions": found}

    def load(self, path: str | None) -> dict[str, Any]:
        """New weights from a file (null: an adapter alone is new); what was cached under older ones is forgotten."""
        self._wake()
        if path is not None:
            self.llm.collective_rpc("take_weights", args=(path,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget the keys and values of older weights")
        self._sleep()
        return {}

    def _sleep(self) -> None:
        """Give the memory of weights and cache to the trainer until they are needed."""
        if self.sleeps:
            self.llm.sleep(level=1)
            self.asleep = True

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
