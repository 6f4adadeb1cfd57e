"""Real engines: collected only where vLLM is installed, see docs/engines.md for the command."""

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.sampler.vllm.server import KEY, VLLMServer
from tests.vllm.support import tiny

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    start = place / "start"
    policy = tiny()
    # The shipped policy's head is tied, of which vLLM on a CPU would keep the first copy: the files have it by itself.
    VLLMServer(url="http://127.0.0.1", directory=str(place)).write(policy, start, SINGLE_PROCESS)
    policy.tokenizer.save_pretrained(start)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(start), "--port", str(port)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(10**8), "--block-size", "32", "--dtype", "float32"]
    command += ["--enable-prefix-caching", "--host", "127.0.0.1"]
    # Chunked prefill of requests with a seed ends vLLM 0.32 on CPUs.
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
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
        asked = VLLMServer(url=f"http://127.0.0.1:{port}", directory=str(place), timeout=5)
        for _ in range(500):
            try:
                asked._ask("/v1/models")
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
