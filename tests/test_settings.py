"""Mistakes in settings are named by key, value and what is allowed, all at once, before anything loads."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from grpo_lightning.config import (
    TOP,
    ConfigError,
    check_config,
    check_runtime,
    config_warnings,
    describe_sizes,
    directory_obstacle,
)
from grpo_lightning.config.consistency import OF_GRPO, OF_SFT, TRIED
from grpo_lightning.config.rules import DATA
from tests.support.composed import CONF, ROOT, composed, settings

HEAVY = {"torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "reasoning_gym", "sympy"}
LINEAR = "_target_: grpo_lightning.schedule.Linear"


def problems(*overrides: str) -> tuple[str, ...]:
    """What a run says of its settings: of their values first, and then of the arguments of imported targets."""
    with pytest.raises(ConfigError) as error:
        check_all(composed(*overrides))
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def check_all(config) -> None:
    check_config(config)
    check_runtime(config)


def each_is_told(rows: dict[str, str]) -> None:
    """Every row is one mistake with one message; words of a command are divided by |."""
    for words, message in rows.items():
        found = problems(*words.split("|"))
        assert len(found) == 1, (words, found)
        assert message in found[0], (words, found)


def test_the_defaults_are_right():
    check_config(composed())
    check_runtime(composed())


def test_values_of_a_wrong_type_or_out_of_range():
    each_is_told(
        {
            "optimizer.lr=nan": "optimizer.lr=nan: allowed is a number >= 0",
            "optimizer.lr=fast": "optimizer.lr=fast: allowed is a number >= 0",
            "steps=0": "steps=0: allowed is an integer >= 1",
            "steps=2.5": "steps=2.5: allowed is an integer >= 1",
            "steps=true": "steps=True: allowed is an integer >= 1",
            "seed=4294967296": "seed=4294967296: allowed is an integer from 0 to 4294967295",
            "mode=train": "mode=train: allowed is one of fit, validate, export",
            "rollout.group_size=1": "rollout.group_size=1: allowed is an integer >= 2",
            "rollout.temperature=inf": "rollout.temperature=inf: allowed is a number > 0",
            "rollout.top_p=0": "rollout.top_p=0: allowed is a number in (0, 1]",
            "rollout.min_p=1": "rollout.min_p=1: allowed is a number in [0, 1)",
            "validation.stop=[a,7]": "validation.stop=['a', 7]: allowed is a list of texts",
            "validation.ks=[1,two]": "validation.ks=[1, 'two']: allowed is a list of integers >= 1",
            "data.max_prompt_length=0": "data.max_prompt_length=0: allowed is an integer >= 1 or null",
            "module.ppo_epochs=null": "module.ppo_epochs=null: allowed is an integer >= 1",
            "module.self_check=maybe": "module.self_check=maybe: allowed is true or false",
            "loss.surrogate.epsilon_low=1": "loss.surrogate.epsilon_low=1: allowed is a number in (0, 1)",
            "loss.surrogate.dual_clip=1.0": "loss.surrogate.dual_clip=1.0: allowed is a number > 1 or null",
            "advantage.correction=2": "advantage.correction=2: allowed is one of 0, 1",
            "reward.accuracy.weight=nan": "reward.accuracy.weight=nan: allowed is a finite number",
            "reward.format.clip=[1,0]": "reward.format.clip=[1, 0]: allowed is [lowest, highest] or null",
            "optimizer.betas=[0.9]": "optimizer.betas=[0.9]: allowed is two numbers in [0, 1)",
            "trainer.precision=16-mixed": "allowed is 32-true or bf16-mixed (16-mixed would clip",
            "trainer.devices=0": "trainer.devices=0: allowed is an integer >= 1, auto or -1 for all, or a list",
            "trainer.devices=[0,0]": "trainer.devices=[0, 0]: allowed is an integer >= 1",
            "trainer=cpu|trainer.devices=-1": "trainer.devices=-1: allowed with trainer.accelerator=cpu is auto or",
            "+trainer.strategy=ddp_fork": "trainer.strategy=ddp_fork: allowed are auto, ddp, ddp_find_unused_par",
            "policy.path=3": "policy.path=3: allowed is text",
            "policy.system_prompt={a: 1}": "policy.system_prompt={'a': 1}: allowed is a text",
            "policy.attn_implementation=nonsense": "policy.attn_implementation=nonsense: allowed is one of sdpa",
            "rollout.temperature={" + LINEAR + ", start: 1.0, end: 0, steps: 5}": (
                "rollout.temperature.end=0: allowed is a number > 0"
            ),
            "validation.temperature={" + LINEAR + ", start: 1.0, end: 0.5, steps: 5}": "allowed is a number >= 0",
            "+callbacks.mine={_target_: grpo_lightning.callbacks.completions.CompletionTables, every: 0, max_rows: 9, "
            "max_characters: 9}": "callbacks.mine.every=0: allowed is an integer >= 1",
            "reward=[accuracy,pattern]|reward.pattern.function.expression='(unclosed'": (
                "reward.pattern.function.expression=(unclosed: allowed is a regular expression (missing )"
            ),
            "tags=a": "tags=a: allowed is a list",
        }
    )


def test_settings_that_contradict_one_another():
    each_is_told(
        {
            "reference=none": "loss.kl_coef=0.04: allowed is 0 with reference=none; or choose a reference",
            "module.minibatch_size=7": "allowed is a divisor of data.prompts_per_step x rollout.group_size = ",
            "data.train_size=3": "allowed is at most data.train_size=3, the training prompts there are",
            "validation.ks=[1,5]": "validation.ks=[1, 5]: allowed are integers from 1 to validation.samples_per_prompt",
            "rollout.outcome=correct": "rollout.outcome=correct: allowed is one of the rewards: accuracy, format",
            "+reward.exact.weight=1.0": "no such reward was chosen; allowed is 'reward=[accuracy,format,exact]'",
            "reward=[]": "reward=[]: allowed is at least one reward",
            "policy.dtype=bfloat16": "policy.dtype=bfloat16: allowed is float32 for training",
            "policy.quantization=4bit": "policy.quantization=4bit: allowed is null without policy.adapter",
            "rollout.max_tries=3": "rollout.max_tries=3: allowed is 1 without rollout.group_filter",
            "loss.surrogate.delta=1.1": "allowed is more than 1 + loss.surrogate.epsilon_high = 1.2",
            "rollout=max_variance|rollout.downsample.size=20": "allowed is 2 to rollout.group_size=16",
            "+trainer.strategy=fsdp": "trainer.strategy=fsdp: allowed is trainer=fsdp (FSDP2)",
            "trainer=fsdp|optimizer=adamw_8bit": "allowed with trainer=fsdp are torch's optimizers",
            "trainer=fsdp|policy.dtype=bfloat16|policy.adapter={r:4}": "allowed with trainer=fsdp is float32",
            "trainer=fsdp|reference.offload=true": "reference.offload=True: allowed with trainer=fsdp is false",
            "trainer.plugins=[]": "trainer.plugins=[]: allowed is a list with {_target_: grpo_lightning.",
            "+trainer.max_time=00:00:01:00": "trainer.max_time=00:00:01:00: allowed is null; `timeout",
            "schedule.warmup_steps=121": "schedule.warmup_steps=121: allowed is at most steps=120, the steps",
            "sweep_metric=val/pass@2": "sweep_metric=val/pass@2: allowed are val/pass@1, val/pass@4",
            "sweep_metric=reward/totl": "and the metrics of training; the nearest is reward/total",
            "module=sft|data=demonstrations|sweep_metric=policy/entropy": "sweep_metric=policy/entropy: allowed are",
            "+stepps=8": "stepps=8: unknown; the nearest is steps=8",
            "+num_generations=8": "allowed here is rollout.group_size=8, as this project calls it",
        }
    )
    config = composed()
    config["module"]["loss"] = config["loss"] | {"kl_coef": -1}
    with pytest.raises(ConfigError, match=r"module.loss: allowed is what loss says, such as loss=NAME"):
        check_config(config)
    config = composed()
    config["reward"]["mine"] = 1.0
    with pytest.raises(ConfigError, match=r"reward\.mine=1\.0: allowed are the settings of a reward, such as its"):
        check_config(config)


def test_targets_and_their_arguments():
    each_is_told(
        {
            "+loss.kl_coeff=0.1": "loss.kl_coeff: unknown; the nearest is kl_coef; grpo_lightning.loss.PolicyLoss",
            "loss.kl._target_=grpo_lightning.loss.k9": "not found (grpo_lightning.loss has no member 'k9')",
            "loss.kl._target_=k3": "loss.kl._target_=k3: allowed is a dotted path",
            "loss.kl._target_=[grpo_lightning.loss]": "loss.kl._target_=['grpo_lightning.loss']: allowed is a text",
            "loss.kl._target_=grpo_lightning.loss": "allowed is a function or a class, and this is a module",
            "+reward.mine._target_=grpo_lightning.reward.format.format": "needs completions (or `_partial_: true`",
            "loss.kl_coef={" + LINEAR + ", start: 0.1, end: 0.0}": "loss.kl_coef: grpo_lightning.schedule.Linear needs",
            "policy.adapter={lora_alfa: 8}": "policy.adapter.lora_alfa: unknown; the nearest is lora_alpha; peft",
            "policy.adapter={r: many}": "policy.adapter.r=many: allowed is an integer",
            "policy.adapter=8": "policy.adapter=8: allowed are arguments of peft's LoraConfig, such as {r: 16,",
            "policy.adapter={task_type: x}": "policy.adapter.task_type: unknown; the task is always CAUSAL_LM",
            "reward=[custom]|reward.custom.function._target_=nowhere.f": "not found (there is no module nowhere",
            "sampler._target_=grpo_lightning.sampler.vllm.server.VLLMServer": "vllm.server.VLLMServer needs url",
        }
    )


def test_every_mistake_is_reported_at_once():
    found = problems("optimizer.lr=nan", "rollout.group_size=1", "loss.kl._target_=os.system", "validation.ks=[9]")
    assert [problem.split(":")[0] for problem in found] == [
        "rollout.group_size=1",
        "optimizer.lr=nan",
        "loss.kl._target_=os.system",
        "validation.ks=[9]",
    ]


def test_what_is_right_passes():
    for words in (
        "module.minibatch_size=64",
        "reference=none|loss.kl_coef=0",
        "mode=validate|policy.dtype=bfloat16",
        "rollout=dynamic_sampling",
        "rollout=max_variance|rollout.downsample.size=8|module.minibatch_size=64",
        "reward.format.clip=[0,1]|reward.format.timeout=2",
        "trainer=ddp|trainer.devices=[0,2]",
        "policy.adapter={r: 4, lora_alpha: 8, target_modules: all-linear, lora_dropout: 0}",
        "sweep_metric=varying/loss.kl_coef",
        "module=sft|data=demonstrations|sweep_metric=loss/total",
        "schedule.warmup_steps=120",
        "optimizer._target_=bitsandbytes.optim.AdEMAMix|optimizer.betas=[0.9,0.999,0.9999]|~optimizer.fused",
        "+my_rate=1e-4|optimizer.lr=${my_rate}",
        "+callbacks.mine={_target_: tests.support.killing.Kill, step: 1, moment: update}",
        "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1}",
        "debug=default|algorithm=dapo",
    ):
        check_config(composed(*words.split("|")))


def test_files_of_ones_own_that_choose_nothing_are_told():
    for part, value, message in (
        ("loss", "dapo", "loss=dapo chooses nothing in a file; allowed is a line '- override /loss: NAME'"),
        ("experiment", {"loss": 1}, "nothing reads the settings below experiment; allowed is a file whose first line"),
        ("loss", {"kl_coef": 0.0}, "loss: no _target_ says what it is; allowed is a file of conf/loss"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(composed() | {part: value})


def test_a_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    told = f"hydra.run.dir={tmp_path}/file/run: allowed is a directory that can be written to; {tmp_path}/file is no"
    assert problems(f"run_dir={tmp_path}/file/run")[0].startswith(told)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    (found,) = problems(f"run_dir={tmp_path}/run")
    assert found.startswith(f"callbacks.checkpoint.directory={tmp_path}/run/checkpoints: allowed is a directory")
    check_config(composed(f"run_dir={tmp_path}/run", "mode=validate"))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert directory_obstacle(tmp_path / "link" / "run") == f"{tmp_path}/link is a link to nothing"
    assert directory_obstacle(tmp_path / "new" / "run") is None
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & stat.S_IWUSR))
    (found,) = problems(f"run_dir={tmp_path}/other")
    tmp_path.chmod(stat.S_IRWXU)
    assert f"{tmp_path} must not be written to" in found


def devices(monkeypatch, count: int, *overrides: str) -> tuple[str, ...]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        check_runtime(composed(*overrides))
    return error.value.problems


def test_devices_that_are_not_there(monkeypatch):
    assert devices(monkeypatch, 0, "trainer=gpu") == (
        "trainer.accelerator=gpu: PyTorch finds no such GPU; use cpu or auto",
    )
    (found,) = devices(monkeypatch, 0, "trainer.devices=[0,1]")
    assert found == "trainer.devices=[0, 1]: there is no GPU; name a number of processes, such as 1"
    (found,) = devices(monkeypatch, 2, "trainer=ddp", "trainer.devices=[0,2]")
    assert found == "trainer.devices=[0, 2]: the GPUs of this machine have the numbers 0 to 1"
    assert devices(monkeypatch, 2, "trainer=ddp", "trainer.devices=3") == (
        "trainer.devices=3: this machine has 2 GPUs",
    )
    for fine in (["trainer=ddp"], ["trainer=cpu", "trainer.devices=3"], ["trainer=ddp", "trainer.devices='1,'"]):
        check_runtime(composed(*fine))


def test_arithmetic():
    config = composed("steps=10", "data.prompts_per_step=4", "rollout.group_size=6")
    assert describe_sizes(config) == (
        "4 prompts x 6 completions = 24 completions per rollout; 1 optimizer step per rollout; "
        "10 rollouts = 240 completions, 10 optimizer steps in total"
    )
    config["module"] |= {"ppo_epochs": 3, "minibatch_size": 12}
    assert "6 optimizer steps per rollout; 10 rollouts = 240 completions, 60 optimizer steps" in describe_sizes(config)
    kept = composed("rollout=max_variance", "data.prompts_per_step=4", "rollout.group_size=6", "steps=10")
    assert "= 24 completions per rollout, of which 16 are trained on" in describe_sizes(kept)


def test_groups_too_small_to_compare_are_warned_about():
    assert config_warnings(composed("rollout.group_size=3"))[0].startswith("rollout.group_size=3: the mean of so few")
    shrinking = "rollout.group_size={" + LINEAR + ", start: 8, end: 2, steps: 9}"
    assert config_warnings(composed(shrinking))[0].startswith("rollout.group_size=2: ")
    assert config_warnings(composed()) == config_warnings(composed("rollout.group_size=4", "rollout.top_p=0.9")) == []
    assert config_warnings(composed("module=sft", "data=demonstrations", "rollout.group_size=2")) == []


def test_metrics_have_the_names_that_are_documented():
    page = (ROOT / "docs" / "metrics.md").read_text().split("## What TRL and verl call them")[0]
    names = [line.split("|")[1].replace("`", "").replace(" ", "") for line in page.splitlines() if line[:3] == "| `"]
    documented = {name for line in names for name in line.split(",")}
    open_ended = {name for name in documented if "NAME" in name or "PATH" in name or "@" in name}
    assert documented - open_ended - {"val/reward/total", "reward/total"} == {*OF_GRPO, *OF_SFT}


def test_the_settings_at_the_top_are_known():
    assert set(composed()) <= set(TOP)
    assert {path.name for path in CONF.iterdir() if path.is_dir()} <= set(TOP)
    assert set(DATA) - {"steps", "tries", "validate_every"} <= set(settings()["data"])


def test_settings_are_checked_without_importing_anything_heavy(tmp_path):
    (tmp_path / "my_rewards.py").write_text("raise RuntimeError('imported')\n")
    code = (
        "import importlib, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from tests.support.composed import composed\n"
        "own = 'reward.custom.function._target_=my_rewards.f'\n"
        "config = composed('reward=[accuracy,custom]', own, 'steps=0',\n"
        "    'optimizer.betas=[1]', 'sweep_metric=x', '+trainer.max_steps=3',\n"
        "    'optimizer=adamw_8bit', 'loss.surrogate.epsilon_low=2', 'trainer.devices=0')\n"
        "from grpo_lightning.config import ConfigError, check_config, describe_sizes, config_warnings\n"
        "try:\n    check_config(config)\n"
        "except ConfigError as error:\n    print(*error.problems, sep='\\n')\n"
        f"for name in {sorted(TRIED)!r}:\n    importlib.import_module(name.rpartition('.')[0])\n"
        f"assert not {HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}\n"
        "assert 'my_rewards' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 6, done.stdout
