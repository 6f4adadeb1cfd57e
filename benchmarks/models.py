"""Random models of known sizes, and prompts for them."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from benchmarks.measure import device
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import character_tokenizer
from grpo_lightning.types import Sampling

QWEN = {  # https://huggingface.co/Qwen, config.json of Qwen2.5
    "0.5 B": (896, 24, 4864, 14, 2, 151_936, True),
    "1.5 B": (1536, 28, 8960, 12, 2, 151_936, True),
    "3 B": (2048, 36, 11_008, 16, 2, 151_936, True),
    "7 B": (3584, 28, 18_944, 28, 4, 152_064, False),
}
_NAMES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
SMALL = dict(zip(_NAMES, (64, 2, 128, 4, 2, 512, True), strict=True))
"""Sizes small enough for a CPU."""
IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


def qwen(name: str, **changed: Any) -> Qwen2Config:
    """The configuration of a Qwen2.5 of this size, with some values changed."""
    return Qwen2Config(**dict(zip(_NAMES, QWEN[name], strict=True)) | IDS | changed)


def random_model(config: PretrainedConfig, *, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device()):
        config = copy.deepcopy(config)  # a policy changes its model's
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device())


def random_policy(config: PretrainedConfig, *, endless: bool = False, **options: Any) -> HFPolicy:
    """A random model as a policy, whose prompts are token ids; with ``endless`` no token ends a completion."""
    policy = HFPolicy(random_model(config), character_tokenizer(4096), **options)
    if endless:
        policy.end_ids = []
    return policy


def random_prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts, none of which ends a sequence."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(3, vocabulary, (count, length), generator=generator).tolist()
    return prompts


def sampling(length: int) -> Sampling:
    """Draws up to ``length`` tokens from the policy itself."""
    return Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=length)
