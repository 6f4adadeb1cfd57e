"""A checkpoint is exported and validated with its own policy, and refuses one that its weights do not fit."""

import json
import re
import shutil

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.checkpoint import own_policy
from grpo_lightning.checkpoint.own_policy import own_settings, recalled
from tests.support.composed import composed
from tests.support.provocations import provocation
from tests.support.running import SMALL, small_run

TASK = [setting for setting in SMALL if not setting.startswith(("policy", "rollout.max_new_tokens"))]
ATTENTION = "theirs/kernel"
LOADED = {
    "_target_": "grpo_lightning.policy.hf.load",
    "path": "/models/a",
    "trust_remote_code": False,
    "adapter": {"r": 8},
}


MINE = {"policy.path": "/models/a", "policy.trust_remote_code": False, "policy.adapter.r": 8}
MINE["policy._target_"] = "mine.load"


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


def test_it_is_said_which_policy_a_checkpoint_names(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "theirs.ckpt"
    torch.save({"step": {"completed": 1}, "run": {"config": recorded()}}, file)
    updates = recalled({"checkpoint": str(file), "mode": "export", "run_dir": str(tmp_path)}, [], nothing)
    assert updates["policy"]["path"] == "/models/a"
    assert "policy.path=/models/a, as the checkpoint says" in caplog.text


@provocation("`mode=export checkpoint=FILE` of a run with `policy.hidden_size=16`", "exports that policy")
def test_an_export_needs_nothing_but_the_checkpoint(trained, tmp_path):
    run = grpo.compose("mode=export", f"checkpoint={trained}/checkpoints/best.ckpt", run_dir=tmp_path)
    assert run.config["module"]["policy"] == run.config["policy"]
    assert run.config["policy"]["seed"] == 7
    run.export()
    stored = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(run.module.state_dict()[name], value) for name, value in stored.items())
    assert (tmp_path / "export" / "model.safetensors").exists()


@provocation("`mode=validate checkpoint=FILE` without the policy's settings", "measures what the training measured")
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


def test_the_last_checkpoint_of_the_directory_is_read_too(trained):
    named = {"mode": "export", "checkpoint": "last", "run_dir": str(trained)}
    assert recalled(named, (), nothing)["policy"]["hidden_size"] == 16
    assert recalled(named | {"mode": "fit"}, (), nothing) == {}
    assert recalled(named | {"run_dir": "/nonexistent"}, (), nothing) == {}


def test_what_the_user_says_wins():
    value = {"policy.path": "/moved/a", "policy.adapter.r": 4, "rollout.max_new_tokens": 7}.get
    then = recorded(rollout={"max_new_tokens": 100}, validation={"max_new_tokens": 50}, loss={"kl_coef": 0.5})
    words = ["policy.path=/moved/a", "++policy.adapter.r=4", "rollout.max_new_tokens=7"]
    updates = own_settings(then, words, value)
    assert updates["policy"] == LOADED | {"path": "/moved/a", "adapter": {"r": 4}}
    assert LOADED["adapter"] == {"r": 8}
    assert updates == {
        "policy": updates["policy"],
        "reference": then["reference"],
        "validation.max_new_tokens": 50,
        "loss.kl_coef": 0.5,
    }
    chosen = own_settings(then, ["policy=gpt2", "reference@reference=none"], nothing)
    assert chosen == {}


@pytest.mark.grid
@pytest.mark.parametrize(
    "policy, message",
    [
        pytest.param(
            {"_target_": "grpo_lightning.policy.hf.HFPolicy", "model": {"_target_": "grpo_lightning.composition.part"}},
            r"its policy was an object of a Python program; allowed is policy=NAME",
            marks=provocation("`mode=export` of a checkpoint whose policy was a live object", "asks for `policy=NAME`"),
        ),
        pytest.param(
            LOADED | {"path": "REDACTED"},
            r"its policy.path is “REDACTED”; allowed is policy.path=… with the value",
            marks=provocation("`mode=export` of a checkpoint with `policy.path` redacted", "asks for it"),
        ),
        pytest.param(
            LOADED | {"path": "./my-REDACTED"}, r"its policy.path is “./my-REDACTED”; allowed is policy.path=… w"
        ),
        pytest.param(
            LOADED | {"attn_implementation": ATTENTION},
            r"its policy.attn_implementation is “theirs/kernel”, a kernel of the hub; allowed is policy.attn_impl",
            marks=provocation(
                "a stranger's checkpoint that names a kernel of the hub for attention", "refused by its key"
            ),
        ),
        pytest.param(
            LOADED | {"trust_remote_code": True},
            r"it was trained with policy.trust_remote_code=true and policy.path=\S+, whose code would run, which",
            marks=provocation("a stranger's checkpoint that says `trust_remote_code: true`", "refused by its key"),
        ),
        *(
            pytest.param(
                LOADED | {"trust_remote_code": value},
                r"it was trained with policy.trust_remote_code=true and policy.path=\S+, whose code would run, which ",
                marks=provocation(f"a stranger's checkpoint with `trust_remote_code: {value!r}`", "refused by its key"),
            )
            for value in ({"x": 1}, {}, [], [True], 1, "yes")
        ),
        pytest.param(
            {"_target_": "os.system", "command": "true"},
            r"its policy was built by “os.system”; allowed without policy=NAME",
            marks=provocation("a stranger's checkpoint with the policy `_target_: os.system`", "refused"),
        ),
        pytest.param(
            {"_target_": "x\nimport os; evil()\r\n#"},
            r"its policy was built by “x\\nimport os; evil\(\)\\r\\n#”; allowed without policy=NAME",
            id="lines",
        ),
        pytest.param(
            LOADED | {"adapter": {"_target_": "os.getcwd"}}, r"its policy was built by .*os.getcwd", id="inner"
        ),
        pytest.param(
            LOADED | {"path": "${oc.env:HOME}"},
            r"its policy.path is “\$\{oc.env:HOME\}”; allowed is policy.path=",
            marks=provocation("a stranger's checkpoint with `path: ${oc.env:…}`", "refused by its key"),
        ),
    ],
)
def test_what_cannot_be_taken_over_is_asked_for(policy, message, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    content = {"run": {"config": recorded(policy=policy)}, "step": {"completed": 1}}
    torch.save(content, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=r"^checkpoint=last: " + message):
        grpo.compose("mode=export", "checkpoint=last", run_dir=tmp_path)
    value = {"policy.trust_remote_code": True, "policy.path": "x", "policy.attn_implementation": ATTENTION}.get
    if "adapter" in policy and not isinstance(policy["adapter"].get("_target_"), str):
        words = ["policy.path=x", "policy.trust_remote_code=true", f"policy.attn_implementation={ATTENTION}"]
        given = own_settings(recorded(policy=policy), words, value)
        assert given["policy"] == policy | {"path": "x", "trust_remote_code": True, "attn_implementation": ATTENTION}


@provocation(
    "a stranger's checkpoint is exported with a policy of the user's own, `policy._target_=mine.load`, for which it "
    "has a `path`, a `directory`, a switch, or arguments by their place that the settings do not have",
    "asks for them by their keys",
)
def test_a_checkpoint_says_not_where_the_users_code_writes():
    for more, key in (
        ({"directory": "../.bashrc.d"}, "directory"),
        ({"options": [{"save_dir": 7}]}, "options.0.save_dir"),
        ({"_args_": ["../x"]}, "_args_.0"),
        ({"cache": "../.bashrc.d/x"}, "cache"),
        ({"output": "../.bashrc"}, "output"),
        ({"options": {"csvfile": "x"}}, "options.csvfile"),
        ({"history": {"path": "../.bashrc"}}, "history.path"),
        ({"report": "../.bashrc"}, "report"),
        ({"more": [{"x": b"../.bashrc"}]}, "more.0.x"),
    ):
        with pytest.raises(ValueError, match=rf"its policy\.{key} is \S+; allowed is policy\.{key}=… with the value$"):
            own_settings(recorded(policy=LOADED | more), ["policy._target_=mine.load"], MINE.get)
    told = r"its policy\.path is “theirs” and policy\.run_code is “True”; allowed is policy\.path=… policy\.run_code=…"
    theirs = recorded(policy=LOADED | {"path": "theirs", "run_code": True})
    with pytest.raises(ValueError, match=f"{told} with the values$"):
        own_settings(theirs, ["policy._target_=mine.load"], MINE.get)
    given = ["policy._target_=mine.load", "policy.directory=here"]
    said = MINE | {"policy.directory": "policy.directory"}
    taken = own_settings(recorded(policy=LOADED | {"directory": "../x"}), given, said.get)
    assert "policy" not in taken  # nor is anything left out of the user's settings that the checkpoint leaves out
    assert own_settings(recorded(policy=LOADED | {"directory": "x"}), [], nothing)["policy"]["directory"] == "x"


@provocation(
    "a stranger's checkpoint with `_convert_: none`, so that its chat template would be given objects of OmegaConf's, "
    "which resolve what it says",
    "refused by its key",
)
def test_a_checkpoint_says_not_what_parts_are_made_of():
    for value in ("none", "partial", "object", None, {"a": 1}, {}, []):
        for key, policy in (
            ("policy._convert_", LOADED | {"_convert_": value}),
            ("policy.template_kwargs._convert_", LOADED | {"template_kwargs": {"_convert_": value}}),
        ):
            said = "1" if value == {"a": 1} else re.escape(str(value))
            with pytest.raises(ValueError, match=rf"its {key}(\.a)? is “{said}”; allowed is {key}"):
                own_settings(recorded(policy=policy), [], nothing)
            assert own_settings(recorded(policy=policy), [f"++{key}=all", f"++{key}.a=1"], {key: "all"}.get)
    assert own_settings(recorded(policy=LOADED | {"_convert_": "all"}), [], nothing)


@provocation(
    "a stranger's checkpoint that hides `${…}` or `_target_` in a mapping `a: {b: …}` behind a key `a.b` with another "
    "value, behind a number beside a text, or behind a key that the command names",
    "refused by its key",
)
def test_no_key_hides_what_stands_at_another(trained, tmp_path, monkeypatch):
    (tmp_path / "tools.py").write_text("def backup(target):\n    open('HIT', 'w').write(target)\n")
    monkeypatch.chdir(tmp_path)
    call = "${oc.create:{_target_: tools.backup, target: x}}"
    content = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    for name, node, told in (
        ("rank_pattern", {"a": {"b": call}, "a.b": 4}, r"its policy\.rank_pattern\.a\.b is “\$"),
        ("rank_pattern", {"a.b": {"c": call}, "a": {"b.c": 4}}, r"its policy\.rank_pattern\.a\.b\.c is “\$"),
        ("rank_pattern", {"a": [call], "a.0": 4}, r"its policy\.rank_pattern\.a\.0 is “\$"),
        (
            "rank_pattern",
            {1: {"b": call}, "1.b": 4},
            r"its settings have “policy\.rank_pattern\.1\.b”; allowed are keys",
        ),
        ("rank_pattern", {"${x}": 4}, r"its settings have “policy\.rank_pattern\.\$\{x\}”; allowed are keys of text"),
        ("a", {"_target_": "tools.backup"}, "its policy was built by “.*tools.backup"),
        ("seed.deep", call, r"its policy\.seed\.deep is “\$"),
    ):
        policy = dict(content["run"]["config"]["policy"]) | {name: node}
        if name == "a":
            policy["a._target_"] = policy["_target_"]
        run = content["run"] | {"config": content["run"]["config"] | {"policy": policy}}
        torch.save(content | {"run": run}, "theirs.ckpt")
        words = ["++policy.seed.deep=1"] if name == "seed.deep" else []
        with pytest.raises(ValueError, match=r"^checkpoint=theirs.ckpt: " + told):
            grpo.compose("mode=export", "checkpoint=theirs.ckpt", *words, run_dir="out")
        assert not (tmp_path / "HIT").exists()


def test_nothing_of_a_checkpoint_is_resolved_whatever_was_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(own_policy, "_check_taken", lambda *_: None)
    file = tmp_path / "theirs.ckpt"
    named = {"checkpoint": str(file), "mode": "export", "run_dir": str(tmp_path)}
    for more in ({"a": {"b": ["x ${steps}"]}}, {"${steps}": 1}):
        torch.save({"step": {"completed": 1}, "run": {"config": recorded(policy=LOADED | more)}}, file)
        with pytest.raises(ValueError, match=r"theirs.ckpt: its settings refer to others; allowed are plain values$"):
            recalled(named, [], nothing)


@provocation(
    "`checkpoint=theirs.ckpt policy.trust_remote_code=true`, which says itself where that code lies",
    "asks for `policy.path`, too",
)
def test_trust_is_in_a_path_that_the_user_names():
    then = recorded(policy=LOADED | {"trust_remote_code": True})
    told = r"it was trained with policy.trust_remote_code=true and policy.path=\S+, whose code would run"
    for words in (["policy.trust_remote_code=true"], ["policy.path=x"]):
        with pytest.raises(ValueError, match=told):
            own_settings(then, words, {"policy.trust_remote_code": True, "policy.path": "x"}.get)


@provocation("`checkpoint=FILE` of a policy of another shape", "names the settings of the policy that differ")
@pytest.mark.parametrize("mode", ["fit", "validate", "export"])
def test_a_policy_of_another_shape_is_named_by_its_settings(mode, trained, tmp_path):
    best = f"checkpoint={trained}/checkpoints/best.ckpt"
    wide = [*SMALL, "policy.hidden_size=32", f"mode={mode}"]
    run = grpo.compose(best, *wide, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^checkpoint=.*best.ckpt: its policy has other settings: ") as error:
        getattr(run, mode)()
    assert "policy.hidden_size was “16” and is “32” (" in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_of_the_first_version_are_understood():
    """It had no version in its checkpoints, and the same names for what builds policies."""
    now = composed()["policy"]
    old = {key: value for key, value in now.items() if key != "share_prompts"}
    assert own_settings(recorded(policy=old), [], nothing)["policy"] == old
    assert own_settings({}, [], nothing) == {}


@provocation("a run killed after its last step, before its export, then `checkpoint=last`", "exports, and ends")
def test_a_run_killed_before_its_export_finishes(trained):
    shutil.rmtree(trained / "export")
    (trained / "summary.json").unlink()
    small_run(trained, "policy.seed=7", "checkpoint=last")
    assert (trained / "export" / "model.safetensors").exists()
    assert json.loads((trained / "summary.json").read_text())["steps"] == 1


@provocation("`mode=export` of a checkpoint with a setting whose name is a command of a shell", "it is told as a name")
def test_a_setting_is_asked_for_as_a_word():
    node = LOADED | {"x; touch HIT #": "<redacted>"}
    told = r"^its policy\.x…touch…HIT… is “<redacted>”; allowed is policy\.x…touch…HIT…=… with the value$"
    with pytest.raises(ValueError, match=told):
        own_settings(recorded(policy=node), [], {}.get)
