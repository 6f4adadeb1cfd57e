"""Every choice of every group composes, passes the checks, and asks its target for arguments that exist."""

import pytest

from grpo_lightning.config import check
from tests.composed import CONF, composed

MULTIPLE = {"reward"}
NEEDS = {
    ("policy", "hf"): ["policy.path=some/model"],
    ("reference", "another_model"): ["reference.path=some/model"],
    ("reference", "none"): ["loss.kl_coef=0"],
    ("data", "jsonl"): ["data.path=some.jsonl"],
    ("data", "hub"): ["data.path=some/data"],
    ("data", "inline"): ["data.train.prompts=[a,b]", "data.prompts_per_step=1"],
    ("reward", "custom"): ["reward.custom.function._target_=tests.rewards.vowels"],
    ("reward", "custom_per_completion"): [
        "reward.custom.function.function._target_=grpo_lightning.reward.text.answer_text"
    ],
    ("module", "sft"): ["data=demonstrations"],
}
CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.stem not in ("base", "taught") and path.parent.name not in ("experiment", "sweep")
)


@pytest.mark.parametrize("group, name", CHOICES, ids=["=".join(choice) for choice in CHOICES])
def test_choice_matches_the_code(group, name):
    choice = f"{group}=[{name}]" if group in MULTIPLE else f"{group}={name}"
    check(composed(choice, *NEEDS.get((group, name), [])))


def test_every_file_says_what_it_is():
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        assert "#" in text or len(text.splitlines()) < 10, path


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_a_preset_pins_every_coupled_choice(algorithm):
    config = composed(f"algorithm={algorithm}")
    loss = config["loss"]
    found = (
        config["advantage"]["_target_"].rsplit(".")[-1],
        loss["surrogate"]["epsilon_low"],
        loss["surrogate"]["epsilon_high"],
        loss["weights"]["_target_"].rsplit(".")[-1],
        loss["kl_coef"],
        config["reference"]["_target_"].rsplit(".")[-1],
    )
    assert (
        found
        == {
            "grpo": ("standardized", 0.2, 0.2, "completion_mean", 0.04, "frozen_copy"),
            "dr_grpo": ("centered", 0.2, 0.2, "constant", 0.0, "none"),
            "dapo": ("standardized", 0.2, 0.28, "token_mean", 0.0, "none"),
        }[algorithm]
    )
    assert loss["kl"]["_target_"].endswith(".k3")
    if algorithm == "dr_grpo":
        assert loss["weights"]["length"] == config["rollout"]["max_new_tokens"]


def test_real_models_have_the_rates_and_lengths_of_real_models():
    config = composed("policy=qwen2_5_0_5b")
    assert config["optimizer"]["lr"] == 1e-6
    assert config["rollout"]["max_new_tokens"] == config["validation"]["max_new_tokens"] == 512
    assert config["policy"]["trust_remote_code"] is False
    assert composed("policy=qwen3_0_6b")["policy"]["template_kwargs"] == {"enable_thinking": True}
    assert composed("policy=gpt2", "reference=distilgpt2")["reference"]["path"] == "distilbert/distilgpt2"


def test_what_the_user_says_wins_over_every_file():
    config = composed(
        "policy=qwen2_5_0_5b", "algorithm=dapo", "optimizer.lr=3e-5", "loss.kl_coef=0.5", "reference=frozen_copy"
    )
    assert config["optimizer"]["lr"] == 3e-5
    assert config["loss"]["kl_coef"] == 0.5
    assert config["reference"]["_target_"].endswith("frozen_copy")
