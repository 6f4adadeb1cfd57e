"""A checkpoint is exported and validated with its own policy, and refuses one that its weights do not fit."""

import json
import shutil

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.checkpoint.policy import policy_settings
from tests.support.composed import composed
from tests.support.running import SMALL, small_run

TASK = [setting for setting in SMALL if not setting.startswith(("policy", "rollout.max_new_tokens"))]
LOADED = {
    "_target_": "grpo_lightning.policy.loading.load",
    "path": "/models/a",
    "trust_remote_code": False,
    "adapter": {"r": 8},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose policy nothing but its own settings describes."""
    directory = tmp_path_factory.mktemp("trained")
    small_run(directory, "policy.seed=7")
    return directory


def recorded(**parts):
    return {"policy": LOADED, "reference": {"_target_": "grpo_lightning.reference.frozen_copy"}, **parts}


def nothing(key):
    return None


def settings_of(config, overrides, current, directory):
    torch.save({"step": {"completed": 1}, "run": {"config": config}}, directory / "x.ckpt")
    named = {"mode": "export", "checkpoint": str(directory / "x.ckpt"), "run_dir": str(directory)}
    return policy_settings(named, overrides, current)


def test_an_export_needs_nothing_but_the_checkpoint(trained, tmp_path, caplog):
    caplog.set_level("INFO")
    run = grpo.compose("mode=export", f"checkpoint={trained}/checkpoints/best.ckpt", run_dir=tmp_path)
    assert run.config["module"]["policy"] == run.config["policy"]
    assert run.config["policy"]["seed"] == 7
    run.export()
    stored = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(run.module.state_dict()[name], value) for name, value in stored.items())
    assert (tmp_path / "export" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_validation_has_the_policy_and_lengths_of_the_training(trained, tmp_path):
    best = f"checkpoint={trained}/checkpoints/last.ckpt"
    run = grpo.compose("mode=validate", best, *TASK, run_dir=tmp_path)
    metrics = run.validate()
    known = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)["step"]["metrics"]
    assert {name: value for name, value in metrics.items() if name.startswith("val/")} == {
        name: value for name, value in known.items() if name.startswith("val/")
    }
    assert run.module.validated_at == 1
    assert run.config["validation"]["max_new_tokens"] == 10
    given = grpo.compose("mode=validate", best, *TASK, "rollout.max_new_tokens=5", run_dir=tmp_path)
    assert given.config["validation"]["max_new_tokens"] == given.config["rollout"]["max_new_tokens"] == 5


def test_the_last_checkpoint_of_the_directory_is_read_too(trained, tmp_path, caplog):
    named = {"mode": "export", "checkpoint": "last", "run_dir": str(trained)}
    assert policy_settings(named, (), nothing)["policy"]["hidden_size"] == 16
    assert policy_settings(named | {"mode": "fit"}, (), nothing) == {}
    assert policy_settings(named | {"run_dir": "/nonexistent"}, (), nothing) == {}
    file = tmp_path / "a.ckpt"
    torch.save({"step": {"completed": 1}, "run": {"config": recorded()}}, file)
    caplog.set_level("INFO")
    assert policy_settings(named | {"checkpoint": str(file)}, (), nothing)["policy"] == LOADED
    assert "policy.path=/models/a, as in the checkpoint" in caplog.text


def test_what_the_user_says_wins(tmp_path):
    value = {"policy.path": "/moved/a", "policy.adapter.r": 4, "rollout.max_new_tokens": 7}.get
    then = recorded(rollout={"max_new_tokens": 100}, validation={"max_new_tokens": 50}, loss={"kl_coef": 0.5})
    words = ["policy.path=/moved/a", "++policy.adapter.r=4", "rollout.max_new_tokens=7"]
    updates = settings_of(then, words, value, tmp_path)
    assert updates == {
        "policy": LOADED | {"path": "/moved/a", "adapter": {"r": 4}},
        "reference": then["reference"],
        "validation.max_new_tokens": 50,
        "loss.kl_coef": 0.5,
    }
    assert LOADED["adapter"] == {"r": 8}
    assert settings_of(then, ["policy=gpt2", "reference@reference=none"], nothing, tmp_path) == {}


KERNEL = "somebody/kernel"


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ({"_target_": "x.Y", "model": {"_target_": "grpo_lightning.composition.part"}}, {}, r"object of a Python prog"),
        (LOADED | {"path": "REDACTED"}, {"path": "x"}, r"its policy.path is REDACTED, .*: give policy.path=… yourself"),
        (LOADED | {"path": "${oc.env:HOME}"}, {"path": "x"}, r"its policy.path is \$\{oc.env:HOME\}, which is not"),
        (LOADED | {"attn_implementation": KERNEL}, {"attn_implementation": KERNEL}, r"attn_implementation is somebody"),
        (
            LOADED | {"trust_remote_code": True},
            {"trust_remote_code": True},
            r"its policy.trust_remote_code is True, which would run code \(policy.path=/models/a\)",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_asked_for(policy, given, message, tmp_path):
    values = {f"policy.{name}": value for name, value in given.items()}
    for few in ([], list(values)[:-1]):
        with pytest.raises(ValueError, match=message):
            settings_of(recorded(policy=policy), [f"{key}=…" for key in few], values.get, tmp_path)
    if given:
        taken = settings_of(recorded(policy=policy), [f"{key}=…" for key in values], values.get, tmp_path)
        assert taken["policy"] == policy | given


@pytest.mark.parametrize("mode", ["fit", "validate", "export"])
def test_a_policy_of_another_shape_is_named_by_its_settings(mode, trained, tmp_path):
    best = f"checkpoint={trained}/checkpoints/best.ckpt"
    wide = [*SMALL, "policy.hidden_size=32", f"mode={mode}"]
    run = grpo.compose(best, *wide, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^checkpoint=.*best.ckpt: its policy has other settings: ") as error:
        getattr(run, mode)()
    assert "policy.hidden_size was 16 and is 32 (" in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_of_the_first_version_are_understood(tmp_path):
    """It had no version in its checkpoints, and the same names for what builds policies."""
    now = composed()["policy"]
    old = {key: value for key, value in now.items() if key != "share_prompts"}
    assert settings_of(recorded(policy=old), [], nothing, tmp_path)["policy"] == old
    assert settings_of({}, [], nothing, tmp_path) == {}


def test_a_run_killed_before_its_export_finishes(trained):
    shutil.rmtree(trained / "export")
    (trained / "summary.json").unlink()
    small_run(trained, "policy.seed=7", "checkpoint=last")
    assert (trained / "export" / "model.safetensors").exists()
    assert json.loads((trained / "summary.json").read_text())["steps"] == 1


def test_settings_of_a_checkpoint_run_no_code(tmp_path):
    nested = {"_target_": "grpo_lightning.policy.loading.load", "path": "x", "trust_remote_code": True}
    policy = {"_target_": "grpo_lightning.policy.loading.load", "path": "y", "template_kwargs": {"x": nested}}
    with pytest.raises(ValueError, match=r"its policy\.template_kwargs\.x\.trust_remote_code is True, which would run"):
        settings_of({"policy": policy}, [], nothing, tmp_path)
