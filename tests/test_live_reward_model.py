"""A network that a program has scores as one that is loaded by its path; one of its own needs to know no padding."""

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import grpo_lightning as grpo
from grpo_lightning.reward.model import RewardModel
from tests.support.checkpoints import write_reward_model
from tests.support.composed import ROOT
from tests.test_reward_model import COMPLETIONS, PROMPTS, reward_model

TINY = ROOT / "grpo_lightning" / "policy" / "tiny"
SMALL = (
    "trainer=cpu",
    "steps=1",
    "data.prompts_per_step=2",
    "data.validation_size=2",
    "validation.samples_per_prompt=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=6",
    "callbacks={}",
    "logger=none",
)


class Mean(nn.Module):
    """Scores token ids by their mean, so that padding would show; remembers how it was called."""

    def __init__(self, shape=lambda values: values, labels=1):
        super().__init__()
        self.shape = shape
        self.scale = nn.Parameter(torch.arange(1.0, labels + 1))
        self.dropout = nn.Dropout(0.5)
        self.calls = []

    def forward(self, ids):
        self.calls.append((tuple(ids.shape), self.training, torch.is_grad_enabled()))
        self.device = ids.device
        return self.shape(self.dropout(ids.float()).mean(-1, keepdim=True) * self.scale)


class Letters:
    """A tokenizer of one's own: a letter is its number in the alphabet, and a space none."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text if letter != " "]

    def decode(self, ids):
        return "".join(chr(one + ord("a")) for one in ids)


@pytest.fixture(scope="module", params=["chat", "plain"])
def path(request, tmp_path_factory):
    chat = request.param == "chat"
    directory = tmp_path_factory.mktemp(request.param)
    return write_reward_model(directory, "qwen3" if chat else "gpt2", chat=chat, pad=chat, labels=3)


def loaded(path):
    return AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("label", [0, 2])
def test_a_live_network_scores_as_the_one_of_its_path(path, label):
    network, words = loaded(path)
    expected = reward_model(path, label=label)(PROMPTS, COMPLETIONS)
    assert RewardModel.of(network, words, label=label)(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 4


def test_the_programs_tokenizer_stays_as_it_is_and_texts_are_cut_on_the_left(path, caplog):
    network, words = loaded(path)
    words.truncation_side = "right"
    model = RewardModel.of(network, words, max_length=8)
    with caplog.at_level(logging.WARNING):
        rows = model.encode(PROMPTS[:2], COMPLETIONS[:2])
    assert words.truncation_side == "right"
    assert rows == reward_model(path, max_length=8).encode(PROMPTS[:2], COMPLETIONS[:2])
    assert "2 of 2 texts are longer" in caplog.text


def test_rows_of_ones_own_network_are_of_equal_length_and_keep_their_order():
    network = Mean()
    model = RewardModel.of(network, Letters(), batch_tokens=8)
    # a=0 b=1 c=2 d=3: means of (a b d) 4/3, (c c) 2, (d) 3, (b d d d d) 13/5, (b b) 1, (c c a) 4/3, (d d d) 3
    found = model(["ab", "c", "", "bd", "b", "c c", "dd"], ["d", "c", "d", "ddd", "b", "a", "d"])
    assert found == pytest.approx([4 / 3, 2, 3, 13 / 5, 1, 4 / 3, 3])
    # within 8 tokens, longest first: 1 x 5; 2 of the 3 x 3, then 1; 2 x 2; 1 x 1
    assert [shape for shape, _, _ in network.calls] == [(1, 5), (2, 3), (1, 3), (2, 2), (1, 1)]


def test_it_scores_in_evaluation_mode_and_without_a_gradient():
    network = Mean().train()
    model = RewardModel.of(network, Letters())
    first = model(["ab"], ["cd"])
    network.train()
    assert model(["ab"], ["cd"]) == first == [1.5]  # (0 + 1 + 2 + 3) / 4, which dropout would change
    assert [(training, grad) for _, training, grad in network.calls] == [(False, False)] * 2
    assert network.scale.grad is None
    model.logits([[1, 2]]).sum().backward()  # training it is possible all the same
    assert float(network.scale.grad) == 1.5


@pytest.mark.parametrize(
    "shape, gave",
    [
        (lambda values: values.mean(), r"\(\)"),
        (lambda values: values.T, r"\(1, 2\)"),
        (lambda values: values.unsqueeze(-1), r"\(2, 1, 1\)"),
        (lambda values: values[:1], r"\(1, 1\)"),
    ],
)
def test_other_shapes_are_an_error(shape, gave):
    with pytest.raises(ValueError, match=rf"Mean gave {gave} for token ids \(2, 2\): allowed are \(2,\) and"):
        RewardModel.of(Mean(shape), Letters())(["b", "c"], ["b", "e"])


class Scored(nn.Module):
    """The guide's ``reward_model(input_ids)``: one value per row."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 1)

    def forward(self, input_ids):
        return self.embedding(input_ids).mean(1).squeeze(-1)


@pytest.mark.slow
def test_a_run_trains_by_it(tmp_path):
    network, words = Scored(200), AutoTokenizer.from_pretrained(TINY)
    before = copy.deepcopy(network)
    run = grpo.compose(
        *SMALL,
        run_dir=tmp_path,
        reward={"model": RewardModel.of(network, words)},
        data=["Spell sun backward", "Spell moon backward"],
    )
    metrics = run.fit().metrics
    assert metrics["reward/model"] == metrics["reward/total"] != 0
    assert metrics["reward/std"] > 0
    assert all(torch.equal(one, other) for one, other in zip(network.parameters(), before.parameters()))
