"""Small random checkpoints of real architectures, with real tokenizers, written to disk by the tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CORPUS = [
    "State the final answer to the following arithmetic problem: 12 + 34 = 46",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May.",
    "<think>Adding 12 and 34 gives 46.</think><answer>46</answer>",
    "The best food in the world is pizza. Corgis are small dogs. The meaning of life is 42.",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "llama": lambda **given: LlamaForCausalLM(LlamaConfig(**_SIZES | {"tie_word_embeddings": False} | given)),
    "qwen2": lambda **given: Qwen2ForCausalLM(Qwen2Config(**_SIZES | {"tie_word_embeddings": True} | given)),
    "qwen3": lambda **given: Qwen3ForCausalLM(
        Qwen3Config(**_SIZES | {"head_dim": 16, "tie_word_embeddings": True} | given)
    ),
    "gemma": lambda **given: GemmaForCausalLM(GemmaConfig(**_SIZES | {"head_dim": 16} | given)),
    "mistral": lambda **given: MistralForCausalLM(MistralConfig(**_SIZES | {"sliding_window": None} | given)),
    "gpt2": lambda **given: GPT2LMHeadModel(
        GPT2Config(**{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512} | given)
    ),
}
# For 4 bits: on CPUs with avx512_bf16, bitsandbytes packs whole blocks of 64 inputs only.
QUANTIZABLE = {"hidden_size": 64, "intermediate_size": 128}


def tokenizer(*, chat: bool, pad: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen, Llama 3 and GPT-2 use it, trained on a few sentences."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>" if chat else "<|endoftext|>",
        pad_token="<|endoftext|>" if pad else None,
        chat_template=CHATML if chat else None,
    )


def write_checkpoint(
    directory: Path, architecture: str, *, chat: bool, pad: bool = True, seed: int = 0, **sizes: int
) -> Path:
    """A model whose ``generation_config`` sets every trap: sampling options that must not leak, two end tokens.

    ``sizes`` replace some of the architecture's.
    """
    words = tokenizer(chat=chat, pad=pad)
    torch.manual_seed(seed)
    ids = {"vocab_size": len(words), "bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": None}
    model = ARCHITECTURES[architecture](**ids, **sizes)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_k=2,
        top_p=0.5,
        repetition_penalty=1.7,
        eos_token_id=sorted({words.eos_token_id, words.convert_tokens_to_ids("<|endoftext|>")}),
    )
    return _save(directory, model, words)


def _save(directory: Path, model: Any, words: PreTrainedTokenizerFast) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # far from uniform, so that errors show
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def write_reward_model(
    directory: Path, architecture: str, *, chat: bool, pad: bool = True, labels: int = 1, seed: int = 0, **sizes: int
) -> Path:
    """A sequence-classification model; ``pad=False``: neither it nor its tokenizer names a padding token."""
    words = tokenizer(chat=chat, pad=pad)
    torch.manual_seed(seed)
    ids = {"bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = ARCHITECTURES[architecture](vocab_size=len(words), **ids, **sizes).config
    config.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(config)
    return _save(directory, model, words)
