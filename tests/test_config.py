"""Mistakes in settings are named by key, value and what to do, all at once, before anything loads."""

import re
import shlex
import sys

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.config import ConfigError, check_config, check_runtime, describe_sizes
from grpo_lightning.config.settings import aliases, known_keys, translate_key
from grpo_lightning.config.targets import import_target
from tests.support.composed import CONF, composed

LINEAR = "_target_: grpo_lightning.schedule.Linear"


def check_all(config) -> None:
    check_config(config)
    check_runtime(config)


def problems(*overrides: str) -> tuple[str, ...]:
    """What a run says of its settings: of their values first, and then of the arguments of imported targets."""
    with pytest.raises(ConfigError) as error:
        check_all(composed(*overrides))
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def check_rows(rows: dict[str, str]) -> None:
    """Every row is one mistake with one message; words of a command are divided by |."""
    for words, message in rows.items():
        found = problems(*words.split("|"))
        assert len(found) == 1, (words, found)
        assert message in found[0], (words, found)


def test_values_of_a_wrong_type_or_out_of_range():
    check_rows(
        {
            "optimizer.lr=nan": "optimizer.lr=nan: must be a number >= 0",
            "seed=4294967296": "seed=4294967296: must be an integer from 0 to 4294967295",
            "mode=train": "mode=train: must be one of fit, validate, export",
            "validation.stop=['\\n']": "in bash $'rollout.stop=[\"\\n\"]'",
            "validation.stop=[a,7]": "validation.stop=['a', 7]: must be a list of texts",
            "data.max_prompt_length=0": "data.max_prompt_length=0: must be an integer >= 1 or null",
            "module.ppo_epochs=null": "module.ppo_epochs=null: must be an integer >= 1",
            "reward.accuracy.weight=nan": "reward.accuracy.weight=nan: must be a finite number",
            "reward.format.clip=[1,0]": "reward.format.clip=[1, 0]: must be [lowest, highest] or null",
            "trainer.precision=16-mixed": "must be 32-true or bf16-mixed (16-mixed would clip",
            "callbacks.export.push_to_hub=a/b/c": "push_to_hub=a/b/c: must be NAME or ORG/NAME of the hub",
            "policy.path=./3": "policy.path=./3: must be a directory that exists, or NAME",
            "rollout.temperature={" + LINEAR + ", start: 1.0, end: 0, steps: 5}": (
                "rollout.temperature.end=0: must be a number > 0"
            ),
            "validation.temperature={" + LINEAR + ", start: 1.0, end: 0.5, steps: 5}": "must be a number >= 0",
            "+callbacks.mine={_target_: grpo_lightning.callbacks.logs.CompletionTables, every: 0, max_rows: 9, "
            "max_characters: 9}": "callbacks.mine.every=0: must be an integer >= 1",
            "callbacks=reference_refresh|callbacks.reference.alpha=1.5": "alpha=1.5: must be a number in (0, 1]",
            "environment=guess|environment.role=system": "environment.role=system: must be one of user, tool or null",
        }
    )


def test_settings_that_contradict_one_another():
    check_rows(
        {
            "reference=none": "loss.kl_coef=0.04 needs a reference, and reference=none has none",
            "algorithm=distillation|reference=none": "rollout.teacher_coef=1.0 needs a reference",
            "module.minibatch_size=7": "does not divide data.prompts_per_step x rollout.group_size = ",
            "validation.ks=[1,5]": "validation.ks=[1, 5] needs validation.samples_per_prompt >= 5, which is 4",
            "rollout.outcome=correct": "rollout.outcome=correct: must be one of the rewards accuracy, format",
            "+reward.exact.weight=1.0": "this reward is not chosen; choose 'reward=[accuracy,format,exact]'",
            "reward=[]": "reward=[]: choose at least one reward",
            "policy.dtype=bfloat16": "policy.dtype=bfloat16: training without policy.adapter needs float32",
            "policy.quantization=4bit": "policy.quantization=4bit needs policy.adapter",
            "policy.adapter=DIR": "policy.adapter=DIR: must be {r: 16, lora_alpha: 32}, {path: DIRECTORY} or null",
            "policy.adapter.path=./absent": "policy.adapter.path=./absent: must be a directory that exists, or NAME",
            "policy.adapter.path=.|policy.adapter.r=4": "policy.adapter.r=4 does not work with policy.adapter.path",
            "callbacks.export.adapter=true": "callbacks.export.adapter=true needs policy.adapter",
            "rollout.max_tries=3": "rollout.max_tries=3 needs rollout.group_filter",
            "loss.surrogate.delta=1.1": "must be more than 1 + loss.surrogate.epsilon_high = 1.2",
            "rollout=max_variance|rollout.downsample.size=20": "size=20 is more than rollout.group_size=16",
            "+trainer.strategy=fsdp": "trainer.strategy=fsdp: use trainer=fsdp (FSDP2)",
            "trainer=fsdp|optimizer=adamw_8bit": "trainer=fsdp needs an optimizer of torch",
            "trainer=fsdp|policy.dtype=bfloat16|policy.adapter={r:4}": "trainer=fsdp needs float32",
            "trainer=fsdp|reference.offload=true": "reference.offload=True does not work with trainer=fsdp",
            "+trainer.max_time=00:00:01:00": "trainer.max_time=00:00:01:00: must be null; `timeout",
            "+trainer.limit_train_batches=1": "trainer.limit_train_batches=1: must be null or 1.0; the run ends after",
            "module=sft|data=demonstrations|mode=preflight": "mode=preflight does not work with module=sft",
            "environment=guess|advantage=process": "advantage=process does not work with an environment",
            "reward=[environment]": "reward.environment needs an environment",
        }
    )


def test_targets_and_their_arguments():
    check_rows(
        {
            "+loss.kl_coeff=0.1": "loss.kl_coeff: unknown; the nearest is kl_coef; grpo_lightning.loss.PolicyLoss",
            "loss.kl._target_=grpo_lightning.loss.k9": "not found (module 'grpo_lightning.loss' has no attribute 'k9')",
            "loss.kl._target_=k3": "loss.kl._target_=k3: must be a dotted path",
            "loss.kl._target_=grpo_lightning.loss": "must be a function or a class, and this is a module",
            "+reward.mine._target_=grpo_lightning.reward.format.format": "needs completions (or `_partial_: true`",
            "loss.kl_coef={" + LINEAR + ", start: 0.1, end: 0.0}": "loss.kl_coef: grpo_lightning.schedule.Linear needs",
            "reward=[custom]|reward.custom.function._target_=nowhere.f": "not found (there is no module nowhere",
            "sampler._target_=grpo_lightning.sampler.vllm.server.VLLMServer": "vllm.server.VLLMServer needs url",
            "environment=guess|+environment.function.gusses=3": "gusses: unknown; the nearest is guesses",
        }
    )


def test_every_mistake_is_reported_at_once():
    found = problems("optimizer.lr=nan", "rollout.group_size=1", "loss.kl._target_=os.system", "validation.ks=[9]")
    assert [re.split(":| needs", problem)[0] for problem in found] == [
        *("rollout.group_size=1", "optimizer.lr=nan", "loss.kl._target_=os.system", "validation.ks=[9]")
    ]


def test_what_is_right_passes():
    check_runtime(composed())
    for words in (
        "steps=120",
        "module.minibatch_size=64",
        "reference=none|loss.kl_coef=0",
        "mode=validate|policy.dtype=bfloat16",
        "rollout=dynamic_sampling",
        "rollout=max_variance|rollout.downsample.size=8|module.minibatch_size=64",
        "reward.format.clip=[0,1]|reward.format.timeout=2",
        "policy.adapter={r: 4, lora_alpha: 8, target_modules: all-linear, lora_dropout: 0}",
        "optimizer._target_=bitsandbytes.optim.AdEMAMix|optimizer.betas=[0.9,0.999,0.9999]|~optimizer.fused",
        "+my_rate=1e-4|optimizer.lr=${my_rate}",
        "+callbacks.mine={_target_: tests.support.killing.Kill, step: 1, moment: update}",
        "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1}",
        "+trainer.benchmark=true|+trainer.detect_anomaly=true",
    ):
        check_config(composed(*words.split("|")))


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for count, words, message in (
        (0, "trainer=gpu", "trainer.accelerator=gpu: PyTorch finds no such GPU"),
        (2, "trainer=ddp|trainer.devices=3", "trainer.devices=3: this machine has 2 GPUs"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ConfigError) as error:
            check_runtime(composed(*words.split("|")))
        assert message in error.value.problems[0]
    for words in (["trainer=ddp"], ["trainer=cpu", "trainer.devices=3"], ["trainer=ddp", "trainer.devices='1,'"]):
        check_runtime(composed(*words))


def test_sizes_in_words():
    config = composed("steps=10", "data.prompts_per_step=4", "rollout.group_size=6")
    assert describe_sizes(config) == (
        "4 prompts x 6 completions = 24 completions per rollout; 1 optimizer step per rollout; 10 rollouts"
    )
    config["module"] |= {"ppo_epochs": 3, "minibatch_size": 12}
    assert "6 optimizer steps per rollout; 10 rollouts" in describe_sizes(config)
    kept = composed("rollout=max_variance", "data.prompts_per_step=4", "rollout.group_size=6", "steps=10")
    assert "= 24 completions per rollout, of which 16 are trained on" in describe_sizes(kept)


# Which code settings may name: what a path leads to counts, wherever it stands.
REFUSED = (
    *("os.system", "builtins.eval", "importlib.import_module", "torch.load", "torch.os.system", "numpy.load"),
    *("torch.utils.collect_env.run", "sympy.sympify", "lightning.pytorch.callbacks.model_checkpoint.os.system"),
    *(
        "grpo_lightning.run.sys.exit",
        "hydra.utils.instantiate",
        "tests.test_config.sys.exit",
        "tests.test_config.again",
    ),
    *("grpo_lightning.config.targets.import_target", "grpo_lightning.reward.workers._unpickled"),
)
again = eval  # of this file by its name, and of Python by its home


def test_code_that_settings_may_not_name_is_refused_by_its_key():
    for path in REFUSED:
        with pytest.raises(ValueError, match="settings may name parts of this package"):
            import_target(path)
    for word in (
        "+module.more={_target_: os.system}",
        "+reward.accuracy.function.loss={_target_: os.system}",
        "trainer.callbacks=[{_target_: os.system}]",
        "+callbacks.deep={a: [{policy: {b: {_target_: os.system, _partial_: true}}}]}",
        "policy.template_kwargs={f: {_target_: os.system}}",
        "environment=tools|environment.function.tools=[os.system]",
    ):
        assert any("=os.system: settings may name parts" in problem for problem in problems(*word.split("|"))), word
    assert "settings may name parts" in problems("trusted=[os]", "loss.kl._target_=os.system")[0]
    assert "trusted=os: must be a list" in problems("trusted=os")[0]


def test_the_users_own_code_and_trusted_packages_may_be_named(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(
        "from functools import lru_cache, partial\nfrom theirs import reward as theirs\n\n\n"
        "def reward(completions): ...\n\n\nclass Scorer:\n    def __call__(self, completions): ...\n"
        "    @classmethod\n    def made(cls): ...\n\n\n"
        "part, cached, scorer = partial(reward), lru_cache(reward), Scorer()\n"
    )
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "theirs.py").write_text("def reward(completions): ...\n")
    (tmp_path / "broken_code.py").write_text("import no_such_module\n")
    for place in (tmp_path, tmp_path / "site-packages"):
        monkeypatch.syspath_prepend(str(place))
    for name in ("reward", "Scorer", "Scorer.made", "part", "cached", "scorer"):
        assert callable(import_target(f"own_code.{name}"))
    for path in ("theirs.reward", "own_code.theirs"):
        with pytest.raises(ValueError, match="packages in trusted"):
            import_target(path)
        assert import_target(path, trusted=("theirs",)) is sys.modules["theirs"].reward
    with pytest.raises(ValueError, match=r"not found \(module 'own_code' has no attribute 'f'\)"):
        import_target("own_code.f")
    with pytest.raises(ValueError, match=r"not found \(No module named 'no_such_module'\)"):
        import_target("broken_code.f")
    check_config(composed("reward=[custom]", "reward.custom.function._target_=theirs.reward", "trusted=[theirs]"))
    for path in ("torch.optim.lr_scheduler.StepLR", "bitsandbytes.optim.AdamW8bit", "transformers.Adafactor"):
        assert callable(import_target(path)), path
    for name in ("callbacks.EarlyStopping", "loggers.CSVLogger", "strategies.DDPStrategy", "profilers.SimpleProfiler"):
        assert callable(import_target(f"lightning.pytorch.{name}")), name


# What is said to somebody who mistyped a key or a choice, or used another project's name for it.
EXPLAINED = {
    "reward=[accuracy,formt]": "reward=[…,formt]: choose one of accuracy, code, cosine_length,",
    "algoritm=dapo": "algoritm=dapo: unknown; the nearest is algorithm=dapo, a part",
    "environment.max_turns=3": "environment.max_turns=3: needs environment=calculator or environment=",
    "data=my.csv": "data=my.csv: use data=jsonl data.path=my.csv for a",
    "data=my_data.rows": "data=my_data.rows: use data=custom data.train._target_=my_data.rows",
    "warmup_ratio=0.1": "warmup_ratio=0.1: use schedule.warmup_steps, which counts steps",
    "data=openai/math": "data=openai/math: use data=hub data.path=openai/math",
    "reward=[accuracy,my.own.short]": "use reward=[…,custom] reward.custom.function._target_=my.own.short for",
    "epochs=3": "epochs=3: use steps, which counts rollouts",
    "actor_rollout_ref.rollout.n=8": "is called rollout.group_size=8 here",
    "+loss.kl_coef=1": "An item is already at 'loss.kl_coef'",
    "steps=${nope}": "data.steps: Interpolation key 'nope' not found",
    "a=1": "a=1: unknown; `",
    "trainer='\x1b[2Jx'": "\\x1b[2Jx",
}


def test_an_override_that_cannot_be_applied_is_explained():
    for override, message in EXPLAINED.items():
        with pytest.raises(ConfigError) as error:
            composed(override)
        [said] = error.value.problems
        assert message in said, (override, said)
        assert not {"\n", "\x1b"} & {*said}, override
        assert "hydra.cc" not in said, override
    for word, told in (
        ("stepps=3", "unknown; the nearest is steps=3"),
        ("tags=[größe]", r'tags=\["größe"\]'),
        ("task_name=my (run)", "'task_name=\"my \\(run\\)\"'"),
        ("validation=null", "validation.every=1000000 data.validation_size=1"),
        ("sampler=null", "sampler=null: choose one of own"),
    ):
        with pytest.raises(ConfigError, match=told):
            grpo.compose(word)


def test_what_others_call_a_setting_leads_to_one_that_exists():
    same, similar, _ = aliases().values()
    assert set(same.values()) <= known_keys(CONF)
    assert not same.keys() & similar.keys()
    # the tables and configs of the documents that users come from: a guide, a tutorial, a derivation, a notebook, rlox
    for name, key in {
        **dict.fromkeys(("group_size", "num_generations", "n_sample_sequences"), "rollout.group_size"),
        **dict.fromkeys(("num_return_sequences", "G"), "rollout.group_size"),
        **dict.fromkeys(("clip_epsilon", "clip_range", "EPS"), "loss.surrogate.epsilon_low"),
        **dict.fromkeys(("kl_coef", "kl_penalty", "beta", "BETA"), "loss.kl_coef"),
        **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_length"), "rollout.max_new_tokens"),
        **dict.fromkeys(("num_train_epochs", "max_steps", "n_epochs"), "steps"),
        **dict.fromkeys(("reward_fn", "reward_funcs"), "reward"),
        **dict.fromkeys(("ref_model", "reference_model"), "reference"),
        **{"normalize_advantages": "advantage=", "advantage_eps": "advantage.eps", "ppo_epochs": "module.ppo_epochs"},
        **{
            "learning_rate": "optimizer.lr",
            "batch_size": "data.prompts_per_step",
            "reward_weights": "reward.NAME.weight",
        },
        **{"max_grad_norm": "module.max_grad_norm", "output_dir": "hydra.run.dir", "dataset_name": "data.path"},
        **{
            "model_name_or_path": "policy.path",
            "model": "policy",
            "tokenizer": "policy.path",
            "use_vllm": "sampler=vllm",
        },
        **{"temperature": "rollout.temperature", "top_p": "rollout.top_p", "top_k": "rollout.top_k"},
        **{"do_sample": "rollout.temperature", "reward_model": "reward.model.function.path"},
    }.items():
        assert f" {key}" in (translate_key(name) or ""), name
    with pytest.raises(
        ConfigError, match="clip_range=0.2: use loss.surrogate.epsilon_low and loss.surrogate.epsilon_hi"
    ):
        composed("clip_range=0.2")


def test_all_unknown_keys_are_told_at_once_and_none_is_added_that_nothing_reads():
    with pytest.raises(ConfigError) as error:
        grpo.compose("stepps=3", "rollout.groupsize=4", "algorithm=grop", "loss.kl_coef=0.1", "clip_epsilon=0.2")
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        *("algorithm=grop", "stepps=3", "rollout.groupsize=4", "clip_epsilon=0.2")
    ]
    assert "nonsense=3: nothing reads it" in problems("+nonsense=3")[0]
    assert "callbacks.mine: nothing reads it" in problems("+callbacks.mine.every=3")[0]
    assert "preflight.promts: nothing reads it" in problems("+preflight.promts=3")[0]
    assert "data.shuffle: unknown" in problems("+data.shuffle=false")[0]


def test_suggestions_compose_when_they_are_followed():
    for mistake in (
        *("stepps=3", "rollout.groupsize=3", "algoritm=dapo", "lr=3e-5", "num_generations=8", "temperatur=0.5"),
        *("algorithm=grop", "data=my.jsonl", "data=openai/gsm8k", "policy=Qwen/Qwen3-0.6B"),
        *("optimizer.eps=1e-6", "trainer.benchmark=true"),
        *("reward=[accuracy,formt]", "reward=[accuracy,my.short]", "optimizer.learning_rate=1e-5", "seeed=1"),
        *("reward.format.function.k=3", "model.attn_implementation=eager"),
        *("rollout.max_tokens=3", "profiler=simple", "+num_generations=4", "environment.max_turns=3"),
    ):
        with pytest.raises(ConfigError) as error:
            check_config(composed(mistake))
        [told] = error.value.problems
        said = told.partition(": ")[2]
        quoted = re.sub(r"(\w)'(\w)", r"\1\2", said.replace("…", "accuracy"))
        followed = [word for word in shlex.split(quoted) if "=" in word]
        assert followed or "choose one of" in said, told
        choice = re.search(r"the nearest is (\w+)$", said)
        part, _, value = mistake.partition("=")
        first = {word.partition("=")[0]: word.strip(";,") for word in reversed(followed)}
        composed(*([f"{part}={re.sub('formt|grop', choice[1], value)}"] if choice else first.values()))
    words = ("data=jsonl", "data.columns.answer=solution")
    with pytest.raises(ConfigError, match=r" \+data.columns.answer=solution adds"):
        composed(*words)
    assert composed(words[0], f"+{words[1]}")["data"]["columns"] == {"answer": "solution"}
    assert composed('rollout.stop=["\n","\\nabla"]')["rollout"]["stop"] == ["\n", "\\nabla"]
    assert grpo.compose("environment=null", "correction=null").config["environment"] is None
    with pytest.raises(ConfigError, match="data.zebra=3: unknown; .* prints the keys$"):
        composed("data.zebra=3")
