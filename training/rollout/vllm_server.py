"""The engine `vllm-server`: vLLM servers, on this or other machines, share every rollout; weights go to them over HTTP.

Each server is started by `python -m training.rollout.serve`. A server that fails gives its requests to the others; when
none is left, one that comes back is given the current weights. Every completion names the weights it was sampled
with, so that a server that was restarted or taken over by someone else can't answer unnoticed.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from training.config import LoraConfig, VLLMConfig
from training.errors import BadInput
from training.rollout.protocol import Completion, Request, Sampling
from training.rollout.vllm import START_SECONDS, EngineFault, check_sampling, completion
from training.rollout.weights import WeightFolder

CHUNK = 16 * 2**20
"""Bytes of a weight file in one request."""
PROBE_SECONDS = 10.0
FLOOR = -9999.0
"""The server writes this where it has no log-probability."""


class VLLMServerEngine:
    """Samples on `config.servers`; `end_ids` are the token ids that end a completion.

    With `lora.enabled` the frozen weights are pushed once to each server, and then its adapter alone.
    Raises BadInput when a server doesn't answer.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, end_ids: set[int], config: VLLMConfig, lora: LoraConfig
    ) -> None:
        self.end_ids, self.timeout = sorted(end_ids), config.timeout
        self._servers = [_Server(url, config.timeout) for url in config.servers]
        for server in self._servers:
            if not server.answers():
                raise BadInput(
                    f"rl.vllm.servers: {server.url} does not answer; start it with `python -m training.rollout.serve`"
                )
        self._temporary = tempfile.TemporaryDirectory(prefix="gradeline-vllm-")
        self._weights = WeightFolder(Path(self._temporary.name), model.config, lora.alpha)
        self._run = uuid.uuid4().hex

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """See RolloutEngine. Raises EngineFault when the servers fail twice."""
        check_sampling(sampling)
        if self._weights.version == 0:
            raise RuntimeError("the servers have no weights yet; call load_weights first")
        found: dict[int, Completion] = {}
        for _ in range(2):
            self._wait_for_one()
            missing = {i: request for i, request in enumerate(requests) if i not in found}
            asyncio.run(self._share(missing, sampling, found))
            if len(found) == len(requests):
                return [found[i] for i in range(len(requests))]
        raise EngineFault(f"{self} failed twice in one rollout")

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See RolloutEngine. A server that can't take them is left out until it can."""
        self._weights.put(named_tensors)
        self._push()
        self._wait_for_one()

    def close(self) -> None:
        """See RolloutEngine. The servers go on."""
        for server in self._servers:
            server.client.close()
        self._temporary.cleanup()

    def __str__(self) -> str:
        return f"vllm-server at {', '.join(server.url for server in self._servers)}"

    @property
    def _version(self) -> str:
        return f"{self._run}-{self._weights.version}"

    @property
    def _current(self) -> list[_Server]:
        return [server for server in self._servers if server.held == self._version]

    def _wait_for_one(self) -> None:
        """Until a server has the current weights; raises EngineFault when none comes back."""
        deadline = time.monotonic() + START_SECONDS
        while not self._current:
            if time.monotonic() > deadline:
                raise EngineFault(f"{self}: none came back in {START_SECONDS:g} seconds")
            time.sleep(1)
            self._push()

    def _push(self) -> None:
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(lambda server: server.take(self._weights, self._version), self._servers))

    async def _share(
        self, missing: dict[int, Request], sampling: Sampling, found: dict[int, Completion]
    ) -> None:
        """Sample the `missing` requests, neighbours on one server; a server that fails leaves its own missing."""
        numbers, servers = list(missing), self._current
        size = -(-len(numbers) // len(servers)) or 1
        shares = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        await asyncio.gather(
            *(
                self._sample(server, {i: missing[i] for i in share}, sampling, found)
                for server, share in zip(servers, shares, strict=False)
            )
        )

    async def _sample(
        self, server: _Server, share: dict[int, Request], sampling: Sampling, found: dict[int, Completion]
    ) -> None:
        limits = httpx.Limits(max_connections=None)
        try:
            async with (
                httpx.AsyncClient(base_url=server.url, timeout=self.timeout, limits=limits) as client,
                asyncio.timeout(self.timeout),
                asyncio.TaskGroup() as group,
            ):
                for i, request in share.items():
                    group.create_task(self._one(client, request, sampling, found, i))
        except* (httpx.HTTPError, EngineFault, TimeoutError) as errors:
            server.leave_out(errors.exceptions[0])

    async def _one(
        self,
        client: httpx.AsyncClient,
        request: Request,
        sampling: Sampling,
        found: dict[int, Completion],
        index: int,
    ) -> None:
        message: dict[str, Any] = {
            "token_ids": request.prompt_ids,
            "sampling_params": {
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "seed": request.seed,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": self.end_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if self._weights.adapter is not None:
            message["model"] = self._version
        answer = _checked(await client.post("/inference/v1/generate", json=message))
        [choice] = answer.json()["choices"]
        if {span["version"] for span in choice["weight_versions"] or []} != {self._version}:
            raise EngineFault("sampled with other weights than it was given")
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineFault(f"ended a completion with {choice['finish_reason']!r}")
        logprobs = [at["logprob"] if at["logprob"] > FLOOR else None for at in choice["logprobs"]["content"]]
        found[index] = completion(choice["token_ids"], logprobs, self.end_ids)


class _Server:
    """One server, and the version of the weights that it was given last (None: not known)."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.held: str | None = None
        self.client = httpx.Client(base_url=url, timeout=timeout)

    def answers(self) -> bool:
        """Whether it says within `PROBE_SECONDS` that it is well."""
        try:
            return self.client.get("/health", timeout=PROBE_SECONDS).is_success
        except httpx.HTTPError:
            return False

    def leave_out(self, why: object) -> None:
        """Say why the server gets no requests until it took weights again."""
        self.held = None
        print(f"vllm-server: {self.url} is left out: {why!r}", file=sys.stderr, flush=True)

    def take(self, weights: WeightFolder, version: str) -> None:
        """Give it the weights, by the name `version`; it is left out when that fails."""
        if not self.answers():
            self.leave_out("no answer")
            return
        try:
            self._ask("/abort_requests")
            # a server that was started anew has another version, and random weights
            known = self.held is not None and self._version() == self.held
            if weights.adapter is None or not known:
                self._send(weights.weights)
                self._call("take_received")
            if weights.adapter is not None:
                for path in weights.adapter.iterdir():
                    folder = self._send(path)
                self._ask("/v1/load_lora_adapter", lora_name=version, lora_path=folder, load_inplace=True)
                if known and self.held != version:
                    self._ask("/v1/unload_lora_adapter", lora_name=self.held)
            self._forget()
            self._ask("/update_weight_version", new_version=version)
            self.held = version
        except (httpx.HTTPError, EngineFault) as error:
            self.leave_out(error)

    def _version(self) -> str:
        return str(_checked(self.client.get("/weight_info")).json()["weight_version"])

    def _forget(self) -> None:
        """Drop the keys and values of older weights, which must wait for requests under way (the server's own probes)."""
        deadline = time.monotonic() + PROBE_SECONDS
        while not self._ask("/reset_prefix_cache").json()["success"]:
            if time.monotonic() > deadline:
                raise EngineFault("it does not forget the keys and values of older weights")
            time.sleep(0.1)

    def _send(self, path: Path) -> str:
        """Send a file to its workers; returns the folder where the first of them put it."""
        folder, begin = "", "yes"
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                folder = self._call("receive", path.name, base64.b64encode(data).decode(), begin)
                begin = "no"
        return folder

    def _call(self, method: str, *arguments: str) -> str:
        return str(self._ask("/collective_rpc", method=method, args=arguments).json()["results"][0])

    def _ask(self, path: str, **message: Any) -> httpx.Response:
        return _checked(self.client.post(path, json=message))


def _checked(answer: httpx.Response) -> httpx.Response:
    if not answer.is_success:
        raise EngineFault(f"{answer.request.url} answered {answer.status_code}: {answer.text[:1000]}")
    return answer
