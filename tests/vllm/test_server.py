"""The engine `vllm-server` on two real servers that share the rollouts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
import torch

from tests.shared import ROOT
from tests.vllm.models import ENDS, LENGTH, TEMPERED, check_agrees, requests, small_llama
from training.config import LoraConfig, VLLMConfig
from training.errors import BadInput
from training.policy import Policy
from training.rollout.vllm_server import VLLMServerEngine

LORA = LoraConfig(enabled=True, r=4, alpha=12.0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Processes that keep a server each, by its address; the model in their folder has other weights than any test's."""
    folder = tmp_path_factory.mktemp("model")
    small_llama(99, tied=True).save_pretrained(folder)
    running = {}
    for number in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "training.rollout.serve", str(folder), "--port", str(port)]
        command += [
            "--max-length",
            str(LENGTH),
            "--dtype",
            "float32",
            "--kv-cache-gib",
            "0.25",
            "--lora-rank",
            "4",
            "--patience",
            "20",
        ]
        with (folder / f"log-{number}.txt").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            running[f"http://127.0.0.1:{port}"] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )
    deadline = time.monotonic() + 300
    for url in running:
        while not answers(url):
            assert time.monotonic() < deadline, "the servers did not start"
            time.sleep(0.5)
    yield running
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def served(url: str) -> float:
    """Completions that a server has finished, by its own count."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def start(servers, model, lora=None, timeout=300.0) -> VLLMServerEngine:
    torch.set_num_threads(1)
    return VLLMServerEngine(
        model, ENDS, VLLMConfig(servers=list(servers), timeout=timeout), lora or LoraConfig()
    )


def test_servers_agree_with_the_native_engine_before_and_after_new_weights(servers):
    engine = start(servers, small_llama(0, tied=True))
    for seed in (0, 1, 2):
        model = small_llama(seed, tied=True)
        engine.load_weights(model.named_parameters())
        samples = check_agrees(engine, model)
    assert [c.ids for c in engine.generate(requests(4)[::-1], TEMPERED)[::-1]] == [c.ids for c in samples]
    engine.close()


def test_an_adapter_runs_beside_its_frozen_weights_on_every_server(servers):
    policy = Policy(small_llama(0, tied=True), LORA, seed=1)
    policy.model.eval()
    engine = start(servers, policy.model, LORA)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for parameter in policy.parameters.values():
            torch.nn.init.normal_(parameter, std=0.15)
        engine.load_weights(policy.model.named_parameters())
        check_agrees(engine, policy.model)
    engine.close()


@pytest.mark.parametrize(
    ("fault", "used"), [("dies", 2), ("hangs", 1)], ids=["others take over", "it comes back"]
)
def test_a_server_that_fails_in_a_rollout_changes_no_result(servers, fault, used):
    """Its process is stopped first, so that its share is under way when it dies; its keeper starts it again."""
    first, *_ = servers
    engine = start(list(servers)[:used], small_llama(0, tied=True))
    for seed in (0, 1):
        engine.load_weights(small_llama(seed, tied=True).named_parameters())
    undisturbed = engine.generate(requests(4), TEMPERED)
    [server] = psutil.Process(servers[first].pid).children()
    os.killpg(server.pid, signal.SIGSTOP)
    if fault == "dies":
        threading.Timer(1.0, os.killpg, (server.pid, signal.SIGKILL)).start()
    again = engine.generate(requests(4), TEMPERED)
    assert [c.ids for c in again] == [c.ids for c in undisturbed]
    assert [c.logprobs for c in again] == [pytest.approx(c.logprobs, abs=1e-5) for c in undisturbed]
    while not answers(first):
        time.sleep(0.5)
    current, before = small_llama(2, tied=True), {url: served(url) for url in list(servers)[:used]}
    engine.load_weights(current.named_parameters())
    check_agrees(engine, current)
    assert all(served(url) > number for url, number in before.items()), "every server takes its share again"
    engine.close()


def test_weights_that_someone_else_gave_a_server_are_noticed(servers):
    """Two trainers on one server: each samples from its own weights, or not at all."""
    ours, theirs = (start(servers, small_llama(0, tied=True)) for _ in range(2))
    model = small_llama(1, tied=True)
    ours.load_weights(model.named_parameters())
    theirs.load_weights(small_llama(2, tied=True).named_parameters())
    check_agrees(ours, model)
    ours.close()
    theirs.close()


def test_a_server_that_does_not_answer_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BadInput, match=f"rl.vllm.servers: {url} does not answer"):
        start([url], small_llama(0))
