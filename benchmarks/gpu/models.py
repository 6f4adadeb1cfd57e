"""Random models that no file holds, and prompts for them."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.gpu.tools import device
from benchmarks.shapes import qwen
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import character_tokenizer
from grpo_lightning.types import Sampling

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What makes a configuration small enough for a CPU."""


def sized(reduced: bool, **changed: Any) -> PretrainedConfig:
    """Qwen2.5-1.5B's configuration, or a small one of its kind; the end of a sequence is token 2."""
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    return qwen("1.5 B", **(SMALL if reduced else {}) | ids | changed)


def model(config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A causal language model with random weights, made on the device."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config)  # a policy changes its model's
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device())


def policy(made: Any, *, endless: bool = False, **options: Any) -> HFPolicy:
    """A model as a policy, whose prompts are token ids; with ``endless`` no token ends a completion."""
    found = HFPolicy(made, character_tokenizer(4096), plain_text=True, **options)
    if endless:
        found.end_ids = []
    return found


def prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts, none of which ends a sequence."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(3, vocabulary, (count, length), generator=generator).tolist()
    return found


def sampling(length: int, *, temperature: float = 1.0) -> Sampling:
    """Draws from the policy itself; 0 is greedy."""
    return Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=length)
