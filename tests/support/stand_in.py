"""A stand-in for the module ``vllm``: an engine of a hundred lines with weights of its own, which can be stale."""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM


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
        self.llm, self.requests, self.version, self.aborted = llm, {}, None, []

    def set_weight_version(self, version):
        self.version = version

    def add_request(self, number, prompt, params):
        generator = torch.Generator().manual_seed(params.seed)
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
            logprobs = (logits / (params.temperature or 1)).log_softmax(-1)
            if params.temperature:
                token = int(logprobs.exp().multinomial(1, generator=one.generator))
            else:
                token = int(logprobs.argmax())
            one.drawn.append(token)
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
                    weight_versions=[SimpleNamespace(version=self.version)] if finished else None,
                )
                outputs.append(SimpleNamespace(request_id=number, finished=finished, outputs=[part]))
        return outputs


def install(monkeypatch):
    """Let ``import vllm`` find the stand-in."""
    module, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    attention = ModuleType("vllm.v1.attention.backends.cpu_attn")
    for one in (module, parameters, attention):
        one.__spec__ = ModuleSpec(one.__name__, None)
        monkeypatch.setitem(sys.modules, one.__name__, one)
    module.LLM, module.SamplingParams = LLM, SamplingParams
    parameters.RequestOutputKind = RequestOutputKind
    attention.CPUAttentionBackend = SimpleNamespace(get_supported_head_sizes=lambda: [8, 32])
