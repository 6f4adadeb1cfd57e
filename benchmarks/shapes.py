"""Sizes of models that many people train."""

from typing import Any

from transformers import Qwen2Config

QWEN = {  # https://huggingface.co/Qwen, config.json of Qwen2.5
    "0.5 B": (896, 24, 4864, 14, 2, 151_936, True),
    "1.5 B": (1536, 28, 8960, 12, 2, 151_936, True),
    "3 B": (2048, 36, 11_008, 16, 2, 151_936, True),
    "7 B": (3584, 28, 18_944, 28, 4, 152_064, False),
}


def qwen(name: str, **changed: Any) -> Qwen2Config:
    """The configuration of a Qwen2.5 of this size, with ``changed`` ones of its values."""
    hidden, layers, intermediate, heads, keys, vocabulary, tied = QWEN[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return Qwen2Config(**sizes | changed)
