"""Mistakes that would show late, or never: each is named by its key before anything is imported or loaded."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from grpo_lightning.data.rules import RULES as DATA
from grpo_lightning.settings import TOP, ConfigError, check
from grpo_lightning.settings.built import check_built
from grpo_lightning.settings.metrics import OF_GRPO, OF_SFT
from grpo_lightning.settings.places import obstacle
from grpo_lightning.settings.rewards import TRIED
from tests.support import prepared
from tests.support.composed import CONF, ROOT, composed, settings
from tests.support.provocations import provocation
from tests.test_settings import problems

HEAVY = {"torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "reasoning_gym", "sympy"}
NAMED = "named by key before anything is loaded"
SCHEMA = "reward=[accuracy,json_schema]|reward.json_schema.function.schema"


def row(override: str, message: str):
    return pytest.param(override.split("|"), message, marks=provocation(override.replace("|", " "), NAMED), id=override)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        row("trainer.devices=0", "trainer.devices=0: allowed is an integer >= 1, auto or -1 for all, or a list"),
        row("trainer.devices=two", "trainer.devices=two: allowed is an integer >= 1, auto or -1"),
        row("trainer.devices=-3", "trainer.devices=-3: allowed is an integer >= 1, auto or -1"),
        row("trainer.devices=[0,0]", "trainer.devices=[0, 0]: allowed is an integer >= 1, auto or -1"),
        row("trainer=cpu|trainer.devices=-1", "trainer.devices=-1: allowed with trainer.accelerator=cpu is auto or"),
        row("trainer.accelerator=npu", "trainer.accelerator=npu: allowed is one of auto, cpu, gpu, cuda, mps"),
        row("+trainer.num_nodes=0", "trainer.num_nodes=0: allowed is an integer >= 1"),
        *(
            row(f"+trainer.strategy={name}", f"trainer.strategy={name}: allowed are auto, ddp, ddp_find_unused_par")
            for name in ("nonsense", "ddp_fork", "ddp_notebook", "DDP_spawn", "dp", "xla", "model_parallel")
        ),
        row("trainer=ddp|trainer.strategy.timeout=0", "trainer.strategy.timeout=0: allowed is minutes > 0"),
        row("policy.system_prompt={a: 1}", "policy.system_prompt={'a': 1}: allowed is a text"),
        row("validation.ks=4", "validation.ks=4: allowed is a list of integers >= 1, such as [1, 4]"),
        row("validation.ks=[1,two]", "validation.ks=[1, 'two']: allowed is a list of integers >= 1"),
        *(
            row(f"callbacks.{name}.every=0", f"callbacks.{name}.every=0: allowed is an integer >= 1")
            for name in ("checkpoint", "samples", "progress")
        ),
        row(
            "+callbacks.mine={_target_: grpo_lightning.callbacks.samples.Samples, every: 0, "
            "max_rows: 9, max_characters: 9}",
            "callbacks.mine.every=0: allowed is an integer >= 1",
        ),
        row(
            "logger=wandb|+logger.wandb.settings.git_root=/x",
            "logger.wandb.settings.git_root=/x: allowed are silent, quiet, init_timeout, x_disable_meta=True",
        ),
        row(
            "+trainer.logger=[{_target_: grpo_lightning.logger.wandb.WandbLogger, save_dir: '${run_dir}', "
            "settings: {git_root: /x}}]",
            "trainer.logger.0.settings.git_root=/x: allowed are silent, quiet, init_timeout",
        ),
        row("logger=wandb|logger.wandb.settings.x_disable_meta=false", "x_disable_meta=False: allowed are silent"),
        row("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: allowed is two numbers in [0, 1), such as [0.9, 0.999]"),
        row("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1]: allowed is two numbers in [0, 1)"),
        row("seed=4294967296", "seed=4294967296: allowed is an integer from 0 to 4294967295"),
        row(
            "loss.kl._target_=grpo_lightning.loss.MAX_LOG_RATIO",
            "allowed is a function or a class; ",
        ),
        row("loss.kl._target_=[grpo_lightning.loss]", "loss.kl._target_=['grpo_lightning.loss']: allowed is a text, a"),
        row("+callbacks.x={_target_: {a: 1}}", "callbacks.x._target_={'a': 1}: allowed is a text, a dotted name"),
        row("loss.kl._target_=grpo_lightning.loss", "allowed is a function or a class; it is a module"),
        row("policy.adapter={bogus: 8}", "policy.adapter.bogus: unknown; peft.LoraConfig takes "),
        row("policy.adapter={lora_alfa: 8}", "policy.adapter.lora_alfa: unknown; the nearest is lora_alpha; peft"),
        row("policy.adapter={r: many}", "policy.adapter.r=many: allowed is an integer"),
        row("policy.adapter=8", "policy.adapter=8: allowed are arguments of peft's LoraConfig, such as {r: 16,"),
        row("policy.adapter={task_type: x}", "policy.adapter.task_type: unknown; the task is always CAUSAL_LM"),
        row("policy.attn_implementation=nonsense", "policy.attn_implementation=nonsense: allowed is one of sdpa"),
        row("policy.attn_implementation={a: 1}", "policy.attn_implementation={'a': 1}: allowed is one of sdpa"),
        row(
            "reference=another_model|reference.path=/tmp|reference.attn_implementation={a: 1}",
            "reference.attn_implementation={'a': 1}: allowed is one of sdpa",
        ),
        row("policy.attn_implementation=someone/kernel", "policy.attn_implementation=someone/kernel: allowed is"),
        row(
            "reward=[accuracy,pattern]|reward.pattern.function.expression='(unclosed'",
            "reward.pattern.function.expression=(unclosed: allowed is a regular expression (missing )",
        ),
        row(
            "reward=[accuracy,pattern]|reward.pattern.function.expression=a|reward.pattern.function.seconds=0",
            "reward.pattern.function.seconds=0: allowed is a number > 0",
        ),
        row(f"{SCHEMA}={{type: nonsense}}", "reward.json_schema.function.schema={'type': 'nonse"),
        row(f"{SCHEMA}=/no/such/file.json", "schema=/no/such/file.json: allowed is a mapping or"),
        row(f"{SCHEMA}={{pattern: '('}}", "reward.json_schema.function.schema={'pattern': '('}:"),
        row("reward=[accuracy,keyword]|reward.keyword.function.words=[]", "words=[]: allowed is a list of"),
        row("sweep_metric=nonsense", "sweep_metric=nonsense: allowed are val/pass@1, val/pass@4, val/maj@1,"),
        row("sweep_metric=val/pass@2", "sweep_metric=val/pass@2: allowed are val/pass@1, val/pass@4"),
        row("sweep_metric=val/reward/exact", "sweep_metric=val/reward/exact: allowed are val/pass@1"),
        row("sweep_metric=reward/totl", "and the metrics of training; the nearest is reward/total"),
        row("module=sft|data=demonstrations|sweep_metric=policy/entropy", "sweep_metric=policy/entropy: allowed are"),
        row(
            "module=sft|data=demonstrations|rollout.over_sample=2",
            "over_sample=2: allowed is 1 with module=sft, whose ba",
        ),
        row(
            "module=sft|data=demonstrations|rollout=dynamic_sampling",
            "max_tries=3: allowed is 1 with module=sft, whose",
        ),
        row("schedule.warmup_steps=121", "schedule.warmup_steps=121: allowed is at most steps=120, the steps"),
        row(
            "trainer.plugins=[]",
            "trainer.plugins=[]: allowed is a list with {_target_: grpo_lightning.",
        ),
        row("+num_generations=8", "num_generations=8: allowed here is rollout.group_size=8, as this project calls it"),
        row("+stepps=8", "stepps=8: unknown; the nearest is steps=8"),
        row("validation.threshold=inf", "validation.threshold=inf: allowed is a finite number"),
    ],
)
def test_a_mistake_is_named(overrides, message):
    (found,) = problems(*overrides)
    assert message in found


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer=ddp", "trainer.devices=[0,2]"],
        ["trainer.devices='0,1'"],
        ["policy.adapter={r: 4, lora_alpha: 8, target_modules: all-linear, lora_dropout: 0}"],
        ["reward=[accuracy,pattern]", "reward.pattern.function.expression='(?i)because'"],
        ["sweep_metric=val/reward/format"],
        ["sweep_metric=varying/loss.kl_coef"],
        ["sweep_metric=completion/length_mean"],
        ["module=sft", "data=demonstrations", "sweep_metric=loss/total"],
        ["validation.ks=[]", "sweep_metric=reward/total"],
        ["schedule.warmup_steps=120"],
        ["seed=4294967295"],
        ["optimizer._target_=bitsandbytes.optim.AdEMAMix", "optimizer.betas=[0.9,0.999,0.9999]", "~optimizer.fused"],
        ["+my_rate=1e-4", "optimizer.lr=${my_rate}"],
        ["+callbacks.mine={_target_: tests.support.killing.Kill, step: 1, moment: update}"],
    ],
)
def test_what_is_right_passes(overrides):
    check(composed(*overrides))


@provocation("a file in the way of the run directory, or of its checkpoints", NAMED)
def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (found,) = problems(f"run_dir={tmp_path}/file/run")
    assert found.startswith(
        f"run_dir={tmp_path}/file/run: allowed is a directory that can be written to; {tmp_path}/file"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    (found,) = problems(f"run_dir={tmp_path}/run")
    assert found.startswith(f"callbacks.checkpoint.directory={tmp_path}/run/checkpoints: allowed is a directory")
    check(composed(f"run_dir={tmp_path}/run", "mode=validate"))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert obstacle(tmp_path / "link" / "run") == f"{tmp_path}/link is a link to nothing"
    assert obstacle(tmp_path / "new" / "run") is None


@provocation("a run directory without permission to write", NAMED)
def test_a_directory_without_permission_is_named(tmp_path, monkeypatch):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & stat.S_IWUSR))
    (found,) = problems(f"run_dir={tmp_path}/run")
    tmp_path.chmod(stat.S_IRWXU)
    assert found.startswith(
        f"run_dir={tmp_path}/run: allowed is a directory that can be written to; {tmp_path} must not"
    )


@provocation(
    "a file or a link to nothing in the way of `hydra.run.dir`, or of a sweep by -m or `hydra.mode=MULTIRUN`",
    "a sentence by its key; `--cfg` shows the settings all the same",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], "hydra.run.dir"),
        (["-m", "seed=1,2"], "hydra.sweep.dir"),
        (["hydra.mode=MULTIRUN", "seed=1"], "hydra.sweep.dir"),
    ],
)
def test_a_directory_that_hydra_cannot_make_is_named(overrides, key, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("gone")
    for name, why in (("file", f"{tmp_path}/file is no directory"), ("link", "link is a link to nothing")):
        place = f"{name}/run" if name == "file" else name
        done = prepared.run([str(ROOT / "train.py"), *overrides, f"{key}={place}"], cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{key}={place}: allowed is a directory that can be written to; {why}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@provocation(
    "`-m hydra.run.dir=DIR`, or `hydra.sweep.dir=DIR` without `-m`, which Hydra passes by",
    "the one that is meant is told",
)
@pytest.mark.slow
def test_a_directory_without_effect_is_refused(tmp_path):
    for words, told in (
        (
            ["-m", "seed=1,2", "hydra.run.dir=a b"],
            "hydra.run.dir=a b: has no effect with -m; allowed is 'hydra.sweep.dir=a b'",
        ),
        (["seed=1", "hydra.sweep.dir=x"], "hydra.sweep.dir=x: has no effect without -m; allowed is hydra.run.dir=x"),
    ):
        done = prepared.run([str(ROOT / "train.py"), *words], cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{told}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_settings_are_shown_where_no_directory_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for word in ("--cfg=job", "--help", "--info=searchpath"):
        done = prepared.run([str(ROOT / "train.py"), "hydra.run.dir=file", word], cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_said_of_other_words_holds_no_secret(tmp_path):
    for words in (["--wandb.api_key", "abc123def"], ["--api-key=abc123def"], ["a=1", "-m", "token=abc123def"]):
        done = prepared.run([str(ROOT / "train.py"), *words], cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr
        assert "abc123def" not in done.stderr


@provocation(
    "`python train.py --lr 1e-5`, `--steps=5` and other options that are none; overrides before and after `-m`",
    "one sentence with the setting that is meant, or with the words in their order",
)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr", "1e-5"], "--lr: lr=1e-5: unknown; the nearest is optimizer.lr=1e-5"),
        (["--steps=5", "seed=1"], "--steps=5: allowed is steps=5, without dashes"),
        (["--steps", "5"], "--steps: allowed is steps=5, without dashes"),
        (["seed=1", "--print-settings"], "--print-settings: allowed is print_settings=VALUE, without dashes"),
        (["--seed", "seed=1"], "--seed: allowed is seed=VALUE, without dashes"),
        (["--learning-rate=1e-4"], "--learning-rate=1e-4: learning_rate=1e-4: allowed here is optimizer.lr=1e-4, as "),
        (["--epochs", "3"], "--epochs: epochs=3: allowed here is steps, which counts rollouts"),
        (["--foo"], f"--foo: allowed is KEY=VALUE, without dashes; python {ROOT}/train.py --help lists the keys"),
        (
            ["steps=1", "-m", "seed=1,2", "--config-dir", "c d", "tags=[a]"],
            "seed=1,2: options stand before overrides; allowed is "
            f"python {ROOT}/train.py -m --config-dir 'c d' steps=1 seed=1,2 'tags=[a]'",
        ),
        (["--help", "reward"], "reward: allowed is KEY=VALUE"),
        (["--help", "los=x"], "los=x: unknown; the nearest is loss=x, a part"),
    ],
)
@pytest.mark.grid
def test_words_that_are_no_overrides(words, told, tmp_path):
    done = prepared.run([str(ROOT / "train.py"), *words], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@provocation(
    "`python train.py` by a Python without the requirements", "a sentence names the missing one, and the Python"
)
def test_a_python_without_the_requirements_is_named(tmp_path):
    command = [sys.executable, "-S", str(ROOT / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={})
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"hydra is not installed for {sys.executable}: activate an environment with requirements.txt"
    )


def devices(monkeypatch, count: int, *overrides: str) -> tuple[str, ...]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        check_built(composed(*overrides))
    return error.value.problems


@provocation("trainer=gpu on a machine without a GPU", NAMED)
def test_no_gpu(monkeypatch):
    assert devices(monkeypatch, 0, "trainer=gpu") == (
        "trainer.accelerator=gpu: allowed here is cpu or auto: PyTorch finds no GPU",
    )
    (found,) = devices(monkeypatch, 0, "trainer.devices=[0,1]")
    assert found == "trainer.devices=[0, 1]: allowed without a GPU is a number of processes, such as 1"
    for fine in (["trainer=ddp"], ["trainer=cpu", "trainer.devices=2"], ["trainer.devices=3"]):
        check_built(composed(*fine))


@provocation("trainer.devices=3 on a machine with two GPUs", NAMED)
def test_more_devices_than_there_are(monkeypatch):
    assert devices(monkeypatch, 2, "trainer=ddp", "trainer.devices=3") == (
        "trainer.devices=3: allowed here is at most 2, the GPUs of this machine",
    )
    (found,) = devices(monkeypatch, 2, "trainer=ddp", "trainer.devices=[0,2]")
    assert found == "trainer.devices=[0, 2]: allowed here are numbers from 0 to 1, of the GPUs of this machine"
    for fine in ("2", "-1", "auto", "'1,'", "[1]"):
        check_built(composed("trainer=ddp", f"trainer.devices={fine}"))
    check_built(composed("trainer=cpu", "trainer.devices=3"))


def test_what_source_does_not_say_is_checked_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "made_late.py").write_text("def own(size): ...\n\n\nglobals()['late'] = own\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed("+callbacks.x={_target_: made_late.late, _partial_: true, colour: red}")
    check(config)
    with pytest.raises(ConfigError, match=r"callbacks\.x\.colour: unknown; made_late\.late takes size"):
        check_built(config)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+module.schedule={_target_: os.system}"],
        ["+validation.trainer={_target_: os.system}"],
        ["module.reference={_target_: os.system}"],
        ["+reward.accuracy.function.loss={_target_: os.system}"],
        ["trainer.callbacks=[{_target_: os.system}]"],
        ["+callbacks.deep={a: [{policy: {b: {_target_: os.system}}}]}"],
    ],
)
def test_a_target_is_checked_wherever_it_stands(overrides):
    with pytest.raises(ConfigError, match=r"_target_=os\.system: allowed are parts of this package"):
        check(composed(*(word.replace("+module.schedule", "module.schedule") for word in overrides)))


def test_metrics_have_the_names_that_are_documented():
    page = (ROOT / "docs" / "metrics.md").read_text().split("## What TRL and verl call them")[0]
    documented = {name for line in page.splitlines() if line.startswith("| `") for name in _names(line)}
    open_ended = {name for name in documented if "NAME" in name or "PATH" in name or "@" in name}
    assert documented - open_ended - {"val/reward/total", "reward/total"} == {*OF_GRPO, *OF_SFT}


def _names(line: str) -> list[str]:
    return line.split("|")[1].replace("`", "").replace(" ", "").split(",")


def test_the_settings_at_the_top_are_known():
    assert set(composed()) <= set(TOP)
    assert {path.name for path in CONF.iterdir() if path.is_dir()} <= set(TOP)
    assert set(DATA) - {"steps", "tries", "over_sample", "validate_every"} <= set(settings()["data"])


def test_rewards_that_are_tried_need_no_heavy_library():
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(TRIED)!r}:\n    importlib.import_module(name.rpartition('.')[0])\n"
        f"assert not {HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@provocation("ten kinds of wrong values", "answered in less than a second after Python has composed them; no torch")
def test_settings_are_checked_without_importing_anything_heavy(tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "raise RuntimeError('imported')\ndef f(completions, *, scale: float): ...\n"
    )
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from tests.support.composed import composed\n"
        "own = 'reward.custom.function._target_=my_rewards.f'\n"
        "config = composed('reward=[accuracy,custom]', own, '+reward.custom.function.scale=big', 'steps=0',\n"
        "    'optimizer.betas=[1]', 'policy.adapter={bogus: 1}', 'sweep_metric=x', '+trainer.max_steps=3',\n"
        "    '+loss.nonsense=1', 'optimizer=adamw_8bit', 'loss.surrogate.epsilon_low=2', 'trainer.devices=0')\n"
        "from grpo_lightning.settings import ConfigError, check, arithmetic, cautions\n"
        "try:\n    check(config)\n"
        "except ConfigError as error:\n    print(*error.problems, sep='\\n')\n"
        f"assert not {HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}\n"
        "assert 'my_rewards' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 9, done.stdout
    assert "reward.custom.function.scale=big: allowed is a number" in done.stdout
