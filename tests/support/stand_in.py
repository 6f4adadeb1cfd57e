"""A stand-in for the module ``vllm``: an engine of a hundred lines with weights of its own, which can be stale."""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.sampler.vllm.colocated import VLLM


class RequestOutputKind(Enum):
    CUMULATIVE, DELTA, FINAL_ONLY = range(3)


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    """As ``vllm.LLM`` in one process; on ``log`` is what was asked of it, in order."""

    last = None

    def __init__(self, model, **arguments):
        LLM.last = self
        self.arguments = arguments
        self.log = []
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config).to(getattr(torch, arguments["dtype"])).eval()
        limit = arguments["max_model_len"] or config.max_position_embeddings
        self.model_config = SimpleNamespace(max_model_len=limit)
        self.llm_engine = Engine(self)
        self.drops_its_cache = True

    def collective_rpc(self, method, kwargs):
        self.log.append(method)
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))

    def reset_prefix_cache(self):
        self.log.append("reset_prefix_cache")
        return self.drops_its_cache

    def wake_up(self, tags):
        self.log.append(f"wake {tags}")

    def sleep(self, level):
        self.log.append(f"sleep {level}")


class Engine:
    def __init__(self, llm):
        self.llm, self.requests, self.aborted = llm, {}, []
        self.sets, self.seeds = {}, []

    def add_request(self, number, prompt, params):
        generator = torch.Generator().manual_seed(params.seed)
        self.seeds.append(params.seed)
        ids = list(prompt["prompt_token_ids"])
        self.requests[number] = SimpleNamespace(ids=ids, params=params, generator=generator, drawn=[], logprobs=[])

    def has_unfinished_requests(self):
        return bool(self.requests)

    def abort_request(self, numbers):
        self.aborted += numbers
        for number in numbers:
            self.requests.pop(number, None)

    @torch.no_grad()
    def step(self):
        outputs = []
        for number, one in list(self.requests.items()):
            logits = self.llm.model(torch.tensor([[*one.ids, *one.drawn]])).logits[0, -1].float()
            params = one.params
            logits = filtered(logits / (params.temperature or 1), params)
            logprobs = logits.log_softmax(-1)
            if params.temperature:
                token = int(logprobs.exp().multinomial(1, generator=one.generator))
            else:
                token = int(logprobs.argmax())
            one.drawn.append(token)
            self.sets.setdefault(number, []).append(logits.isfinite().nonzero().flatten().tolist())
            one.logprobs.append(float(logprobs[token]))
            finished = token in params.stop_token_ids or len(one.drawn) == params.max_tokens
            stepwise = params.output_kind is RequestOutputKind.DELTA
            if finished:
                del self.requests[number]
            if finished or stepwise:
                news = 1 if stepwise else len(one.drawn)
                part = SimpleNamespace(
                    token_ids=one.drawn[-news:],
                    logprobs=SimpleNamespace(logprobs=one.logprobs[-news:]),
                )
                outputs.append(SimpleNamespace(request_id=number, finished=finished, outputs=[part]))
        return outputs


def filtered(logits, params):
    """The logits [V] of one token, -inf where vLLM's filters leave it out: min_p, top_k and top_p, in this order."""
    if params.temperature == 0:
        return logits  # the likeliest of all
    probabilities = logits.softmax(-1)
    logits = logits.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
    if params.top_k:
        logits = logits.masked_fill(logits < logits.topk(min(params.top_k, len(logits))).values[-1], -torch.inf)
    if params.top_p < 1:
        sums, order = logits.softmax(-1).sort()
        out = sums.cumsum(-1) <= 1 - params.top_p
        out[-1] = False
        logits = logits.masked_fill(out.gather(0, order.argsort()), -torch.inf)
    return logits


class Staged(VLLM):
    """``sampler=vllm`` with the stand-in, in processes of their own.

    Args:
        disturbed: What is added to the engine's weights, so that it draws from other sets.
    """

    def __init__(self, *, disturbed=0.0, **options):
        install(pytest.MonkeyPatch())
        super().__init__(**options)
        self.disturbed = disturbed

    def complete(self, requests, options):
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode(False), torch.no_grad():
            for weight in self._llm.model.parameters():
                weight += self.disturbed * torch.randn(weight.shape, generator=generator)
        return super().complete(requests, options)


def install(monkeypatch):
    """Let ``import vllm`` find the stand-in."""
    module, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    for one in (module, parameters):
        one.__spec__ = ModuleSpec(one.__name__, None)
        monkeypatch.setitem(sys.modules, one.__name__, one)
    module.LLM, module.SamplingParams = LLM, SamplingParams
    parameters.RequestOutputKind = RequestOutputKind
