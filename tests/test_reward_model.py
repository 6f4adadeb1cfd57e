"""A reward model says what its own logits say, whatever it is batched with; and learns from what rollouts gave."""

import gc
import logging
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_lightning.callbacks.iterative import RewardModelTraining
from grpo_lightning.reward.model import RewardModel
from tests.kills import difference
from tests.support.checkpoints import write_reward_model
from tests.support.running import small_run

SETTINGS = {
    **{"dtype": "float32", "device": "cpu", "batch_tokens": 200, "max_length": 256},
    **{"label": 0, "trust_remote_code": False},
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 34?"}]
PROMPTS = ["What is 12 + 34?", MESSAGES, "Corgis are", "State the final answer"]
COMPLETIONS = ["46", "<think>Adding 12 and 34 gives 46.</think><answer>46</answer>", " small dogs.", " " + "pizza " * 9]
# By hand, from tests.support.checkpoints.CHATML.
CHAT_TEXTS = [
    "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n46<|im_end|>\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    "<think>Adding 12 and 34 gives 46.</think><answer>46</answer><|im_end|>\n",
]
PLAIN_TEXTS = [
    "What is 12 + 34?46",
    "Be brief.\n\nWhat is 12 + 34?<think>Adding 12 and 34 gives 46.</think><answer>46</answer>",
]


def reward_model(path, **settings) -> RewardModel:
    return RewardModel(path=str(path), **{**SETTINGS, **settings})


def alone(path, text, label=0) -> float:
    """The logit of one text that nothing is padded to, by transformers only."""
    words = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    ids = words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, label])


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("chat"), "qwen3", chat=True, labels=3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("plain"), "gpt2", chat=False, pad=False)


def test_a_score_is_the_logit_of_the_chat_or_without_a_template_of_prompt_and_completion(chat, plain):
    for path, texts, label in ((chat, CHAT_TEXTS, 0), (chat, CHAT_TEXTS, 2), (plain, PLAIN_TEXTS, 0)):
        found = reward_model(path, label=label)(PROMPTS[:2], COMPLETIONS[:2], answer=["46", "46"])
        assert found == pytest.approx([alone(path, text, label) for text in texts], abs=1e-5)
        assert abs(found[0] - found[1]) > 0.01


def test_scores_keep_their_order_and_do_not_depend_on_the_batch(chat, plain):
    for path in (chat, plain):
        single = [reward_model(path)([prompt], [text])[0] for prompt, text in zip(PROMPTS, COMPLETIONS)]
        assert len({round(value, 3) for value in single}) == 4
        for tokens in (1, 70, 10_000):
            found = reward_model(path, batch_tokens=tokens)(PROMPTS, COMPLETIONS)
            assert found == pytest.approx(single, abs=1e-5), tokens


def test_the_end_of_a_longer_text_is_read_and_said_once(chat, caplog):
    model = reward_model(chat, max_length=8)
    with caplog.at_level(logging.WARNING):
        (long, short) = model.encode(["What is 12 + 34?", "a"], ["46", "b"])
        model.encode(["What is 12 + 34?"], ["46"])
    words = AutoTokenizer.from_pretrained(chat)
    assert long == words(CHAT_TEXTS[0], add_special_tokens=False)["input_ids"][-8:]
    assert len(short) == 8
    warnings = [record.message for record in caplog.records if "max_length" in record.message]
    assert len(warnings) == 1
    assert "2 of 2 texts" in warnings[0]


def test_neither_inference_mode_nor_autocast_nor_the_random_state_takes_part(chat):
    model, expected = reward_model(chat), reward_model(chat)(PROMPTS, COMPLETIONS)
    model.reset()
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(PROMPTS, COMPLETIONS) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(tensor.is_inference() for tensor in [*model.network.parameters(), *model.network.buffers()])
    model.logits([[1, 2, 3]]).sum().backward()
    assert model.network.score.weight.grad.abs().sum() > 0


# --- training it

TRAINING = {
    **{"reward": "model", "every": 1, "epochs": 1, "batch_size": 4, "lr": 1e-3},
    **{"replay": 0.1, "buffer_size": 100, "max_grad_norm": 1.0, "seed": 0},
}


def callback(**settings) -> RewardModelTraining:
    return RewardModelTraining(**{**TRAINING, **settings})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("scorer"), "qwen3", chat=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("llama"), "llama", chat=False)


def test_the_replayed_share_is_exact(monkeypatch):
    seen: list = []
    monkeypatch.setattr(RewardModelTraining, "_step", lambda self, model, batch, optimizer: seen.extend(batch) or 0.0)
    for new, share, stored, expected in (
        (36, 0.1, 100, 4),  # 4 / (36 + 4) = 0.1
        (30, 0.25, 100, 10),  # 10 / 40
        (8, 0.1, 100, 1),  # 8 * 0.1 / 0.9 = 0.89
        (4, 0.1, 100, 0),  # 0.44
        (36, 0.0, 100, 0),
        (36, 0.1, 3, 3),  # no more than there are
    ):
        train = callback(replay=share, batch_size=7)
        train.pending, train.buffer = separable(new), [("p", str(number), True) for number in range(stored)]
        train._optimizer = torch.optim.SGD([torch.zeros(1)])
        seen.clear()
        train.update(lambda prompts, texts: [0.0] * len(texts), 1)
        assert len(seen) == new + expected
        assert len({example for example in seen if example[0] == "p"}) == expected


def separable(count, seed=0) -> list:
    """Right where the completion has a 4."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        right = chance.random() < 0.5
        text = "".join(chance.choice("0123456789" if right else "012356789") for _ in range(5))
        found.append(("n", text[:2] + "4" + text[3:] if right else text, right))
    return found


def test_accuracy_rises_on_text_that_can_be_told_apart(llama):
    model, train = reward_model(llama), callback(lr=3e-3, batch_size=8, replay=0.2)
    found = []
    for step in range(12):
        train.pending = separable(32, seed=step)  # always new ones: what is measured before the update is unseen
        found.append(train.update(model, step))
    accuracy = [metrics["reward_model/accuracy"] for metrics in found]
    loss = [metrics["reward_model/loss"] for metrics in found]
    assert sum(accuracy[:2]) / 2 < 0.75
    assert sum(accuracy[-3:]) / 3 > 0.9
    assert loss[-1] < 0.5 * loss[0]


def trained(path, **settings) -> dict:
    model = reward_model(path, batch_tokens=settings.pop("batch_tokens", 200))
    model.reset()
    train = callback(**settings)
    train.pending = separable(8)
    train.update(model, 1)
    return {name: weight.clone() for name, weight in model.network.state_dict().items()}


def test_the_forward_batches_do_not_change_the_update(llama):
    # Clipped far below Adam's epsilon, where a step is proportional to the gradient.
    settings = {"max_grad_norm": 1e-9, "batch_size": 8, "lr": 1.0}
    one, other = trained(llama, batch_tokens=10_000, **settings), trained(llama, batch_tokens=1, **settings)
    start = reward_model(llama)
    start.reset()
    moved = [one[name] - weight for name, weight in start.network.state_dict().items()]
    assert max(float(difference.abs().max()) for difference in moved) > 1e-3
    for name in one:
        assert torch.allclose(one[name], other[name], atol=1e-5), name


def settings_of(path) -> list[str]:
    return [
        *("reward=[custom,format,model]", "callbacks=reward_model", "rollout.outcome=custom", "rollout.threshold=0.4"),
        *(f"reward.model.function.path={path}", "reward.model.function.max_length=256"),
        *("reward.model.function.device=cpu", "reward.model.clip=[-1,1]", "callbacks.reward_model.every=1"),
        *("callbacks.reward_model.batch_size=3", "callbacks.reward_model.lr=0.003"),
        *("callbacks.reward_model.buffer_size=12", "validation.every=2", "callbacks.checkpoint.every=1"),
    ]


def train_run(directory, *overrides) -> dict:
    """The metrics it ends with; nothing of it stays in memory, as in a process of its own."""
    metrics = dict(small_run(directory, *overrides).metrics)
    gc.collect()
    return metrics


def last(directory) -> dict:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


def state_of(content) -> dict:
    return content["callbacks"]["RewardModelTraining"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(checkpoint, tmp_path):
    overrides = settings_of(checkpoint)
    metrics = train_run(tmp_path / "unbroken", *overrides, "steps=4")
    train_run(tmp_path / "broken", *overrides, "steps=2")
    half = state_of(last(tmp_path / "broken"))
    assert (len(half["pending"]), len(half["buffer"])) == (0, 12)  # 8 rows a step
    resumed = train_run(tmp_path / "broken", *overrides, "steps=4", "checkpoint=last")
    one, other = last(tmp_path / "unbroken"), last(tmp_path / "broken")
    assert difference(one["state_dict"], other["state_dict"]) is None
    assert difference(state_of(one), state_of(other)) is None
    assert len(state_of(one)["buffer"]) == 12
    measured = {name for name in metrics if not name.startswith(("time/", "perf/"))}
    assert {name: resumed[name] for name in measured} == {name: metrics[name] for name in measured}
    assert {"reward_model/loss", "reward_model/accuracy"} <= measured
