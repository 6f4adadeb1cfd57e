"""The reward model learns from what the outcome reward said, replays the exact share, and survives a restart."""

import gc
import random
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.callbacks.reward_model import RewardModelTraining, replayed
from tests.support.checkpoints import write_reward_model
from tests.support.running import small_module, small_run
from tests.test_callbacks import scalars
from tests.test_reward_model import reward_model

SETTINGS = {
    "reward": "model",
    "every": 1,
    "epochs": 1,
    "batch_size": 4,
    "lr": 1e-3,
    "replay": 0.1,
    "buffer_size": 100,
    "max_grad_norm": 1.0,
    "seed": 0,
}


def callback(**settings) -> RewardModelTraining:
    return RewardModelTraining(**{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("scorer"), "qwen3", chat=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("plain"), "llama", chat=False)


# What is learned from


@pytest.mark.parametrize(
    "new, share, stored, expected",
    [
        (36, 0.1, 100, 4),  # 4 / (36 + 4) = 0.1
        (30, 0.25, 100, 10),  # 10 / 40
        (8, 0.1, 100, 1),  # 8 * 0.1 / 0.9 = 0.89
        (4, 0.1, 100, 0),  # 0.44
        (36, 0.0, 100, 0),
        (36, 0.1, 3, 3),  # no more than there are
        (36, 0.1, 0, 0),
    ],
)
def test_the_replayed_share_is_exact(new, share, stored, expected):
    buffer = [("p", str(number), True) for number in range(stored)]
    found = replayed(buffer, new, share, random.Random(0))
    assert len(found) == len(set(found)) == expected
    assert set(found) <= set(buffer)


# One update


def separable(count, seed=0) -> list:
    """Right where the completion has a 4."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        right = chance.random() < 0.5
        text = "".join(chance.choice("0123456789" if right else "012356789") for _ in range(5))
        found.append(("n", text[:2] + "4" + text[3:] if right else text, right))
    return found


def test_accuracy_rises_on_text_that_can_be_told_apart(plain):
    model, train = reward_model(plain), callback(lr=3e-3, batch_size=8, replay=0.2)
    found = []
    for step in range(12):
        train.pending = separable(32, seed=step)  # always new ones: what is measured before the update is unseen
        found.append(train.update(model, step))
    accuracy = [metrics["reward_model/accuracy"] for metrics in found]
    loss = [metrics["reward_model/loss"] for metrics in found]
    assert sum(accuracy[:2]) / 2 < 0.75
    assert sum(accuracy[-3:]) / 3 > 0.9
    assert loss[-1] < 0.5 * loss[0]


def trained(path, step=1, **settings) -> dict:
    model = reward_model(path, batch_tokens=settings.pop("batch_tokens", 200))
    model.reset()
    train = callback(**settings)
    train.pending = separable(8)
    train.update(model, step)
    return {name: weight.clone() for name, weight in model.network.state_dict().items()}


def test_one_step_is_adamws(plain):
    """The first step of Adam moves every weight by lr against the sign of its gradient, clipped or not."""
    model = reward_model(plain)
    model.reset()
    before = model.network.score.weight.detach().clone()
    data = separable(8)
    labels = torch.tensor([float(label) for _, _, label in data])
    logits = torch.cat([model.logits([row]) for row in model.encode([p for p, _, _ in data], [t for _, t, _ in data])])
    torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
    sign = model.network.score.weight.grad.sign()
    after = trained(plain, batch_size=8, lr=1e-2)
    assert torch.allclose(after["score.weight"], before - 1e-2 * sign, atol=1e-4)


def test_the_forward_batches_do_not_change_the_update(plain):
    # Clipped far below Adam's epsilon, where a step is proportional to the gradient.
    settings = {"max_grad_norm": 1e-9, "batch_size": 8, "lr": 1.0}
    one, other = trained(plain, batch_tokens=10_000, **settings), trained(plain, batch_tokens=1, **settings)
    start = reward_model(plain)
    start.reset()
    moved = [one[name] - weight for name, weight in start.network.state_dict().items()]
    assert max(float(difference.abs().max()) for difference in moved) > 1e-3
    for name in one:
        assert torch.allclose(one[name], other[name], atol=1e-5), name


def test_the_seed_and_the_step_choose_the_order(plain):
    settings = {"batch_size": 2}
    one, same, other = (trained(plain, seed=seed, **settings)["score.weight"] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, trained(plain, step=2, **settings)["score.weight"])


# In a run


def settings_of(path, **changed) -> list[str]:
    return [
        "reward=[custom,format,model]",
        "callbacks=reward_model",
        "rollout.outcome=custom",
        "rollout.threshold=0.4",
        f"reward.model.function.path={path}",
        "reward.model.function.max_length=256",
        "reward.model.function.device=cpu",
        "reward.model.clip=[-1,1]",
        "callbacks.reward_model.every=1",
        "callbacks.reward_model.batch_size=3",
        "callbacks.reward_model.lr=0.003",
        "callbacks.reward_model.buffer_size=12",
        "validation.every=2",
        "callbacks.checkpoint.every=1",
        *(f"{key.replace('__', '.')}={value}" for key, value in changed.items()),
    ]


def train_run(directory, *overrides) -> dict:
    """The metrics it ends with; nothing of it stays in memory, as in a process of its own."""
    metrics = dict(small_run(directory, *overrides).metrics)
    gc.collect()
    return metrics


def last(directory) -> dict:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


def state_of(content) -> dict:
    (state,) = (value for key, value in content["callbacks"].items() if key.startswith("RewardModelTraining"))
    return state


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_equals_an_unbroken_one(every, checkpoint, tmp_path):
    overrides = settings_of(checkpoint, callbacks__reward_model__every=every)
    metrics = train_run(tmp_path / "unbroken", *overrides, "steps=4")
    train_run(tmp_path / "broken", *overrides, "steps=2")
    half = state_of(last(tmp_path / "broken"))
    assert (half["trained"] is None) == (every == 3)
    assert (len(half["pending"]), len(half["buffer"])) == ((0, 12) if every == 1 else (16, 0))  # 8 rows a step
    resumed = train_run(tmp_path / "broken", *overrides, "steps=4", "checkpoint=last")
    one, other = last(tmp_path / "unbroken"), last(tmp_path / "broken")
    assert same(one["state_dict"], other["state_dict"])
    assert same(state_of(one), state_of(other))
    assert len(state_of(one)["buffer"]) == 12
    measured = {name for name in metrics if not name.startswith(("time/", "perf/"))}
    assert {name: resumed[name] for name in measured} == {name: metrics[name] for name in measured}
    assert {"reward_model/loss", "reward_model/accuracy"} <= measured


@pytest.mark.slow
def test_it_trains_the_weights_that_rollouts_and_validations_use(checkpoint, tmp_path):
    """At steps 0 and 3; greedy, by a policy that does not move: only the reward model can change what is measured."""
    overrides = settings_of(
        checkpoint, validation__every=3, validation__temperature=0, callbacks__reward_model__every=2
    )
    train_run(tmp_path, *overrides, "optimizer.lr=0", "steps=3")
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["reward_model/loss"]] == [2]
    assert all(0 <= value <= 1 for _, value in found["reward_model/accuracy"])
    (_, before), (_, after) = found["val/reward/model"]
    (_, start), (_, end) = found["val/reward/custom"]
    assert start == end
    assert abs(after - before) > 1e-3
    trained, fresh = state_of(last(tmp_path))["trained"]["weights"], reward_model(checkpoint).network.state_dict()
    assert trained.keys() == fresh.keys()
    assert not torch.equal(trained["score.weight"], fresh["score.weight"])


@pytest.mark.slow
def test_a_checkpoint_is_validated_with_the_weights_it_holds(checkpoint, tmp_path):
    overrides = settings_of(checkpoint, validation__temperature=0)
    trained = train_run(tmp_path, *overrides, "steps=2")
    again = train_run(tmp_path, *overrides, "mode=validate", "checkpoint=last")
    assert again["val/reward/model"] == pytest.approx(trained["val/reward/model"], abs=1e-6)
    fresh = train_run(tmp_path / "other", *overrides, "mode=validate")
    assert abs(fresh["val/reward/model"] - again["val/reward/model"]) > 1e-3


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"callbacks__reward_model__reward": "other"}, "reward=other: allowed is .* of which there are model"),
        ({"rollout__outcome": "model"}, "rollout.outcome=model: allowed is another reward"),
    ],
)
def test_a_run_that_cannot_train_it_does_not_start(changed, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, *settings_of(checkpoint, **changed))


def test_quantized_weights_and_several_processes_are_refused(checkpoint):
    module = small_module(*settings_of(checkpoint))
    model = module.rollout.reward["model"].function
    with pytest.raises(ValueError, match="2 processes would train a reward model each"):
        callback().on_fit_start(SimpleNamespace(world_size=2), module)
    model.quantization = "8bit"
    with pytest.raises(ValueError, match="quantization=8bit"):
        callback().on_fit_start(SimpleNamespace(world_size=1), module)
    with pytest.raises(ValueError, match="there are none: add one"):
        callback().on_fit_start(SimpleNamespace(world_size=1), small_module())
