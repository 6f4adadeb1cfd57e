"""What the command says is what the settings come to, whatever files it brings along."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException

import grpo_lightning as grpo
from grpo_lightning.composition import loader
from grpo_lightning.composition.said import changed
from grpo_lightning.settings import ConfigError
from tests.support.provocations import provocation

COMPOSED = {
    "policy": {"path": "theirs", "trust_remote_code": False, "adapter": None, "revision": None},
    "reward": {"accuracy": {"weights": [0.5, 1]}},
    "trusted": ["theirs"],
    "mode": "${policy.path}",
    "steps": 3,
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["policy.path=mine"], "policy.path=theirs"),
        (["policy.path='mine'"], "policy.path=theirs"),
        (["policy=hf", "policy.path=mine", "policy.revision=null"], "policy.path=theirs"),
        (["++policy.path=mine"], "policy.path=theirs"),
        (["policy.trust_remote_code=true"], "policy.trust_remote_code=False"),
        (["policy.adapter=mine"], "policy.adapter=None"),
        (["policy.adapter.path=mine"], "policy.adapter.path=nothing"),
        (["trusted=[mine]"], r"trusted=\['theirs'\]"),
        (["trusted=[]"], r"trusted=\['theirs'\]"),
        (["mode=fit"], r"mode=\$\{policy.path\}"),
        (["steps=4"], "steps=3"),
        (["steps=null"], "steps=3"),
        (["reward.accuracy.weights.1=2"], "reward.accuracy.weights.1=1"),
        (["reward.accuracy.weights.7=2"], "reward.accuracy.weights.7=nothing"),
        (["policy.path=theirs", "trusted=[theirs]", "steps=3", "policy.trust_remote_code=false"], None),
        (["policy.path='theirs'", "policy.adapter=null", "reward.accuracy.weights=[0.5,1]"], None),
        (["policy.path=mine,theirs"], None),  # of a sweep
        (["~policy.path"], None),
        (["+mine=fast", "policy=hf", "hydra/launcher=joblib", "algorithm@a.b=dapo", "hydra.mode=RUN"], None),
        (["policy.path=mine", "policy.path=theirs"], None),  # the last one counts
        (["policy.path=mine", "policy={path: theirs}"], None),
        (["policy={path: theirs}", "policy.path=mine"], "policy.path=theirs"),
        (["policy.path=[]", "policy.path=mine"], "policy.path=theirs"),
        (["policy.path=${x}", "mode={a: b}"], None),
    ],
)
def test_what_is_said_is_what_is_composed(words, told):
    groups = {"policy", "algorithm", "mine", "policy.path", "trusted"}  # the last two are settings all the same
    found = list(changed(OverridesParser.create().parse_overrides(words), COMPOSED, groups.__contains__))
    assert bool(found) == bool(told)
    if told:
        with pytest.raises(ValueError, match=rf"with the files that the command brings along it comes to {told}; "):
            raise ValueError(*found)


@provocation(
    "settings that the command brings along which make another value of what it says, by a way that nobody knows",
    "refused: what the command says is compared with what the settings come to",
)
def test_settings_are_what_the_command_says(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "taken_for_choices", lambda *_: ())
    monkeypatch.setattr(loader, "brought_problems", lambda *_: [])
    (tmp_path / "conf" / "policy.system_prompt").mkdir(parents=True)
    (tmp_path / "conf" / "experiment").mkdir()
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\ndefaults: [{optional /policy.system_prompt: x}]\npolicy: {system_prompt: theirs}\n"
    )
    words = (f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=theirs")
    assert grpo.compose(*words, run_dir=tmp_path / "a").config["policy"]["system_prompt"] == "theirs"
    with pytest.raises(
        (ConfigCompositionException, ConfigError),
        match=r"policy.system_prompt=mine: .* comes to policy.system_prompt=theirs",
    ):
        grpo.compose(*words, "policy.system_prompt=mine", run_dir=tmp_path / "b")
