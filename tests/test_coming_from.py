"""docs/coming_from.md: its blocks run, its commands are the recipes, and what it names exists."""

import re
import shlex
from pydoc import locate

import pytest

from tests.support.composed import CONF, ROOT, composed
from tests.test_readme import FENCE, commands

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
HERE = [block for language, block in FENCE.findall(PAGE) if language == "python" and block.startswith("# here\n")]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HERE)))
def test_a_block_of_ours_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(HERE[number], f"block {number}", "exec"), {"__name__": "__main__"})


def test_the_tutorials_file_spelled_out_is_the_experiment():
    [command] = [one for one in commands(PAGE) if "policy.path=./sft_checkpoint" in one and "steps=500" in one]
    spelled = composed(*[word for word in shlex.split(command)[2:] if not word.startswith("hydra.")])
    recipe = composed("experiment=open_r1")
    for part in ("rollout", "advantage", "loss", "optimizer", "steps", "data"):
        assert spelled[part] == recipe[part], part
    for name, weight in (("accuracy", 1.0), ("format", 0.1)):
        assert spelled["reward"][name] == recipe["reward"][name]
        assert spelled["reward"][name]["weight"] == weight


def test_the_guides_ratio_is_that_of_a_response():
    [command] = [one for one in commands(PAGE) if "loss=response_ratio" in one]
    config = composed(*shlex.split(command)[2:])
    assert config["loss"]["surrogate"]["_target_"] == "grpo_lightning.loss.response_clipped"
    assert config["loss"]["kl"]["_target_"] == "grpo_lightning.loss.k1"
    assert config["loss"]["kl_coef"] == 0.1
    assert config["module"]["ppo_epochs"] == 4
    assert config["module"]["minibatch_size"] == 1


def settings_here():
    """Keys of settings that the page names, dotted and in backticks, as of any choice of their part."""
    parts = "|".join(path.name for path in CONF.iterdir() if path.is_dir())
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE))
    words = {word.partition("=")[0] for span in spans for word in re.split(r"[ ,]+", span)}
    theirs = {"loss.backward", "optimizer.step", "optimizer.zero_grad", "policy.generate", "trainer.train"}
    return sorted(word for word in words - theirs if re.fullmatch(rf"(?:{parts})(?:\.\w+)+", word))


def test_settings_and_objects_that_the_page_names_exist():
    choices = ["policy=hf", "reward=[accuracy,format,model]", "callbacks=[reference_refresh,reward_model]"]
    needed = ["policy.path=DIR", "reward.model.function.path=DIR"]
    configs = [composed(*choices, *needed), composed("data=inline", "data.train.prompts=[a]")]
    configs += [composed("data=hub", "data.path=DIR", "reference=another_model", "reference.path=DIR")]

    def exists(key, config):
        for name in key.replace(".NAME.", ".accuracy.").split("."):
            config = config.get(name, KeyError) if isinstance(config, dict) else KeyError
        return config is not KeyError

    keys = settings_here()
    assert keys
    assert [key for key in keys if not any(exists(key, config) for config in configs)] == []
    names = set(re.findall(r"grpo_lightning(?:\.\w+)+", PAGE))
    assert [name for name in names if locate(name) is None] == []
