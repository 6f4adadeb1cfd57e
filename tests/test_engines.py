"""vLLM as the engine, shown on a stand-in for the library and on a small server that speaks its protocol.

tests/vllm has the real ones.
"""

import json
import os
import random
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from grpo_lightning.config import ConfigError, check_config
from grpo_lightning.module import grpo
from grpo_lightning.module.update import check_rollout
from grpo_lightning.sampler.vllm.colocated import VLLM
from grpo_lightning.sampler.vllm.server import VLLMServer
from tests.support import stand_in
from tests.support.composed import composed
from tests.support.episodes import FakeResponder, chatty
from tests.support.running import small_run
from tests.support.sampling import generate
from tests.vllm.support import PROMPTS, disturb, engine, gap, sample, sampling, sync_weights, tiny


@pytest.fixture
def vllm(monkeypatch):
    stand_in.install(monkeypatch)
    return engine()


def problems(*overrides):
    try:
        check_config(composed(*overrides))
    except ConfigError as error:
        return error.problems
    return ()


def test_tokens_are_sampled_from_the_distribution_that_is_trained(vllm):
    policy = tiny()
    for version in (0, 1):
        found = sample(vllm, policy, version=version)
        assert gap(policy, found) < 1e-4
        assert vllm.metrics == {"sampler/weight_version": version}
        disturb(policy)
    assert gap(policy, found) > 0.05


def test_an_adapter_is_merged(vllm):
    policy = tiny(adapter={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    disturb(policy, scale=0.1)
    assert gap(policy, sample(vllm, policy)) < 1e-4  # whose names are those of the model's files, or it would refuse


def test_memory_is_awake_before_weights_are_written_and_the_cache_is_dropped_before_it_is_used(vllm, monkeypatch):
    policy = tiny()
    sample(vllm, policy)
    monkeypatch.setattr(VLLM, "_sleeps", True)
    llm = stand_in.LLM.last
    llm.log.clear()
    with sync_weights(vllm, policy, 5):
        assert llm.log == ["wake ['weights']", "reload_weights", "reset_prefix_cache", "wake ['kv_cache']"]
    assert llm.log[4:] == ["sleep 2"]
    llm.drops_its_cache = False
    with pytest.raises(RuntimeError, match="older weights could not be dropped"):
        sample(vllm, policy)
    assert vllm.metrics == {}


def test_stop_strings_polls_and_early_ends(vllm):
    policy, reported, polls = tiny(), {}, []
    with sync_weights(vllm, policy):
        found = vllm.generate(
            policy,
            PROMPTS,
            group_size=4,
            sampling=sampling(stop=(" ",), temperature=1.3),
            seed=3,
            poll=lambda: polls.append(1),
            on_finished=lambda row, text, ids: reported.update({row: (text, ids)}),
        )
        free = vllm.generate(policy, PROMPTS, group_size=4, sampling=sampling(temperature=1.3), seed=3)
    assert len(polls) > 5
    assert set(reported) == {row for row, finished in enumerate(found.finished) if finished}
    for row, (text, ids) in reported.items():
        assert found.texts[row] == text
        assert len(ids) == int(found.mask[row].sum())
    for part, whole in zip(found.texts, free.texts):
        assert part == (whole[: whole.index(" ") + 1] if " " in whole else whole)
    stopped = [finished for text, finished in zip(found.texts, found.finished) if " " in text]
    assert stopped
    assert all(stopped)


def test_multi_turn_completions_are_those_of_the_native_sampler(vllm):
    # A temperature of 0 leaves nothing to chance. One completion is cut because a reply leaves no room.
    policy = tiny()

    def environment(said):
        return "The 42" if len(said) < 4 else None

    options = {"group_size": 2, "sampling": sampling(temperature=0.0, max_new_tokens=60), "seed": 3}
    own = generate(policy, PROMPTS, responder=FakeResponder(environment), **options)
    with sync_weights(vllm, policy):
        found = vllm.generate(policy, PROMPTS, responder=FakeResponder(environment), **options)
    assert {len(said) for said in own.turns} == {1, 3, 4}
    for name in ("ids", "attention_mask", "mask"):
        assert torch.equal(getattr(found, name), getattr(own, name)), name
    assert (found.turns, found.replies, found.finished) == (own.turns, own.replies, own.finished)
    assert_close(found.logprobs, own.logprobs, rtol=0, atol=1e-4)


def test_every_turn_is_sampled_from_the_distribution_that_is_trained(vllm):
    policy, options = tiny(), {"group_size": 8, "sampling": sampling(max_new_tokens=60), "seed": 3}
    with sync_weights(vllm, policy):
        found = vllm.generate(policy, PROMPTS, responder=FakeResponder(chatty), **options)
    replied = found.attention_mask[:, -found.mask.shape[1] :] & ~found.mask
    assert replied.sum() > 20
    assert found.logprobs[replied].abs().max() == 0
    assert gap(policy, found) < 1e-4
    seeds = stand_in.LLM.last.llm_engine.seeds
    assert len(set(seeds)) == len(seeds) == sum(map(len, found.turns))  # each turn of each completion has its own


def test_who_leaves_a_rollout_leaves_no_request(vllm):
    policy = tiny()

    def poll():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sync_weights(vllm, policy):
        vllm.generate(policy, PROMPTS, group_size=2, sampling=sampling(), seed=3, poll=poll)
    assert sorted(stand_in.LLM.last.llm_engine.aborted) == [str(number) for number in range(6)]


@pytest.mark.slow
def test_random_state_threads_and_environment_are_as_before(vllm, monkeypatch):
    class Seeding(stand_in.LLM):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            torch.set_num_threads = print
            assert os.environ["WORLD_SIZE"] == "1"
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", Seeding)
    before = (random.getstate(), torch.get_rng_state(), torch.set_num_threads, dict(os.environ))
    numbers = np.random.get_state()[1].tolist()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        sample(vllm, tiny())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.set_num_threads is before[2]
    assert dict(os.environ) == before[3]
    assert np.random.get_state()[1].tolist() == numbers
    assert stand_in.LLM.last.arguments["dtype"] == "bfloat16"  # as the policy computes, where it is first asked


def test_settings_that_an_engine_cannot_follow(monkeypatch):
    stand_in.install(monkeypatch)
    assert problems("sampler=vllm", "rollout.top_p=0.9", "rollout.min_p=0.1", "validation.top_k=5") == ()
    for override, problem in (
        ("rollout.kv_cache_gib=2", "rollout.kv_cache_gib=2 does not work with sampler=vllm"),
        ("sampler.engine={repetition_penalty: 1.2}", "sampler.engine.repetition_penalty=1.2: must be one of"),
    ):
        found = problems("sampler=vllm", override)
        assert any(problem in one for one in found), found


def test_without_vllm_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("grpo_lightning.config.rules.find_spec", lambda _: None)
    (sentence,) = problems("sampler=vllm")
    assert "vLLM is not installed" in sentence
    assert "pip install -r requirements-vllm.txt" in sentence
    assert problems("sampler=vllm", "mode=export") == ()
    assert problems("sampler=vllm_server", "sampler.directory=/tmp/x") == ()


@pytest.mark.slow
def test_a_run_with_an_engine_and_one_that_continues_it(monkeypatch, tmp_path):
    stand_in.install(monkeypatch)
    checks = []
    monkeypatch.setattr(
        grpo, "check_rollout", lambda *given, **more: (checks.append(more), check_rollout(*given, **more))
    )
    words = ["sampler=vllm", "validation.every=1", "rollout.temperature=0.8", "rollout.top_p=0.9", "rollout.min_p=0.01"]
    words += ["validation.top_k=5", "rollout.top_k=20", "module.self_check=true"]
    whole = small_run(tmp_path / "whole", *words, "steps=2")
    assert checks == [{"coarse": False, "filtered": True}]
    assert whole.metrics["sampler/weight_version"] == 1
    assert whole.metrics["sampler/support_miss_rate"] == 0
    assert whole.metrics["policy/mismatch_max"] < 1e-4
    assert whole.metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert 1 < whole.metrics["completion/set_size_mean"] <= 20
    assert whole.metrics["time/sync"] > 0
    assert whole.metrics["time/wake"] >= 0
    small_run(tmp_path / "parts", *words, "steps=1")
    parts = small_run(tmp_path / "parts", *words, "steps=2", "checkpoint=last")
    assert parts.completed_steps == 2
    for (name, one), other in zip(whole.policy.state_dict().items(), parts.policy.state_dict().values()):
        assert torch.equal(one, other), name
    stored = torch.load(tmp_path / "whole" / "checkpoints" / "last.ckpt", weights_only=True)
    assert not [name for name in stored["state_dict"] if "engine" in name or "sampler" in name]


# --- a server --------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Holds a model of its own; ``log`` has the requests, ``answers`` what it answers in place of the truth."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.policy = tiny()
        self.log, self.keys, self.bodies, self.answers, self.drops = [], [], [], {}, 0
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
            ids, found = [], []
            while len(ids) < asked["max_tokens"] and not set(ids) & set(asked["stop_token_ids"]):
                logits = self.policy.model(torch.tensor([[*asked["prompt"], *ids]])).logits[0, -1]
                logprobs = stand_in.filtered(logits / asked["temperature"], SimpleNamespace(**asked)).log_softmax(-1)
                ids.append(int(logprobs.exp().multinomial(1, generator=generator)))
                found.append(float(logprobs[ids[-1]]))
            choices.append({"index": index, "token_ids": ids, "logprobs": {"token_logprobs": found}})
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
            if server.drops:  # the connection ends without an answer
                server.drops -= 1
                self.close_connection = True
                return
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
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def sampler(server, tmp_path):
    return VLLMServer(url=server.url, directory=str(tmp_path / "weights"), timeout=20)


def test_a_server_samples_with_the_weights_that_are_trained(server, sampler, tmp_path):
    policy, left = tiny(), tmp_path / "weights" / "grpo-lightning-weights-0"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")  # of a run that was killed
    for version in (0, 1):
        found = sample(sampler, policy, version=version)
        assert gap(policy, found) < 1e-4
        assert sampler.metrics == {"sampler/weight_version": version}
        disturb(policy)
    assert gap(policy, found) > 0.05
    asked = ["/collective_rpc", "/reset_prefix_cache", *["/v1/completions"] * 3]
    assert server.log == ["/v1/models", *asked, *asked]
    assert list((tmp_path / "weights").iterdir()) == []  # files are dropped once they are read


def test_a_server_is_asked_for_the_filters_and_log_probabilities_are_those_of_the_sets(server, sampler):
    policy, asked = tiny(), replace(sampling(), top_p=0.9, top_k=20, min_p=0.01)
    with sync_weights(sampler, policy):
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
    with pytest.raises(RuntimeError, match=r"/v1/models: status 302") as caught:
        sample(sampler, tiny())
    assert server.keys == ["Bearer secret-of-a-test"]
    assert "secret-of-a-test" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/v1/models", (200, {"data": [{"id": "a"}, {"id": "b"}]}), r"sampler\.model=null: name one of .* a, b"),
        ("/reset_prefix_cache", (200, {"success": False}), "older weights could not be dropped"),
        ("/v1/completions", (200, {"choices": []}), "0 completions of a prompt came, not 4"),
    ],
)
def test_wrong_answers_of_a_server_are_errors(server, sampler, path, answer, problem):
    server.answers[path] = answer
    with pytest.raises((RuntimeError, ValueError), match=problem):
        sample(sampler, tiny())


def test_a_lost_connection_is_made_again_and_the_first_error_counts(server, sampler):
    expected = sample(sampler, tiny())
    server.drops = 3
    assert torch.equal(sample(sampler, tiny()).ids, expected.ids)
    server.answers["/v1/completions"] = server.answers["/abort_requests"] = (500, {"error": "broken"})
    with pytest.raises(RuntimeError, match="/v1/completions: status 500"):
        sample(sampler, tiny())


def test_wrong_addresses_are_errors():
    for url in ("host:8000", "http://user:word@host"):
        with pytest.raises(ValueError, match=r"sampler\.url must be http://HOST:PORT") as caught:
            VLLMServer(url=url, directory="x")
        assert "word" not in str(caught.value)


@pytest.mark.slow
def test_a_run_with_a_server(server, tmp_path):
    words = ("sampler=vllm_server", f"sampler.url={server.url}", f"sampler.directory={tmp_path / 'shared'}")
    module = small_run(tmp_path / "run", "policy=tiny", *words, "rollout.max_new_tokens=8", "rollout.stop=[]")
    assert module.metrics["sampler/weight_version"] == 0
    assert module.metrics["time/sync"] > 0
