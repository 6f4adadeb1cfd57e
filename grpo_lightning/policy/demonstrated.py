"""Demonstrations as token ids: what a model would have sampled, and what would have been replied in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.config.rules import messages_problem
from grpo_lightning.policy.loading import check_ids
from grpo_lightning.policy.replies import Replies
from grpo_lightning.types import Message, Sampled

Demonstration = str | list[Message]
"""What to imitate: a text, or messages in which those of the assistant take turns with replies, and end it."""


@dataclass(frozen=True)
class Demonstrated:
    """One demonstration as token ids."""

    ids: list[int]
    """Every turn with its end, and the replies between them."""
    is_model: list[bool]
    """Which of them the model says."""
    text: str
    """The last turn."""


def demonstrated(
    tokenizer: Any, replies: Replies, completion: Demonstration, *, end: int, embeddings: int | None
) -> Demonstrated:
    """A demonstration as token ids, each turn tokenized by itself.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        replies: Renders what is said between the turns.
        completion: A text, or messages.
        end: The end of sequence, which ends a text; turns end as the chat template ends them.
        embeddings: How many token ids the model can read; None: not known.

    Raises:
        ValueError: The messages do not take turns, the chat template does not show replies, or the model cannot read a
            token.
    """
    if isinstance(completion, str):
        [ids] = tokenizer([completion], add_special_tokens=False)["input_ids"]
        check_ids([completion], [ids], embeddings)
        return Demonstrated([*ids, end], [True] * (len(ids) + 1), completion)
    if fault := messages_problem(completion):
        raise ValueError(f"column 'completion': {fault}")
    texts = [message["content"] for message in completion[::2]]
    said = [(message["content"], message["role"]) for message in completion[1::2]]
    if said:
        end = replies.end_of_turn(said[0][1], otherwise=end)
    ids, is_model = [], []
    for number, own in enumerate(tokenizer(texts, add_special_tokens=False)["input_ids"]):
        if number:
            text, role = said[number - 1]
            reply = replies.ids(text, role=role, after=end)
            ids += reply
            is_model += [False] * len(reply)
        ids += [*own, end]
        is_model += [True] * (len(own) + 1)
    check_ids([texts[-1]], [ids], embeddings)
    return Demonstrated(ids, is_model, texts[-1])


def padded(ids: Tensor, attention_mask: Tensor, rows: Sequence[Demonstrated], *, pad_id: int) -> Sampled:
    """Demonstrations behind their prompts.

    Args:
        ids: [B, S] of the prompts.
        attention_mask: [B, S] which of them are real.
        rows: [B]
        pad_id: Stands behind those that are shorter than others.
    """
    length = max(len(row.ids) for row in rows)
    tokens, is_real = ids.new_full((len(rows), length), pad_id), attention_mask.new_zeros(len(rows), length)
    mask = torch.zeros_like(is_real)
    for number, row in enumerate(rows):
        count = len(row.ids)
        tokens[number, :count] = torch.tensor(row.ids)
        mask[number, :count] = torch.tensor(row.is_model)
        is_real[number, :count] = True
    return Sampled(
        ids=torch.cat([ids, tokens], 1),
        attention_mask=torch.cat([attention_mask, is_real], 1),
        mask=mask,
        logprobs=torch.zeros(mask.shape, device=ids.device),
        entropy=torch.zeros(mask.shape, device=ids.device),
        texts=tuple(row.text for row in rows),
        finished=(True,) * len(rows),
    )
