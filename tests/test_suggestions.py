"""What is said to somebody who mistyped a key or a choice, or used another project's name for it."""

import re

import pytest
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf.errors import OmegaConfBaseException

import grpo_lightning as grpo
from grpo_lightning.config import ConfigError
from grpo_lightning.config.rules import RULES
from grpo_lightning.config.suggestions import (
    aliases,
    explain_compose_error,
    known_keys,
    nearest,
    nearest_key,
    translate_key,
)
from grpo_lightning.config.tree import value_at
from tests.support.composed import CONF, ROOT, composed

SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
EXPLAINED = {
    "reward=[accuracy,formt]": "reward=[…,formt]: allowed is one of accuracy, code, cosine_length,",
    "algorithm=gpro": "; the nearest is grpo",
    "stepps=3": "stepps=3: unknown; the nearest is steps=3",
    "algoritm=dapo": "algoritm=dapo: unknown; the nearest is algorithm=dapo, a part",
    "rollout.groupsize=3": "rollout.groupsize=3: unknown; the nearest is rollout.group_size=3",
    "environment.max_turns=3": "environment.max_turns=3: allowed with environment=",
    "data=my.jsonl": "data=my.jsonl: allowed is data=jsonl data.path=my.jsonl for a",
    "data=openai/math": "data=openai/math: allowed is data=hub data.path=openai/math",
    "reward=[accuracy,my.own.short]": "in place of it, with reward.custom.function._target_=my.own.short, for",
    "epochs=3": "epochs=3: allowed here is steps, which counts rollouts",
    "lr=3e-5": "lr=3e-5: unknown; the nearest is optimizer.lr=3e-5",
    "~stepss": "~stepss: there is no such setting; the nearest is ~steps",
    "hydra.run.dri=x": "hydra.run.dri=x: unknown; the nearest is hydra.run.dir=x",
    "num_generations=8": "num_generations=8: allowed here is rollout.group_size=8, as this project calls",
    "actor_rollout_ref.rollout.n=8": "allowed here is rollout.group_size=8, as this project calls it",
    "reward.exact.weight=1": "the reward exact is not chosen; allowed is reward=[…,exact] with",
    "policy=Qwen/Qwen3-0.6B": "allowed is policy=hf policy.path=Qwen/Qwen3-0.6B for a model of",
    "policy=hf": "policy.path: a value is missing; allowed is policy.path=VALUE",
    "+loss.kl_coef=1": "+loss.kl_coef: it is there already; allowed is loss.kl_coef=VALUE, wit",
    "+policy=hf": "+policy: one is chosen already; allowed is policy=NAME, without the plus",
    "reward=accuracy,format": "allowed is 'reward=[accuracy,format]' for several together, or -m",
    "steps": "steps: allowed is KEY=VALUE",
    "rollout.stop=a > 0": "allowed with spaces, commas, brackets, quotes or =",
    "steps=${nope}": "data.steps: Interpolation key 'nope' not found",
    "a=1": "a=1: unknown; allowed are the keys that `",
    "trainer='\x1b[2Jx'": "\\x1b[2Jx",
}


@pytest.mark.slow
def test_an_override_that_cannot_be_applied_is_explained():
    for override, message in EXPLAINED.items():
        with pytest.raises((HydraException, OmegaConfBaseException)) as error:
            composed(override)
        said = explain_compose_error(error.value, CONF, words=[override])
        assert message in said, override
        assert not {"\n", "\x1b"} & {*said}, override
        assert "hydra.cc" not in said, override


def test_compose_explains_overrides_too():
    with pytest.raises(ConfigError, match="stepps=3: unknown; the nearest is steps=3"):
        grpo.compose("stepps=3")
    with pytest.raises(ConfigError, match=r"policy.path: a value is missing"):
        grpo.compose("policy=hf")


def test_a_choice_that_a_file_leaves_open_is_told(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /loss: ???\n")
    losses = ", ".join(sorted(path.stem for path in (CONF / "loss").glob("[!b]*.yaml")))  # of which base is none
    with pytest.raises(ConfigError) as error:
        grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    told = f"loss: a file leaves this choice open; allowed is one of {losses}, on the command line"
    assert error.value.problems == (told,)


@pytest.mark.slow
def test_a_file_chooses_among_its_defaults(tmp_path):
    (tmp_path / "experiment").mkdir()
    for line, told in (
        ("loss: dapo", "loss=dapo chooses nothing in a file; allowed is a line '- override /loss: NAME' among its"),
        (
            "algorithm: dapo",
            "algorithm=dapo chooses nothing in a file; allowed is a line '- override /algorithm: NAME'",
        ),
    ):
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{line}\n")
        with pytest.raises(ConfigError, match=re.escape(told)):
            grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    (tmp_path / "experiment" / "mine.yaml").write_text("steps: 5\n")
    with pytest.raises(ConfigError, match="nothing reads the settings below experiment; allowed is a file whose"):
        grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")


def test_keys_are_those_of_the_files_unless_they_are_given():
    known = known_keys(CONF)
    assert {key for key in RULES if value_at(composed(), key) is not KeyError} <= known
    assert {"reward.pattern.function.expression", "callbacks.reference.alpha", "rollout.downsample.size"} <= known
    assert not {key for key in known if key.startswith(("hydra", "defaults")) or "_target_" in key}
    error = ConfigCompositionException("Could not override 'my.own.kee'.")
    said = explain_compose_error(error, CONF, ["my.own.key"], ["my.own.kee=3"])
    assert said == "my.own.kee=3: unknown; the nearest is my.own.key=3"


def test_the_nearest_word():
    assert nearest("gpro", ["gspo", "grpo"]) == "grpo"  # the same letters
    assert nearest("xyz", ["gspo", "grpo"]) is None
    assert nearest_key("loss.kl_coeff", {"loss.kl_coef", "module.kl_coeff"}) == "loss.kl_coef"  # beside it first
    assert nearest_key("kl_coeff", {"loss.kl_coef", "steps"}) == "loss.kl_coef"
    assert nearest_key("policy.tiny", {"policy.dtype"}) is None


def cells(number: int) -> list[str]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return [row[number] for row in rows if len(row) == 3]


VALUES = {
    *("grpo", "dapo", "dr_grpo", "k1", "k2", "k3", "k3_weighted", "kl", "mse", "low_var_kl", "seq-mean-token-mean"),
    *("token-mean", "seq-mean-token-sum-norm", "constant_with_warmup", "linear", "cosine", "constant", "gdpo", "rloo"),
    *("devices", "GRPOTrainer", "RLOOTrainer"),
}
"""Words of the page that are no names of settings."""
SHORTENED = {"top_p", "top_k", "name", "clip_ratio_high", "adv_estimator", "dual_clip"}
"""Names behind others whose beginning they share."""
EQUAL = {"rollout.temperature", "data.max_prompt_length"}
"""Names that are those of this project."""


def test_names_of_others_are_those_of_the_page():
    words = {word for cell in cells(1) + cells(2) for word in re.findall(r"`([^`]+)`", cell)}
    names = {part.split("=")[0] for word in words for part in re.split(r" \W ", word)} - VALUES - SHORTENED - EQUAL
    assert [name for name in sorted(names) if not translate_key(name)] == []
    assert len(names) > 60


def test_what_others_are_told_to_use_exists():
    same, similar = aliases().values()
    for theirs, key in same.items():
        assert key in known_keys(CONF), theirs
        assert f"`{key}`" in SETTINGS or key == "loss.surrogate.dual_clip", theirs
    assert not same.keys() & similar.keys()
    assert translate_key("num_generations") == "allowed here is rollout.group_size, as this project calls it"
    assert translate_key("no_such_setting") is None
