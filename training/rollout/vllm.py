"""The engine `vllm`: vLLM beside the trainer on one machine, in a process of its own that can be replaced.

The process starts with the first weights, and again when it dies or hangs; as every request has its own random
stream and the folder holds the weights given last, the second try gives what the first would have given.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from training.config import LoraConfig, VLLMConfig
from training.errors import BadInput
from training.rollout.protocol import Completion, Request, Sampling
from training.rollout.weights import WeightFolder

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next one."""
PACKAGES = Path(__file__).parents[2]
LOG_LINES = 20
START_SECONDS = 600.0
"""What a start may take, where `timeout` is shorter."""


class EngineFault(RuntimeError):
    """The engine died, hung or failed; the message says which and shows the end of its log."""


class EngineReport(EngineFault):
    """The engine reported an error of vLLM's."""


class VLLMEngine:
    """Samples with vLLM; `end_ids` are the token ids that end a completion.

    `max_length` is the longest prompt with its completion, in tokens. With `lora.enabled` the policy's frozen weights
    are given to vLLM once, and its adapter runs beside them (Punica, arXiv:2310.18547) in every rollout.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        end_ids: set[int],
        max_length: int,
        max_batch_size: int,
        config: VLLMConfig,
        lora: LoraConfig,
    ) -> None:
        self.end_ids, self.timeout = sorted(end_ids), config.timeout
        temporary = tempfile.TemporaryDirectory(prefix="gradeline-vllm-")
        self._temporary, self._log = temporary, Path(temporary.name) / "log.txt"
        self._weights = WeightFolder(Path(temporary.name), model.config, lora.alpha)
        self._process: _Process | None = None
        self._settings: dict[str, Any] = {
            "model": str(self._weights.model),
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": max_length,
            "max_num_seqs": max_batch_size,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "seed": 0,
        }
        if lora.enabled:
            self._settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(lora.r)}

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """See RolloutEngine. Raises EngineFault when the engine fails twice."""
        check_sampling(sampling)
        if self._weights.version == 0:
            raise RuntimeError("vLLM has no weights yet; call load_weights first")
        message = {
            "do": "generate",
            "prompts": [request.prompt_ids for request in requests],
            "seeds": [request.seed for request in requests],
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "end_ids": self.end_ids,
            "adapter": self._weights.adapter and str(self._weights.adapter),
            "version": self._weights.version,
        }
        if self._process is None:
            self._start()
        try:
            answer = self._ask(message)
        except EngineFault as fault:
            print(
                f"vllm: {fault}\nvllm: starting again with the current weights", file=sys.stderr, flush=True
            )
            self._start()
            answer = self._ask(message)
        return [completion(ids, logprobs, self.end_ids) for ids, logprobs in answer["completions"]]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See RolloutEngine. The first weights start the engine; so do others when it is gone.

        Raises BadInput when vLLM does not run this model with these settings.
        """
        whole = self._weights.adapter is None
        self._weights.put(named_tensors)
        if self._process is None:
            try:
                self._start()
            except EngineReport as error:
                raise BadInput(
                    f"rl.engine = 'vllm': vLLM does not start with this model here:\n{error}"
                ) from None
            return
        try:
            self._ask({"do": "load", "path": str(self._weights.weights) if whole else None})
        except EngineFault as fault:
            print(f"vllm: {fault}\nvllm: starting again with the new weights", file=sys.stderr, flush=True)
            self._start()

    def close(self) -> None:
        """See RolloutEngine."""
        if self._process is not None:
            self._process.end()
        self._process = None
        self._temporary.cleanup()

    @property
    def pid(self) -> int | None:
        """The process that vLLM runs in."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = _Process(self._settings["device"], self._log)
        self._ask(self._settings, max(self.timeout, START_SECONDS))

    def _ask(self, message: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        assert self._process is not None
        try:
            return self._process.ask(message, timeout or self.timeout)
        except EngineFault:
            self._process.end()
            self._process = None
            raise


class _Process:
    """A running `vllm_process`, ended with this object."""

    def __init__(self, device: str, log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "training.rollout.vllm_process", str(theirs.fileno())]
        with theirs, log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=vllm_environment(device) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid, self._log = process.pid, log
        self._connection = Connection(os.dup(self._socket.fileno()))
        self.end = weakref.finalize(self, _end, process, self._connection, self._socket)

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer; raises EngineFault when the process is silent for `timeout` seconds, dies or reports an error."""
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", math.ceil(timeout), 0))
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except BlockingIOError as error:
            raise EngineFault(
                f"no answer within {timeout:g} seconds (rl.vllm.timeout){self._tail()}"
            ) from error
        except (EOFError, OSError) as error:
            raise EngineFault(f"the engine's process died{self._tail()}") from error
        if "error" in answer:
            raise EngineReport(answer["error"])
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "".join(f"\n    {line}" for line in ["; the end of its log:", *lines] if lines)


def vllm_environment(device: str) -> dict[str, str]:
    """Environment of a process that runs vLLM: this one's, this package on its path, telemetry off, no downloads."""
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    forced = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        threads = str(torch.get_num_threads())
        forced |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # the sampler is compiled otherwise, which takes longer than a short run samples
        forced["TORCH_COMPILE_DISABLE"] = "1"
    return defaults | os.environ | forced


def check_sampling(sampling: Sampling) -> None:
    """Raise BadInput for what vLLM can't draw with the log-probabilities that `Sampling` asks for."""
    if sampling.top_p < 1:
        raise BadInput(
            f"top_p = {sampling.top_p}: vLLM gives log-probabilities of the cut distribution; use engine native, or 1.0"
        )
    if sampling.greedy and sampling.temperature != 1:
        raise BadInput(
            f"temperature = {sampling.temperature}: vLLM's greedy log-probabilities are untempered; use engine native, "
            "or 1.0"
        )


def completion(ids: list[int], logprobs: list[float | None], end_ids: Iterable[int]) -> Completion:
    """What vLLM sampled; NaN stands for a log-probability that it did not give."""
    known = [math.nan if logprob is None else logprob for logprob in logprobs]
    return Completion(ids, known, "stop" if ids[-1] in end_ids else "length")


def room_for(rank: int) -> int:
    """The smallest of vLLM's ranks that an adapter of `rank` fits in; BadInput where there is none."""
    for room in RANKS:
        if rank <= room:
            return room
    raise BadInput(f"rl.lora.r = {rank}: vLLM takes adapters of rank {RANKS[-1]} at most; use engine native")


def _end(process: subprocess.Popen[bytes], connection: Connection, ours: socket.socket) -> None:
    connection.close()
    ours.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
