"""Episodes with sliding windows: what is forgotten, or read at once, moves no window."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.sampler.native import multi_turn
from grpo_lightning.sampler.native import sampler as native
from grpo_lightning.sampler.native.sampler import decode
from grpo_lightning.types import Sampling
from tests.support.checkpoints import tokenizer
from tests.support.episodes import FakeResponder, chatty, played_alone
from tests.support.sampling import generate
from tests.test_episodes import assert_equal
from tests.test_static_sampling import ENDS, PLAIN, PROMPTS

WINDOW = 24
LONGER = 80
SIZES = {
    **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW},
    **{"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None},
}
MODELS = {
    "every layer": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "every other layer": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1)),
}


def talkative(turns):
    """Replies of 1 to 22 tokens."""
    return chatty(turns) and chatty(turns) + " Corgis are small dogs." * (len(turns[-1]) % 3)


@pytest.mark.slow
@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("kind", MODELS)
def test_windows_reach_as_far_as_without_a_cache(kind, share_prompts, monkeypatch):
    torch.manual_seed(0)
    policy = HFPolicy(MODELS[kind](), tokenizer(chat=False), share_prompts=share_prompts)
    policy.end_ids = ENDS
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    monkeypatch.setattr(multi_turn, "PREFILL_ABOVE", 12)
    sampling = Sampling(**PLAIN | {"max_new_tokens": LONGER})
    expected = played_alone(policy, PROMPTS, talkative, group_size=3, sampling=sampling, seed=5)
    assert sum(len(one.ids) > 2 * WINDOW and len(one.turns) > 1 for one in expected) > 2
    for waits, sync_every in ((False, 1), (False, 16), (True, 1), (True, 16)):
        monkeypatch.setattr(native, "decode", partial(decode, sync_every=sync_every))
        responder = FakeResponder(talkative, is_slow=waits)
        found = generate(policy, PROMPTS, group_size=3, sampling=sampling, seed=5, responder=responder)
        assert_equal(found, expected)
        assert_close(policy.logprobs(found, temperature=1.0), found.logprobs, rtol=0, atol=1e-4)
