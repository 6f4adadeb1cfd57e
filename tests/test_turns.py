"""Demonstrations of several turns: what the model is taught, and what it only reads."""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from grpo_lightning.data.demonstrations import FileDemonstrations
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.types import Sampled, spans
from tests.support.checkpoints import tokenizer, write_checkpoint
from tests.support.sampling import opened


def said(role, content):
    return {"role": role, "content": content}


def turns(*texts, role="user"):
    """The model's turns and the replies to them, in turn."""
    return [said(role if number % 2 else "assistant", text) for number, text in enumerate(texts)]


TALKS = [turns("50", "lower", "25", "higher", "30 it is"), "46", turns("12 * 7?", "84", "84", role="tool")]
PROMPTS = ["Guess a number", "12 + 34 =", "Twelve times seven"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> HFPolicy:
    path = write_checkpoint(tmp_path_factory.mktemp("turns") / "qwen2", "qwen2", chat=True)
    return opened(path, end_ids=None)


def test_rows_by_hand(policy):
    rows = policy.tokenize_demonstrations(PROMPTS, TALKS)
    decode, length = policy.tokenizer.decode, rows.mask.shape[1]
    completions, real = rows.ids[:, -length:], rows.attention_mask[:, -length:]
    talk = "<|im_end|>\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [decode(ids[keep]) for ids, keep in zip(completions, real, strict=True)] == [
        "50" + talk.format("user", "lower") + "25" + talk.format("user", "higher") + "30 it is<|im_end|>",
        "46<|im_end|>",
        "12 * 7?" + talk.format("tool", "84") + "84<|im_end|>",
    ]
    # the model says its turns and their ends; the rest it reads
    assert [decode(ids[keep]) for ids, keep in zip(completions, rows.mask, strict=True)] == [
        "50<|im_end|>25<|im_end|>30 it is<|im_end|>",
        "46<|im_end|>",
        "12 * 7?<|im_end|>84<|im_end|>",
    ]
    assert rows.texts == ("30 it is", "46", "84")
    assert not (rows.mask & ~real).any()
    # as sampling would have made them: each turn is tokenized by itself, and a reply goes behind it
    end, encode = policy.tokenizer.eos_token_id, policy.tokenizer.encode
    reply = policy.reply_ids("84", after=end, role="tool")
    assert completions[2][real[2]].tolist() == [*encode("12 * 7?"), end, *reply, *encode("84"), end]


def test_turns_end_as_the_template_ends_them(tmp_path):
    """Where the end of sequence is another token, as of Gemma and Phi-3."""
    path = write_checkpoint(tmp_path / "llama", "llama", chat=True)
    policy = opened(path, end_ids=None)
    policy.tokenizer.eos_token = "<|endoftext|>"
    rows = policy.tokenize_demonstrations(["a"], [turns("b", "c", "d")])
    text = policy.tokenizer.decode(rows.ids[0, -rows.mask.shape[1] :])
    assert text == "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    single = policy.tokenize_demonstrations(["a"], ["b"]).ids[0]
    assert policy.tokenizer.decode(single).endswith("assistant\nb<|endoftext|>")


def test_wrong_demonstrations_are_refused(policy, tmp_path):
    file = tmp_path / "a.jsonl"
    for talk, message in (
        (turns("a", "b"), "it does not end with a message of the assistant"),
        (turns("a", "b", "c", role="system"), "message 2 is the system's and should be the user or tool's"),
        ([said("user", "a")], "message 1 is the user's and should be the assistant's"),
        (turns("a", "b", ""), "message 3 is empty"),
    ):
        with pytest.raises(ValueError, match=f"column 'completion': {message}"):
            policy.tokenize_demonstrations(["p"], [talk])
        rows = [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": talk}]
        file.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=f"line 2, column 'completion'(: {message}|, message 3: )"):
            FileDemonstrations(str(file), "prompt", "completion")


class Own(nn.Module):
    """A model of one's own: each token knows the mean of those before it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, ids):
        counts = torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(self.embedding(ids).cumsum(1) / counts)


def gradient(policy, rows: Sampled, tokens: int, *, microbatch_tokens: int) -> torch.Tensor:
    """Of the mean negative log-likelihood, as `SFTLightningModule` has it."""
    policy.zero_grad()
    for index in policy.microbatches(rows, microbatch_tokens):
        (-policy.logprobs(rows[index], temperature=1.0).sum() / tokens).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("kind", ["shared", "plain", "own"])
def test_the_gradient_is_that_of_each_turn_with_all_before_it_as_its_prompt(tmp_path, kind):
    words = tokenizer(chat=True)
    if kind == "own":
        policy = GenericPolicy(Own(len(words)), words)
    else:
        policy = opened(write_checkpoint(tmp_path / "model", "llama", chat=True), share_prompts=kind == "shared")
    prompts, talks = [PROMPTS[0], *PROMPTS], [turns("7", "lower", "3"), *TALKS]  # two have the same prompt
    rows = policy.tokenize_demonstrations(prompts, talks)
    start, tokens = rows.ids.shape[1] - rows.mask.shape[1], int(rows.mask.sum())
    before, after = [], []
    for ids, real, bounds in zip(rows.ids, rows.attention_mask, spans(rows.mask), strict=True):
        for begin, end in bounds:
            before.append(ids[: start + begin][real[: start + begin]].tolist())
            after.append(ids[start + begin : start + end].tolist())
    assert len(before) == 2 + 3 + 1 + 2
    assert sum(map(len, after)) == tokens
    single = policy.tokenize_demonstrations(before, ["x"] * len(before))
    length, width = max(map(len, after)), single.ids.shape[1] - single.mask.shape[1]
    mask = torch.tensor([[t < len(turn) for t in range(length)] for turn in after])
    single = Sampled(
        torch.cat([single.ids[:, :width], torch.tensor([t + [0] * (length - len(t)) for t in after])], 1),
        torch.cat([single.attention_mask[:, :width], mask], 1),
        mask,
        torch.zeros(mask.shape),
        torch.zeros(mask.shape),
        ("",) * len(mask),
        (True,) * len(mask),
    )
    expected = gradient(policy, single, tokens, microbatch_tokens=10_000)
    assert expected.abs().max() > 1e-2
    for microbatch_tokens in (10_000, 60, 1):
        found = gradient(policy, rows, tokens, microbatch_tokens=microbatch_tokens)
        assert_close(found, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max())))
    summed = policy.logprobs(single, temperature=1.0).sum()
    assert_close(policy.logprobs(rows, temperature=1.0).sum(), summed, rtol=1e-6, atol=0)
