"""A real ``vllm serve`` on this machine's CPU."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from grpo_lightning.distributed.ranks import ALONE
from grpo_lightning.sampler.vllm.server import KEY, Connection, VLLMServer
from tests.vllm.support import PROMPTS, SHARED, disturb, gap, ready, sample, sampling, tiny


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    start = place / "start"
    policy = tiny()
    # The shipped policy's head is tied, of which vLLM on a CPU would keep the first copy: the files have it by itself.
    VLLMServer(url="http://127.0.0.1", directory=str(place))._write(policy, start, ALONE)
    policy.tokenizer.save_pretrained(start)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(start), "--port", str(port)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(10**8), "--block-size", "32", "--dtype", "float32"]
    command += ["--enable-prefix-caching", "--host", "127.0.0.1"]
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        KEY: "of-this-test",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with (place / "log").open("w") as log:
        running = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, cwd=place)
    os.environ[KEY] = "of-this-test"
    try:
        asked = Connection(f"http://127.0.0.1:{port}", timeout=5, key_name=KEY)
        for _ in range(500):
            try:
                asked.get("/v1/models")
                break
            except RuntimeError:
                assert running.poll() is None, (place / "log").read_text()[-3000:]
                time.sleep(1)
        yield asked.url
    finally:
        del os.environ[KEY]
        running.terminate()
        try:
            running.wait(60)
        finally:
            running.kill()


def test_a_real_server_draws_with_the_weights_that_are_trained(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    prompts = [*PROMPTS, SHARED]
    found = sample(sampler, policy, prompts)
    assert gap(policy, found) < 1e-3
    assert gap(policy, found, 0.9) > 1e-2
    assert sample(sampler, policy, prompts).texts == found.texts
    disturb(policy)
    again = sample(sampler, policy, prompts, version=1)
    assert gap(policy, found) > 0.05
    assert gap(policy, again) < 1e-3
    assert sampler.metrics == {"sampler/weight_version": 1.0}
    assert Connection(url, timeout=5, key_name=KEY).get("/weight_info") == {"weight_version": "1"}


def test_a_real_server_draws_from_the_sets_that_are_found_again(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    asked = replace(sampling(temperature=1.3), top_p=0.8, top_k=10, min_p=0.02)
    with ready(sampler, policy):
        found = sampler.generate(policy, PROMPTS, group_size=4, sampling=asked, seed=3)
    kept = policy.kept(found, asked)
    assert not kept.outside.any()
    assert gap(policy, found, 1.3) > 0.02
    assert gap(policy, replace(found, kept=kept.kept), 1.3) < 1e-3


def test_stop_strings_of_a_real_server(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    whole, cut = (sample(sampler, policy, temperature=1.3, stop=stop) for stop in ((), ("l",)))
    for part, full in zip(cut.texts, whole.texts):
        assert part == (full[: full.index("l") + 1] if "l" in full else full)
    assert any("l" in text for text in cut.texts)
