import shlex

import pytest

from grpo_lightning.settings import ConfigError, _unknown, arithmetic, cautions, check
from grpo_lightning.settings.given import ungiven
from tests.support.composed import composed
from tests.support.provocations import provocation


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        check(composed(*overrides))
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


@provocation(
    "settings of a part that stand in `module` only, where no check looks: `module.loss: {kl_coef: -1, …}`, or an "
    "object for a chat template, `module.policy: {system_prompt: {_target_: …}, …}`",
    "refused by their keys",
)
def test_a_module_has_no_settings_of_its_own_for_its_parts():
    for words, part, key, value in (
        ((), "loss", "kl_coef", -1),
        ((), "policy", "system_prompt", {"_target_": "grpo_lightning.policy.hf.load", "path": "x"}),
        (("module=sft", "data=demonstrations", "data.path=x"), "optimizer", "lr", 1),
    ):
        config = composed(*words)
        assert config["module"][part][key] == config[part][key]
        config["module"][part] = config[part] | {key: value}
        with pytest.raises(ConfigError) as error:
            check(config)
        told = f"module.{part}: allowed is what {part} says, such as {part}=NAME: checks and summaries look there"
        assert told in error.value.problems
    check(composed("loss.kl_coef=0.1", "optimizer.lr=0.1"))


def test_the_defaults_are_right():
    check(composed())


@pytest.mark.grid
@pytest.mark.parametrize(
    "override, message",
    [
        ("optimizer.lr=nan", "optimizer.lr=nan: allowed is a number >= 0"),
        ("optimizer.lr=fast", "optimizer.lr=fast: allowed is a number >= 0"),
        ("steps=0", "steps=0: allowed is an integer >= 1"),
        ("steps=2.5", "steps=2.5: allowed is an integer >= 1"),
        ("steps=true", "steps=True: allowed is an integer >= 1"),
        ("seed=-1", "seed=-1: allowed is an integer from 0 to 4294967295"),
        ("mode=train", "mode=train: allowed is one of fit, validate, export"),
        ("rollout.group_size=1", "rollout.group_size=1: allowed is an integer >= 2"),
        ("rollout.temperature=0", "rollout.temperature=0: allowed is a number > 0"),
        ("rollout.temperature=inf", "rollout.temperature=inf: allowed is a number > 0"),
        ("rollout.top_p=0", "rollout.top_p=0: allowed is a number in (0, 1]"),
        ("validation.stop=[a,7]", "validation.stop=['a', 7]: allowed is a list of texts"),
        ("rollout.top_k=-1", "rollout.top_k=-1: allowed is an integer >= 0"),
        ("rollout.min_p=1", "rollout.min_p=1: allowed is a number in [0, 1)"),
        ("data.prompts_per_step=-4", "data.prompts_per_step=-4: allowed is an integer >= 1"),
        ("data.max_prompt_length=0", "data.max_prompt_length=0: allowed is an integer >= 1 or null"),
        ("module.ppo_epochs=null", "module.ppo_epochs=null: allowed is an integer >= 1"),
        ("module.microbatch_tokens=0", "module.microbatch_tokens=0: allowed is an integer >= 1"),
        ("loss.kl_coef=-0.1", "loss.kl_coef=-0.1: allowed is a number >= 0"),
        ("loss.surrogate.epsilon_low=1", "loss.surrogate.epsilon_low=1: allowed is a number in (0, 1)"),
        ("advantage.correction=2", "advantage.correction=2: allowed is one of 0, 1"),
        ("reward.accuracy.weight=nan", "reward.accuracy.weight=nan: allowed is a finite number"),
        (
            "trainer.precision=16-mixed",
            "trainer.precision=16-mixed: allowed is 32-true or bf16-mixed (16-mixed would clip",
        ),
        (
            "optimizer.betas=[0.9,inf]",
            "optimizer.betas=[0.9, inf]: allowed is two numbers in [0, 1)",
        ),
        (
            "+loss.kl_coeff=0.1",
            "loss.kl_coeff: unknown; the nearest is kl_coef; grpo_lightning.loss.PolicyLoss takes",
        ),
        ("module.self_check=maybe", "module.self_check=maybe: allowed is true or false"),
        ("policy.path=3", "policy.path=3: allowed is text"),
        ("loss.kl._target_=os.system", "loss.kl._target_=os.system: allowed are parts of this package"),
        ("loss.kl._target_=grpo_lightning.loss.k9", "loss.kl._target_=grpo_lightning.loss.k9: not found"),
        ("loss.kl._target_=k3", "loss.kl._target_=k3: allowed is a dotted path"),
        ("reference=none", "loss.kl_coef=0.04: allowed is 0 with reference=none; or choose a reference"),
        (
            "module.minibatch_size=7",
            "module.minibatch_size=7: allowed is a divisor of data.prompts_per_step x rollout.group_size = ",
        ),
        (
            "data.train_size=3",
            "allowed is at most data.train_size=3, the training prompts there are",
        ),
        ("validation.ks=[1,5]", "validation.ks=[1, 5]: allowed are integers from 1 to validation.samples_per_prompt=4"),
        ("rollout.outcome=correct", "rollout.outcome=correct: allowed is one of the rewards: accuracy, format or null"),
        (
            "+reward.exact.weight=1.0",
            "reward.exact: no such reward was chosen; allowed is 'reward=[accuracy,format,exact]'",
        ),
        ("reward=[]", "reward=[]: allowed is at least one reward"),
        (
            "+reward.mine._target_=grpo_lightning.reward.format.format",
            "reward.mine: grpo_lightning.reward.format.format needs completions (or",
        ),
        ("policy.dtype=bfloat16", "policy.dtype=bfloat16: allowed is float32 for training"),
        ("rollout.max_tries=3", "rollout.max_tries=3: allowed is 1 without rollout.group_filter"),
        ("rollout.top_entropy=0", "rollout.top_entropy=0: allowed is a number in (0, 1]"),
        ("loss.surrogate.dual_clip=1.0", "loss.surrogate.dual_clip=1.0: allowed is a number > 1 or null"),
        (
            "loss.surrogate.delta=1.1",
            "loss.surrogate.delta=1.1: allowed is more than 1 + loss.surrogate.epsilon_high = 1.2",
        ),
        ("reward.format.clip=[1,0]", "reward.format.clip=[1, 0]: allowed is [lowest, highest] or null"),
        ("reward.format.timeout=0", "reward.format.timeout=0: allowed is seconds > 0 or null"),
        ("reward.format.max_failed=2", "reward.format.max_failed=2: allowed is a fraction from 0 to 1"),
        ("reward.format.messages=maybe", "reward.format.messages=maybe: allowed is true or false"),
        ("reward.format.messages=null", "reward.format.messages=null: allowed is true or false"),
        ("reward.format.messages=1", "reward.format.messages=1: allowed is true or false"),
        (
            "reward.format.only_if=accuracy",
            'reward.format.only_if=accuracy: allowed is a condition on another reward, such as "format > 0" or null',
        ),
        (
            'reward.format.only_if="format > 0"',
            'reward.format.only_if="format > 0": allowed are conditions on accuracy',
        ),
        (
            'reward.format.only_if="length > 0"',
            'reward.format.only_if="length > 0": allowed are conditions on accuracy',
        ),
        (
            "rollout.temperature={_target_: grpo_lightning.varying.Linear, start: 1.0, end: 0, steps: 5}",
            "rollout.temperature.end=0: allowed is a number > 0",
        ),
        (
            "validation.temperature={_target_: grpo_lightning.varying.Linear, start: 1.0, end: 0.5, steps: 5}",
            "allowed is a number >= 0",
        ),
        (
            "loss.kl_coef={_target_: grpo_lightning.varying.Piecewise, values: [0.1, -1], borders: [3]}",
            "loss.kl_coef.values.1=-1: allowed is a number >= 0",
        ),
        (
            "loss.kl_coef={_target_: grpo_lightning.varying.Linear, start: 0.1, end: 0.0}",
            "loss.kl_coef: grpo_lightning.varying.Linear needs steps",
        ),
    ],
)
def test_one_mistake_is_one_message_with_key_value_and_what_is_allowed(override, message):
    (found,) = problems(override)
    assert message in found


def test_an_outcome_is_text():
    told = "outcome={'a': 'b'}: allowed is text or null"
    assert problems("rollout.outcome={a: b}") == (f"rollout.{told}", f"validation.{told}")


@pytest.mark.parametrize("part", ["reward", "callbacks", "logger"])
@pytest.mark.parametrize("name", ["$(touch HIT)", "a b", "a;b", "<a", "a/b", "", "a\nb", 1.5])
def test_names_of_parts_are_names(part, name):
    config = composed("trusted=[]")
    config[part][name] = config[part].get("accuracy", {"_target_": "a.b"})
    told = [problem for problem in ungiven(config, []) if problem.startswith(f"{part}.")]
    assert told[-1].endswith(": allowed are names of letters, digits, '_' and '-'")


def test_a_name_is_offered_as_a_word_of_a_shell():
    config = composed()
    config["reward"]["$(touch HIT)"] = {"weight": 1.0}
    with pytest.raises(
        ConfigError,
        match=r"chosen; allowed is 'reward=\[accuracy,format,\"\$\(touch HIT\)\"\]', and a file of your own",
    ):
        check(config)


def test_a_text_is_offered_as_a_text():
    (said,) = _unknown({"polcy": "{path: x, trust_remote_code: true}"})
    assert said.endswith("""; the nearest is 'policy="{path: x, trust_remote_code: true}"'""")
    (said,) = ungiven({"policy={a: b}": {"x; y": {"trust_remote_code": True}}}, [])[-1:]
    assert said.startswith("policy…a…b….x…y.trust_remote_code stands in a file")


def test_every_mistake_is_reported_at_once():
    found = problems(
        "optimizer.lr=nan", "rollout.group_size=1", "+loss.kl_coeff=1", "reference=none", "validation.ks=[9]"
    )
    assert [problem.split(":")[0] for problem in found] == [
        "rollout.group_size=1",
        "optimizer.lr=nan",
        "loss.kl_coeff",
        "validation.ks=[9]",
        "loss.kl_coef=0.04",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "module.minibatch_size=64",
        "reference=none loss.kl_coef=0",
        "mode=validate policy.dtype=bfloat16",
        "steps=1",
        "rollout=dynamic_sampling",
        "rollout=max_variance rollout.downsample.size=8 module.minibatch_size=64",
        "loss.surrogate.delta=4.0 loss.surrogate.dual_clip=3.0",
        "'reward.format.only_if=\"accuracy >= 0.5\"' reward.format.clip=[0,1] reward.format.timeout=2",
        "'rollout.max_new_tokens={_target_: grpo_lightning.varying.Linear, start: 8, end: 36, steps: 5}' "
        "validation.max_new_tokens=36",
    ],
)
def test_what_is_right_passes(override):
    check(composed(*shlex.split(override)))


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "rollout=max_variance rollout.downsample.size=20",
            "rollout.downsample.size=20: allowed is 2 to rollout.group_size=16",
        ),
        (
            "rollout=max_variance rollout.downsample.size=3 module.minibatch_size=16",
            "module.minibatch_size=16: allowed is a divisor of data.prompts_per_step x rollout.downsample.size = 24",
        ),
        (
            "algorithm=rloo rollout.kl_penalty=0.1",
            "rollout.kl_penalty=0.1: allowed is 0 with reference=none; or choose a reference",
        ),
        (
            "algorithm=cispo loss.surrogate.ratio_max=0.2",
            "ratio_max=0.2: allowed is a ratio > 1, not a distance from 1",
        ),
        ("+trainer.strategy=fsdp", "trainer.strategy=fsdp: allowed is trainer=fsdp (FSDP2)"),
        ("trainer=fsdp optimizer=adamw_8bit", "allowed with trainer=fsdp are torch's optimizers"),
        ("trainer=fsdp policy.dtype=bfloat16 policy.adapter={r:4}", "allowed with trainer=fsdp is float32"),
        ("trainer=fsdp policy.quantization=4bit policy.adapter={r:4}", "policy.quantization=4bit: allowed with tr"),
        (
            "trainer=fsdp trainer.strategy.sharded_checkpoints=true policy.adapter={r:4}",
            "trainer.strategy.sharded_checkpoints=true: allowed with policy.adapter is false",
        ),
        ("trainer=fsdp reference.offload=true", "reference.offload=True: allowed with trainer=fsdp is false"),
        (
            "trainer=fsdp reference=another_model reference.path=x reference.quantization=8bit",
            "reference.quantization=8bit: allowed with trainer=fsdp is null",
        ),
        ("policy.quantization=4bit", "policy.quantization=4bit: allowed is null without policy.adapter"),
    ],
)
def test_mistakes_between_parts(override, message):
    (found,) = problems(*override.split())
    assert message in found


def test_arithmetic():
    config = composed("steps=10", "data.prompts_per_step=4", "rollout.group_size=6")
    assert arithmetic(config) == (
        "4 prompts x 6 completions = 24 completions per rollout; 1 optimizer step per rollout; "
        "10 rollouts = 240 completions, 10 optimizer steps in total"
    )
    config["module"] |= {"ppo_epochs": 3, "minibatch_size": 12}
    kept = composed("rollout=max_variance", "data.prompts_per_step=4", "rollout.group_size=6", "steps=10")
    assert arithmetic(kept).startswith(
        "4 prompts x 6 completions = 24 completions per rollout, of which 16 are trained on"
    )
    assert "6 optimizer steps per rollout; 10 rollouts = 240 completions, 60 optimizer steps" in arithmetic(config)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_too_small_to_compare_are_warned_about(size):
    assert cautions(composed(f"rollout.group_size={size}")) == [
        f"rollout.group_size={size}: the mean of so few completions is a noisy baseline, and most groups are all right "
        "or all wrong; 4 or more compare better, 8 to 16 are usual"
    ]


def test_usual_settings_need_no_warning():
    assert cautions(composed()) == cautions(composed("rollout.group_size=4", "rollout.top_p=0.9")) == []
    assert cautions(composed("module=sft", "data=demonstrations", "rollout.group_size=2")) == []
    shrinking = "rollout.group_size={_target_: grpo_lightning.varying.Linear, start: 8, end: 2, steps: 9}"
    assert cautions(composed(shrinking))[0].startswith("rollout.group_size=2: ")


@pytest.mark.parametrize("value", [1.0, None, "accuracy"])
def test_a_reward_is_a_mapping(value):
    config = composed()
    config["reward"]["mine"] = value
    with pytest.raises(ConfigError, match=rf"reward\.mine={value}: allowed are the settings of a reward, such as its"):
        check(config)


def test_a_server_without_an_address_is_told_by_its_key():
    config = composed("sampler._target_=grpo_lightning.sampler.vllm.server.VLLMServer")
    assert not any(one.startswith("sampler.") for one in ungiven(config, []))
    with pytest.raises(ConfigError, match=r"sampler: grpo_lightning\.sampler\.vllm\.server\.VLLMServer needs url"):
        check(config)
