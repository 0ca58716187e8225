"""`judge` against a real HTTP server that behaves as endpoints do, well and badly."""

import json
import logging
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from training.config import JudgeRewardConfig, RewardsConfig
from training.errors import BadInput
from training.rewards import RewardSum
from training.rewards.explained import finished
from training.rewards.judge import JudgeReward

KEY = "sk-very-secret"


class Endpoint(ThreadingHTTPServer):
    """/v1/chat/completions: the completion's length is its score; words in it make the endpoint misbehave."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.headers, self.times = [], [], []
        self.busy = self.busiest = 0
        self.down = False
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].split("|")[1]
        with server.lock:
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
            server.asked.append(text)
            server.times.append(time.monotonic())
            server.headers.append(dict(self.headers))
            nth = server.asked.count(text)
        status, said, headers = self.behave(text, nth, body)
        with server.lock:
            server.busy -= 1
        payload = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def behave(self, text, nth, body):
        def chat(content):
            return {"choices": [{"message": {"role": "assistant", "content": content}}]}

        if self.server.down:
            return 503, {"error": "down"}, {}
        if text == "refused" or body["model"] != "grader":
            return 404 if body["model"] != "grader" else 401, {"error": "no"}, {}
        if text == "busy" and nth <= 2:
            return 429, {"error": "slow down"}, {"Retry-After": "0.2"}
        if text == "broken" and nth == 1:
            return 500, b"<html>oops</html>", {}
        if text == "garbage" and nth == 1:
            return 200, b"{not json", {}
        if text == "too long":
            return 400, {"error": "context length"}, {}
        if text == "slow" and nth == 1:
            time.sleep(1.5)
        if text == "waits":
            time.sleep(0.1)
        if text == "chatty":
            return 200, chat("Score: 3 or so"), {}
        if text == "out of range":
            return 200, chat("Score: 11"), {}
        if text == "hidden":
            return 200, chat("Score: 9\nthough I am not sure"), {}
        return 200, chat(f"It is short.\nScore: {len(text)}\n"), {}

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def endpoint():
    with serving(Endpoint()) as server:
        yield server


def config(endpoint, **settings):
    standard = {
        "model": "grader",
        "rubric": "|{completion}|",
        "backoff": 0.01,
        "retries": 2,
        "timeout": 0.5,
        "cache": None,
    }
    return JudgeRewardConfig.model_validate(standard | {"base_url": endpoint.url} | settings)


def grade(reward, *texts, **columns):
    [found] = finished([reward.explain(prompts=["p"] * len(texts), completions=texts, **columns)])
    return found


def scores(reward, *texts):
    return [one.score for one in grade(reward, *texts)]


def test_scores_are_between_minimum_and_maximum(endpoint):
    reward = JudgeReward(config(endpoint))
    assert scores(reward, "abc", "abcde", "") == [0.3, 0.5, 0.0]
    reward = JudgeReward(config(endpoint, minimum=1, maximum=5))
    assert scores(reward, "abc") == [0.5]
    assert grade(reward, "abc")[0].extracted == "Score: 3"


@pytest.mark.parametrize(("text", "tries"), [("busy", 3), ("broken", 2), ("garbage", 2), ("slow", 2)])
def test_what_passes_is_tried_again(endpoint, text, tries):
    assert scores(JudgeReward(config(endpoint)), text) == [len(text) / 10]
    assert endpoint.asked == [text] * tries


def test_a_pause_that_the_endpoint_asks_for_is_kept(endpoint):
    scores(JudgeReward(config(endpoint)), "busy")
    first, second, third = endpoint.times
    assert min(second - first, third - second) >= 0.2


@pytest.mark.parametrize(
    ("text", "reason", "tries"),
    [
        ("chatty", "no score in its last line 'Score: 3 or so'", 3),
        ("out of range", "no score in its last line 'Score: 11'", 3),
        ("hidden", "no score in its last line 'though I am not sure'", 3),
        ("too long", "HTTP 400", 1),
    ],
)
def test_only_a_line_that_is_a_score_counts(endpoint, text, reason, tries):
    [one] = grade(JudgeReward(config(endpoint)), text)
    assert (one.score, one.reason) == (None, f"the judge gave no score: {reason}")
    assert len(endpoint.asked) == tries


def test_an_outage_gives_none_which_the_sum_leaves_out_and_then_it_recovers(endpoint):
    judge = JudgeReward(config(endpoint, concurrency=1))
    rewards = RewardSum(["judge", "format"], None, RewardsConfig(), {"judge": judge})
    endpoint.down = True
    texts = [f"text {i}" for i in range(6)]
    found = rewards.score([""] * 6, texts)
    assert found.parts == {"judge": [None] * 6, "format": [0.0] * 6}
    assert found.total == [0.0] * 6
    assert len(endpoint.asked) == 3 + 5  # once it has failed for good, the others try once
    endpoint.down = False
    assert scores(judge, *texts) == [0.6] * 6


def test_nobody_listening_gives_none():
    reward = JudgeReward(
        JudgeRewardConfig(
            base_url="http://127.0.0.1:9/v1", retries=1, backoff=0, cache=None, rubric="{completion}"
        )
    )
    assert grade(reward, "a")[0].reason == "the judge gave no score: ConnectError"


def test_nothing_is_asked_twice_and_a_file_remembers(endpoint, tmp_path):
    cache = str(tmp_path / "kept" / "judge.sqlite")
    reward = JudgeReward(config(endpoint, cache=cache))
    assert scores(reward, "ab", "ab", "abc") == [0.2, 0.2, 0.3]
    assert scores(JudgeReward(config(endpoint, cache=cache)), "abc", "ab") == [0.3, 0.2]
    assert sorted(endpoint.asked) == ["ab", "abc"]
    assert scores(JudgeReward(config(endpoint, cache=cache, rubric="||{completion}|")), "ab") == [0.0]
    assert len(endpoint.asked) == 3  # another rubric is another question


def test_requests_under_way_are_limited_and_so_is_their_rate(endpoint):
    reward = JudgeReward(config(endpoint, concurrency=2))
    scores(reward, *(f"waits{' ' * i}" for i in range(5)), "waits")
    assert endpoint.busiest <= 2
    endpoint.times.clear()
    reward = JudgeReward(config(endpoint, requests_per_minute=600))
    scores(reward, *"abcd")
    pauses = [b - a for a, b in zip(endpoint.times, endpoint.times[1:], strict=False)]
    assert len(pauses) == 3
    assert sum(pauses) >= 0.25


def test_the_key_is_sent_and_never_shown(endpoint, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    reward = JudgeReward(config(endpoint, api_key_env="JUDGE_KEY"))
    assert scores(reward, "abc") == [0.3]
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    with pytest.raises(BadInput, match="answered 401: the key was refused") as error:
        scores(reward, "refused")
    assert KEY not in caplog.text + str(error.value) + repr(reward.config)


def test_what_no_retry_can_mend_is_bad_input(endpoint, monkeypatch):
    with pytest.raises(BadInput, match="404: no such endpoint or model \\(model 'other'"):
        scores(JudgeReward(config(endpoint, model="other")), "a")
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(BadInput, match="api_key_env = 'NO_KEY': this environment variable is not set"):
        JudgeReward(config(endpoint, api_key_env="NO_KEY"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rubric": "Is it good?"}, "must contain {completion}"),
        ({"minimum": 3, "maximum": 3}, "minimum 3.0 must be less than maximum 3.0"),
        ({"base_url": "localhost:8000"}, "base_url 'localhost:8000' is no address"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeRewardConfig.model_validate(settings)


def test_the_rubric_shows_the_rows_texts_once():
    """A completion that holds a placeholder stays as it is."""
    reward = JudgeReward(JudgeRewardConfig(rubric="{prompt}|{completion}|{answer}", cache=None))
    body = json.loads(reward._request("p", "{answer}", "42"))
    assert body["messages"][0]["content"].startswith("p|{answer}|42\n\nEnd with a line `Score: N`")
