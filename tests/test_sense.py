"""What is told of data and paths before the first step: lengths, equal rows, absent directories."""

import json
from functools import partial

import pytest

import grpo_lightning as grpo
from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.reference import another_model
from grpo_lightning.reward import PerCompletion, RewardSpec
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.reward.scoring import score
from tests.support.columns import Judge, per_completion
from tests.support.running import SMALL

TASK = [word for word in SMALL if not word.startswith(("data.train_size", "reward"))]


def rows(path, prompts, /, **columns):
    path.write_text("".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts))
    return f"data.path={path}"


def small_run(directory, *overrides):
    custom = ["reward=[custom]", "reward.custom.function._target_=tests.support.rewards.vowels"]
    own = [word for word in TASK if "policy=hf" not in overrides or not word.startswith("policy")]
    return grpo.compose(*own, *custom, *overrides, run_dir=directory).fit()


@pytest.fixture
def started(monkeypatch):
    """Fails where a run comes as far as its first rollout."""
    monkeypatch.setattr("grpo_lightning.rollout.Collector.collect", lambda *_, **__: pytest.fail("a rollout began"))


def test_a_prompt_beyond_the_context_is_named_by_its_line(tmp_path, started):
    prompts = [f"number {i}" for i in range(40)]
    prompts[30] = "x" * 507
    path = rows(tmp_path / "my.jsonl", prompts)
    held_out = rows(tmp_path / "held_out.jsonl", ["a", "b"]).replace("data.path", "data.validation_path")
    with pytest.raises(ValueError, match="line 31") as error:
        small_run(tmp_path / "run", "data=jsonl", path, held_out)
    assert str(error.value) == (
        f"{tmp_path}/my.jsonl, line 31: the prompt has 508 tokens, which with rollout.max_new_tokens=10 are more "
        "than the model's context of 512; allowed is data.max_prompt_length=502, which leaves out longer prompts, or a "
        "lower rollout.max_new_tokens"
    )


@pytest.mark.slow
def test_prompts_that_just_fit_and_those_left_out_are_fine(tmp_path, caplog):
    prompts = [*(f"number {i}" for i in range(40)), "x" * 501, "y" * 505]  # and the template's newline
    path = rows(tmp_path / "my.jsonl", prompts)
    held_out = rows(tmp_path / "held_out.jsonl", ["a", "b"]).replace("data.path", "data.validation_path")
    small_run(tmp_path / "run", "data=jsonl", path, held_out, "data.max_prompt_length=502")
    assert "dropped 1 training and 0 held-out prompts" in caplog.text
    small_run(tmp_path / "all", "data=jsonl", rows(tmp_path / "my.jsonl", prompts[:-1]), held_out)
    path = rows(tmp_path / "my.jsonl", prompts)
    with pytest.raises(ValueError, match=r"my.jsonl, line 42: the prompt has 506 tokens"):
        small_run(tmp_path / "high", "data=jsonl", path, held_out, "data.max_prompt_length=510")


@pytest.mark.slow
def test_held_out_prompts_are_measured_with_their_own_lengths(tmp_path, started):
    path = rows(tmp_path / "my.jsonl", ["a", "b", "c"])
    held_out = rows(tmp_path / "held_out.jsonl", ["a", "x" * 420]).replace("data.path", "data.validation_path")
    with pytest.raises(ValueError, match=r"held_out.jsonl, line 2: .* 421 tokens, .* validation.max_new_tokens=100 "):
        small_run(tmp_path, "data=jsonl", path, held_out, "validation.max_new_tokens=100")
    with pytest.raises(ValueError, match=r"allowed is rollout.max_new_tokens below 512$"):
        small_run(tmp_path, "rollout.max_new_tokens=512")


@pytest.mark.slow
def test_rows_that_are_all_equal_are_said(tmp_path, caplog):
    path = rows(tmp_path / "my.jsonl", ["the same"] * 20)
    with pytest.raises(ValueError, match=r"data: all 20 rows have the same prompt .* at least 2 different prompts"):
        small_run(tmp_path / "a", "data=jsonl", path)
    held_out = rows(tmp_path / "held_out.jsonl", ["a", "b"]).replace("data.path", "data.validation_path")
    small_run(tmp_path / "b", "data=jsonl", path, held_out)
    assert "all 20 training prompts are the same, 'the same': only this one is trained on" in caplog.text
    caplog.clear()
    small_run(tmp_path / "c", "data=jsonl", "reward=[custom]", rows(tmp_path / "my.jsonl", ["a", "b"]), held_out)
    assert "are the same" not in caplog.text
    # One prompt may begin many episodes: whom the policy talks to knows more of the row.
    path = rows(tmp_path / "my.jsonl", ["the same"] * 20, number=3)
    held_out = rows(tmp_path / "held_out.jsonl", ["a", "b"], number=3).replace("data.path", "data.validation_path")
    game = "environment.function._target_=tests.support.environments.guess"
    small_run(tmp_path / "d", "data=jsonl", path, held_out, "environment=custom", game)
    assert "are the same" not in caplog.text


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_any_other_column_reaches_rewards_of_every_kind(timeout):
    odd = ["function", "name", "args", "kwargs", "cls", "class", "a b", "", "_target_", "weight", "calls", "row"]
    columns = dict.fromkeys([*odd, "completion", "func", "keywords", "text"], (1, 2))
    kinds = {"method": Judge().method, "object": Judge(), "partial": partial(Judge.method, Judge())}
    kinds |= {"single": PerCompletion(per_completion), "bound": partial(PerCompletion(per_completion))}
    rewards = {name: RewardSpec(function, 1.0, timeout=timeout) for name, function in kinds.items()}
    assert score(rewards, ("p", "q"), ("ab", "abc"), columns) == {name: [2.0, 3.0] for name in kinds}


def test_names_of_the_hub_and_directories_pass_and_other_paths_are_told(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("gpt2", "Qwen/Qwen3-0.6B", "model", "./model", str(tmp_path)):
        assert local_or_hub(path, "policy.path") == path
    assert local_or_hub("~/model", "policy.path") == str(tmp_path / "model")
    for path in ("./nothing", "/nowhere/model", "~/no-such-model", "a/b/c", "model/none", "none/"):
        with pytest.raises(ValueError, match=rf"^policy.path='{path}': no such file or directory; allowed is one that"):
            local_or_hub(path, "policy.path")
    with pytest.raises(ValueError, match=r"\(there is policy\.path=model\)"):
        local_or_hub("./modle", "policy.path")


@pytest.mark.slow
def test_every_path_of_a_model_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    model = {"dtype": "float32", "trust_remote_code": False}
    with pytest.raises(
        ValueError, match=r"  policy.path=./modle: allowed is text: a directory that exists, or NAME or"
    ):
        small_run(tmp_path, "policy=hf", "policy.path=./modle")
    with pytest.raises(ValueError, match=r"^reference.path='./modle': no such file"):
        another_model(None, path="./modle", attn_implementation="sdpa", **model)
    more = {"device": None, "batch_tokens": 9, "max_length": 9, "quantization": None, "label": 0}
    with pytest.raises(ValueError, match=r"^reward.model.function.path='./modle': no such file"):
        RewardModel(path="./modle", **model, **more)
