"""Every choice of every group composes, passes the checks, and asks its target for arguments that exist."""

import pytest

from grpo_lightning.config import check_config
from tests.support.composed import CONF, composed

MULTIPLE = {"reward", "logger"}
NEEDS = {
    ("policy", "hf"): ["policy.path=some/model"],
    ("reference", "another_model"): ["reference.path=some/model"],
    ("reference", "none"): ["loss.kl_coef=0"],
    ("reference", "adapter_off"): ["policy.adapter={r: 4}"],
    ("data", "jsonl"): ["data.path=some.jsonl"],
    ("data", "hub"): ["data.path=some/data"],
    ("data", "inline"): ["data.train.prompts=[a,b]", "data.prompts_per_step=1"],
    ("reward", "custom"): ["reward.custom.function._target_=tests.support.rewards.vowels"],
    ("reward", "custom_per_completion"): [
        "reward.custom.function.function._target_=grpo_lightning.reward.text.answer_text"
    ],
    ("reward", "keyword"): ["reward.keyword.function.words=[because]"],
    ("reward", "pattern"): ["reward.pattern.function.expression=because"],
    ("reward", "json_schema"): ["reward.json_schema.function.schema={type:object}"],
    ("reward", "judge"): ["reward.judge.function.base_url=http://localhost/v1", "reward.judge.function.model=some"],
    ("reward", "model"): ["reward.model.function.path=some/model"],
    ("rollout", "recorded"): ["rollout.path=some/run", "mode=validate"],
    ("environment", "custom"): ["environment.function._target_=tests.support.environments.guess"],
    ("environment", "gymnasium"): ["environment.function.id=FrozenLake-v1"],
    ("environment", "tools"): ["environment.function.tools=[tests.support.toolbox.add]"],
    ("environment", "played"): ["environment.function.function._target_=tests.support.environments.countdown"],
    ("reward", "environment"): [
        "environment=custom",
        "environment.function._target_=tests.support.environments.guess",
    ],
    ("sampler", "vllm"): ["mode=export"],  # of the others it says that vLLM is missing
    ("sampler", "vllm_server"): ["sampler.directory=some/weights"],
    ("module", "sft"): ["data=demonstrations"],
}
# A file that is chosen once for each of several names.
NAMED = {("reward", "live"): ["+reward@reward.mine=live", "reward.mine.function.name=reward.mine"]}
CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.stem not in ("base", "taught") and path.parent.name not in ("experiment", "sweep")
)


@pytest.mark.parametrize("group, name", CHOICES, ids=["=".join(choice) for choice in CHOICES])
def test_choice_matches_the_code(group, name):
    choice = f"{group}=[{name}]" if group in MULTIPLE else f"{group}={name}"
    check_config(composed(*NAMED.get((group, name), [choice]), *NEEDS.get((group, name), [])))


def test_every_file_says_what_it_is():
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        assert "#" in text or len(text.splitlines()) < 10, path


# algorithm -> advantage, surrogate and its bounds, weights, KL estimator and coefficient, reference, tries
PRESETS = {
    "grpo": ("standardized", "clipped", (0.2, 0.2), "completion_mean", "k3", 0.04, "frozen_copy", 1),
    "dr_grpo": ("centered", "clipped", (0.2, 0.2), "constant", "k3", 0.0, "none", 1),
    "dapo": ("standardized", "clipped", (0.2, 0.28), "token_mean", "k3", 0.0, "none", 3),
    "gspo": ("standardized", "gspo", (3e-4, 4e-4), "completion_mean", "k3", 0.0, "none", 1),
    "cispo": ("standardized", "cispo", (5.0,), "token_mean", "k3", 0.0, "none", 1),
    "rloo": ("leave_one_out", "reinforce", (), "completion_sum", "k3", 0.0, "none", 1),
    "sapo": ("standardized", "sapo", (1.0, 1.05), "completion_mean", "k3", 0.0, "none", 1),
    "gmpo": ("standardized", "gmpo", (0.4, 0.4), "completion_mean", "k3", 0.0, "none", 1),
    "reinforce_pp": ("batch_whitened", "clipped", (0.2, 0.2), "token_mean", "k2", 0.001, "frozen_copy", 1),
}


def pinned(config):
    loss = config["loss"]
    name = {part: loss[part]["_target_"].rsplit(".")[-1] for part in ("surrogate", "weights", "kl")}
    bounds = tuple(value for value in loss["surrogate"].values() if isinstance(value, float))
    return (
        config["advantage"]["_target_"].rsplit(".")[-1],
        name["surrogate"],
        bounds,
        name["weights"],
        name["kl"],
        loss["kl_coef"],
        config["reference"]["_target_"].rsplit(".")[-1],
        config["rollout"]["max_tries"],
    )


def test_a_preset_pins_every_coupled_choice():
    names = {path.stem for path in (CONF / "algorithm").glob("*.yaml")}
    assert {name: pinned(composed(f"algorithm={name}")) for name in names} == PRESETS


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_preset_names_its_paper(algorithm):
    header = (CONF / "algorithm" / f"{algorithm}.yaml").read_text(encoding="utf-8").splitlines()[1]
    assert "arXiv:" in header


def test_dapo_adds_its_penalty_to_whatever_rewards_are_chosen():
    config = composed("algorithm=dapo", "reward=[exact]")
    assert list(config["reward"]) == ["exact", "soft_overlong"]
    assert config["reward"]["soft_overlong"]["function"]["max_length"] == config["rollout"]["max_new_tokens"] == 36
    assert config["data"]["tries"] == 3
    assert config["rollout"]["group_filter"]["_target_"] == "grpo_lightning.rollout.selection.mixed"
    assert composed("algorithm=dr_grpo")["loss"]["weights"]["length"] == 36


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
