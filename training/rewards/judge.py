"""`judge`: a model behind an OpenAI-compatible endpoint (vLLM's server, say) grades by a rubric.

The judge is told to end with a line `Score: N`; nothing else counts as a score. What passes by itself (no
connection, too slow, 408, 409, 429, 5xx, an answer without a score) is tried again with growing pauses. A completion
that could not be graded has None. Scores are kept by content, so that nothing is asked twice, by a resumed run either.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from training.config import JudgeRewardConfig
from training.errors import BadInput
from training.rewards.explained import Explained

_SCORE = re.compile(r"\s*Score:\s*([-+]?\d+(?:\.\d+)?)\s*")
_PASSING = {408, 409, 425, 429}
_REFUSED = {401: "the key was refused", 403: "the key was refused", 404: "no such endpoint or model"}
_LONGEST_PAUSE = 60.0
_JITTER = random.SystemRandom()  # spreads retries; no result depends on it


class JudgeReward:
    """The judge's score from 0 (`minimum`) to 1 (`maximum`), None where there was none."""

    def __init__(self, config: JudgeRewardConfig) -> None:
        self.config = config
        self._headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise BadInput(
                    f"rewards.judge.api_key_env = {config.api_key_env!r}: this environment variable is not set; "
                    "null sends no key"
                )
            self._headers = {"Authorization": f"Bearer {key}"}
        self._scores = _Kept(Path(config.cache)) if config.cache is not None else _Kept(None)
        self._next_start = 0.0
        self._is_down = False

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | None]:
        return [one.score for one in await self.explain(prompts, completions, **columns)]

    async def explain(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answer: Sequence[str] | None = None,
        **_: Any,
    ) -> list[Explained]:
        """The scores, with the judge's last line and why there is none.

        Raises BadInput where the endpoint refuses the key or doesn't know the model.
        """
        answers = answer if answer is not None else [""] * len(completions)
        texts = [
            self._request(prompt, text, right)
            for prompt, text, right in zip(prompts, completions, answers, strict=True)
        ]
        limit = asyncio.Semaphore(self.config.concurrency)
        async with httpx.AsyncClient(headers=self._headers, timeout=None) as client:
            found = {
                text: asyncio.ensure_future(self._graded(text, client, limit))
                for text in dict.fromkeys(texts)
            }
            try:
                await asyncio.gather(*found.values())
            finally:
                for task in found.values():
                    task.cancel()
        return [found[text].result() for text in texts]

    def _request(self, prompt: str, completion: str, answer: str) -> str:
        config = self.config
        values = {"prompt": prompt, "completion": completion, "answer": answer}
        shown = re.sub(r"\{(prompt|completion|answer)\}", lambda match: str(values[match[1]]), config.rubric)
        asked = f"{shown}\n\nEnd with a line `Score: N`, N a number from {config.minimum:g} to {config.maximum:g}."
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        return json.dumps(body, sort_keys=True)

    async def _graded(self, body: str, client: httpx.AsyncClient, limit: asyncio.Semaphore) -> Explained:
        config = self.config
        key = hashlib.sha256(
            f"{config.base_url}\n{config.minimum}\n{config.maximum}\n{body}".encode()
        ).hexdigest()
        if (kept := self._scores.get(key)) is not None:
            return self._explained(*kept)
        reason = ""
        async with limit:
            for attempt in range(config.retries + 1):
                await self._slot()
                said, reason, pause = await self._ask(body, client)
                if said is not None:
                    self._is_down = False
                    self._scores.put(key, *said)
                    return self._explained(*said)
                if pause is None or self._is_down or attempt == config.retries:
                    break
                growing = config.backoff * 2**attempt * _JITTER.uniform(0.5, 1.0)
                await asyncio.sleep(min(_LONGEST_PAUSE, max(pause, growing)))
            self._is_down = pause is not None
        return Explained(None, reason=f"the judge gave no score: {reason}")

    def _explained(self, score: float, line: str) -> Explained:
        low, high = self.config.minimum, self.config.maximum
        return Explained((score - low) / (high - low), line, f"{score:g} from {low:g} to {high:g}")

    async def _slot(self) -> None:
        """Wait until the rate limit lets the next request start."""
        if self.config.requests_per_minute is None:
            return
        start = max(self._next_start, time.monotonic())
        self._next_start = start + 60 / self.config.requests_per_minute
        await asyncio.sleep(start - time.monotonic())

    async def _ask(
        self, body: str, client: httpx.AsyncClient
    ) -> tuple[tuple[float, str] | None, str, float | None]:
        """One request: the score with its line, else why there is none and the least pause before another try, in
        seconds (None: no use)."""
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        try:
            async with asyncio.timeout(self.config.timeout):
                reply = await client.post(
                    url, content=body.encode(), headers={"Content-Type": "application/json"}
                )
        except TimeoutError:
            return None, f"nothing within {self.config.timeout:g} s", 0.0
        except httpx.HTTPError as error:
            return None, type(error).__name__, 0.0
        if reply.status_code in _REFUSED:
            raise BadInput(
                f"rewards.judge: {url} answered {reply.status_code}: {_REFUSED[reply.status_code]} "
                f"(model {self.config.model!r}, api_key_env {self.config.api_key_env!r})"
            )
        if reply.status_code != 200:
            passes = reply.status_code in _PASSING or reply.status_code >= 500
            return None, f"HTTP {reply.status_code}", _retry_after(reply) if passes else None
        try:
            text = str(reply.json()["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError):
            return None, "not a chat completion", 0.0
        line = (text.strip().splitlines() or [""])[-1]
        match = _SCORE.fullmatch(line)
        if match is None or not self.config.minimum <= float(match[1]) <= self.config.maximum:
            return None, f"no score in its last line {line[:80]!r}", 0.0
        return (float(match[1]), line.strip()), "", None


def _retry_after(reply: httpx.Response) -> float:
    seconds = reply.headers.get("Retry-After", "")
    return float(seconds) if re.fullmatch(r"\d+(\.\d+)?", seconds) else 0.0


class _Kept:
    """Scores by key in an SQLite file that several processes may share; in memory alone without a path."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.known = path, dict[str, tuple[float, str]]()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL, line TEXT)"
                )

    def _open(self) -> Any:
        return closing(sqlite3.connect(str(self.path), timeout=60, isolation_level=None))

    def get(self, key: str) -> tuple[float, str] | None:
        if key not in self.known and self.path is not None:
            with self._open() as file:
                row = file.execute("SELECT score, line FROM scores WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self.known[key] = row
        return self.known.get(key)

    def put(self, key: str, score: float, line: str) -> None:
        self.known[key] = score, line
        if self.path is not None:
            with self._open() as file:
                file.execute("INSERT OR IGNORE INTO scores VALUES (?, ?, ?)", (key, score, line))
