"""A small Llama-type policy with random weights and a character tokenizer, for the supervised stage to teach."""

import string

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lightning.policy.hf import HFPolicy

SPECIAL = ("<pad>", "<unk>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "\n" + "".join(sorted(c for c in string.printable if c.isprintable()))
"""Newline and the 95 printable ASCII characters, in code-point order."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def character_llama(
    *, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, context: int, seed: int
) -> HFPolicy:
    """A policy with random weights.

    Args:
        hidden_size: Width of the model, a multiple of ``num_heads``.
        intermediate_size: Width of its feed-forward layers.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        context: Most tokens, prompt and completion together.
        seed: Decides the weights; the global random state is left as it is.
    """
    tokenizer = character_tokenizer(context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return HFPolicy(model, tokenizer)


def character_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer with one token per character and one per tag.

    The tags are ordinary added tokens, so decoding without special tokens keeps them. The special tokens' names in a
    text are read as characters (``split_special_tokens``), so that no prompt can contain an end of sequence.

    Returns:
        103 tokens: padding, unknown and end of sequence, newline and printable ASCII, then the four tags.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
    )
