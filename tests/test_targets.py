"""Which code settings may name: what a path leads to counts, wherever it stands."""

import re
import sys

import pytest

from grpo_lightning.config import ConfigError, check_config, check_runtime
from grpo_lightning.config.targets import import_target
from tests.support import prepared
from tests.support.composed import ROOT, composed

REFUSED = (
    "os.system",
    "builtins.eval",
    "subprocess.run",
    "importlib.import_module",
    "torch.load",
    "torch.hub.load",
    "torch.os.system",
    "torch.utils.collect_env.run",
    "numpy.load",
    "sympy.sympify",
    "lightning.pytorch.callbacks.model_checkpoint.os.system",
    "grpo_lightning.run.sys.exit",
    "grpo_lightning.config.targets.importlib.import_module",
    "hydra.utils.instantiate",
    "tests.test_targets.sys.exit",
    "tests.test_targets.again",
    "lightning.fabric.plugins.io.TorchCheckpointIO.load_checkpoint",
    "grpo_lightning.config.targets.import_target",
    "grpo_lightning.console.write_atomic",
    "grpo_lightning.reward.workers._unpickled",
)
again = eval  # of this file by its name, and of Python by its home


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_all(composed(*overrides))
    return str(error.value)


def check_all(config) -> None:
    check_config(config)
    check_runtime(config)


def test_code_that_settings_may_not_name_is_refused_by_its_key():
    for path in REFUSED:
        with pytest.raises(ValueError, match="allowed are parts of this package|this is a method"):
            import_target(path)
    config = composed()
    for path in REFUSED:
        config["loss"]["kl"]["_target_"] = config["module"]["loss"]["kl"]["_target_"] = path
        with pytest.raises(ConfigError, match=rf"\bloss.kl._target_={re.escape(path)}: "):
            check_all(config)


@pytest.mark.parametrize(
    "word",
    [
        "+module.more={_target_: os.system}",
        "+reward.accuracy.function.loss={_target_: os.system}",
        "trainer.callbacks=[{_target_: os.system}]",
        "+callbacks.deep={a: [{policy: {b: {_target_: os.system, _partial_: true}}}]}",
        "policy.template_kwargs={f: {_target_: os.system}}",
        "environment=tools environment.function.tools=[os.system]",
    ],
)
def test_a_target_is_checked_wherever_it_stands(word):
    assert "=os.system: allowed are parts of this package" in refused(*word.split(" ", word.startswith("environment")))


@pytest.mark.slow
def test_what_hydra_itself_makes_is_checked_before_it_is_made(tmp_path):
    for word in (
        "+hydra.callbacks.x={_target_: tests.test_targets.again}",
        "+hydra.sweeper.more={a: [{_target_: os.system}]}",
        "hydra.callbacks=${notes} +notes={a: {_target_: torch.utils.collect_env.run}}",
        "+hydra.job_logging.handlers.x={class: torch.utils.collect_env.run}",
    ):
        done = prepared.run(
            [
                str(ROOT / "train.py"),
                *[
                    part.replace("notes={", "+notes={") if part.startswith("notes") else part
                    for part in word.split(" +")
                ],
                "steps=1",
            ],
            cwd=tmp_path,
        )
        assert done.returncode == 1
        assert "allowed are " in done.stderr
        assert word.split("=")[0].lstrip("+") in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_users_own_code_and_trusted_packages_may_be_named(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(
        "from functools import lru_cache, partial\nfrom theirs import reward as theirs\n\n\n"
        "def reward(completions): ...\n\n\nclass Scorer:\n    def __call__(self, completions): ...\n"
        "    @classmethod\n    def made(cls): ...\n\n\n"
        "part, cached, scorer = partial(reward), lru_cache(reward), Scorer()\n"
    )
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "theirs.py").write_text("def reward(completions): ...\n")
    for place in (tmp_path, tmp_path / "site-packages"):
        monkeypatch.syspath_prepend(str(place))
    for name in ("reward", "Scorer", "Scorer.made", "part", "cached", "scorer"):
        assert callable(import_target(f"own_code.{name}"))
    for path in ("theirs.reward", "own_code.theirs"):
        with pytest.raises(ValueError, match="packages that trusted"):
            import_target(path)
        assert import_target(path, trusted=("theirs",)) is sys.modules["theirs"].reward
    with pytest.raises(ValueError, match=r"not found \(own_code has no member 'f'\)"):
        import_target("own_code.f")
    check_config(composed("reward=[custom]", "reward.custom.function._target_=theirs.reward", "trusted=[theirs]"))


def test_parts_of_python_are_not_trusted():
    assert "trusted=['os']: allowed are installed packages" in refused("trusted=[os]", "loss.kl._target_=os.system")


def test_libraries_that_settings_may_name():
    for path in (
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "bitsandbytes.optim.AdamW8bit",
        "lightning.Trainer",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.strategies.DDPStrategy",
        "lightning.pytorch.plugins.environments.SLURMEnvironment",
        "lightning.pytorch.profilers.SimpleProfiler",
        "lightning.pytorch.accelerators.CPUAccelerator",
        "transformers.Adafactor",
    ):
        assert callable(import_target(path)), path
