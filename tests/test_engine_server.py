"""``sampler=vllm_server`` against a small server that speaks vLLM's protocol; tests/vllm has the real one."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from grpo_lightning.sampler.vllm.server import Connection, VLLMServer
from tests.support.running import small_run
from tests.support.stand_in import filtered
from tests.vllm.support import PROMPTS, disturb, gap, ready, sample, sampling, tiny


class Server(ThreadingHTTPServer):
    """Holds a model of its own; ``log`` is what was asked of it, ``answers`` what it says in place of the truth."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.policy = tiny()
        self.log, self.keys, self.bodies, self.answers = [], [], [], {}
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reload(self, place):
        config = json.loads((Path(place) / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        self.policy.model.load_state_dict(load_file(Path(place) / "model.safetensors"))

    @torch.no_grad()
    def complete(self, asked):
        choices = []
        for index in range(asked["n"]):
            generator = torch.Generator().manual_seed(asked["seed"] % 2**40 + index)
            ids, told = [], []
            while len(ids) < asked["max_tokens"] and not set(ids) & set(asked["stop_token_ids"]):
                logits = self.policy.model(torch.tensor([[*asked["prompt"], *ids]])).logits[0, -1]
                logprobs = filtered(logits / asked["temperature"], SimpleNamespace(**asked)).log_softmax(-1)
                ids.append(int(logprobs.exp().multinomial(1, generator=generator)))
                told.append(float(logprobs[ids[-1]]))
            choices.append({"index": index, "token_ids": ids, "logprobs": {"token_logprobs": told}})
        return {"choices": choices[::-1]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked):
        server = self.server
        with server.lock:
            server.log.append(self.path)
            server.bodies.append(asked)
            server.keys.append(self.headers.get("Authorization"))
            status, said = server.answers.get(self.path, (200, None))
            if said is None:
                said = {"data": [{"id": "start"}]} if self.path == "/v1/models" else {"success": True}
                if self.path == "/collective_rpc":
                    server.reload(asked["kwargs"]["weights_path"])
                if self.path == "/v1/completions":
                    said = server.complete(asked)
        body = json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Location": "http://127.0.0.1:9/"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    served = Server()
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def sampler(server, tmp_path):
    return VLLMServer(url=server.url, directory=str(tmp_path / "weights"), timeout=20)


@pytest.mark.slow
def test_the_server_draws_with_the_weights_that_are_trained(server, sampler, tmp_path):
    policy = tiny()
    for version in (0, 1):
        found = sample(sampler, policy, version=version)
        assert gap(policy, found) < 1e-4
        assert sampler.metrics == {"sampler/weight_version": version}
        disturb(policy)
    assert gap(policy, found) > 0.05
    asked = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", *["/v1/completions"] * 3]
    assert server.log == ["/v1/models", *asked, *asked]
    assert list((tmp_path / "weights").iterdir()) == []  # files are dropped once they are read


@pytest.mark.parametrize("left", [(), ("model.safetensors", "half")])
def test_weights_of_a_killed_run_make_room(left, server, sampler, tmp_path, monkeypatch):
    place, read = tmp_path / "weights" / "grpo-lightning-weights-0", []
    monkeypatch.setattr(server, "reload", lambda given: read.append(sorted(p.name for p in Path(given).iterdir())))
    place.mkdir(parents=True)
    for name in left:
        (place / name).write_text("")
    sample(sampler, tiny())
    assert read == [["config.json", "model.safetensors"]]
    assert list(place.parent.iterdir()) == []


def test_filters_are_asked_for_and_the_log_probabilities_are_those_of_the_sets(server, sampler):
    policy, asked = tiny(), replace(sampling(), top_p=0.9, top_k=20, min_p=0.01)
    with ready(sampler, policy):
        found = sampler.generate(policy, PROMPTS, group_size=4, sampling=asked, seed=3)
        assert found.support is None
        sets = policy.support(found, asked)
    body = server.bodies[-1]
    assert (body["top_p"], body["top_k"], body["min_p"]) == (0.9, 20, 0.01)
    assert not sets.outside.any()
    assert gap(policy, found) > 0.05
    assert gap(policy, replace(found, support=sets.support)) < 1e-4


def test_a_key_comes_from_the_environment_and_goes_to_this_server_only(server, sampler, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-a-test")
    server.answers["/v1/models"] = (302, {})
    with pytest.raises(RuntimeError, match=r"/v1/models: no answer") as told:
        sample(sampler, tiny())
    assert server.keys == ["Bearer secret-of-a-test"]
    assert "secret-of-a-test" not in str(told.value)


@pytest.mark.parametrize(
    ("path", "answer", "told"),
    [
        ("/v1/models", (200, {"data": [{"id": "a"}, {"id": "b"}]}), r"sampler\.model=null: name one of .* a, b"),
        ("/v1/models", (401, {"error": "no"}), r"/v1/models: status 401: .*no"),
        ("/reset_prefix_cache", (200, {"success": False}), "older weights could not be dropped"),
        ("/v1/completions", (200, {"choices": []}), "0 completions of a prompt came, not 4"),
        (
            "/v1/completions",
            (200, {"choices": [{"index": number, "token_ids": [5], "logprobs": None} for number in range(4)]}),
            "came without its token ids or log-probabilities",
        ),
    ],
)
def test_what_a_server_may_answer(server, sampler, path, answer, told):
    server.answers[path] = answer
    with pytest.raises((RuntimeError, ValueError), match=told):
        sample(sampler, tiny())


@pytest.mark.parametrize("url", ["ftp://host", "host:8000", "http://user:word@host", "http://host?x=1"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match=r"sampler\.url=.* must be http://HOST:PORT") as told:
        Connection(url, timeout=1)
    assert "word" not in str(told.value)


@pytest.mark.slow
def test_a_run_with_a_server(server, tmp_path):
    words = ("sampler=vllm_server", f"sampler.url={server.url}", f"sampler.directory={tmp_path / 'shared'}")
    module = small_run(tmp_path / "run", "policy=tiny", *words, "rollout.max_new_tokens=8", "rollout.stop=[]")
    assert module.metrics["sampler/weight_version"] == 0
    assert module.metrics["time/sync"] > 0
