"""What files may say that the command brings along: choices, numbers, switches and some texts, and nothing else."""

import functools
import json
import os
import re
import shutil
import sys

import pytest
import torch
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import grpo_lightning as grpo
from grpo_lightning import start
from grpo_lightning.composition import CONF
from grpo_lightning.composition.brought_files import brought_problems, is_trusted, misplaced, word_problems
from grpo_lightning.composition.found import SettingsRefused
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.settings import ConfigError
from tests.support.provocations import provocation


@pytest.mark.parametrize(
    "lines",
    [
        "steps: 20",
        "seed: ${seed}",
        "task_name: mine",
        "tags: [a, b]",
        "optimizer: {lr: 1e-4, betas: [0.9, 0.95], weight_decay: 0.1, foreach: true}",
        "optimizer: {_target_: torch.optim.SGD, momentum: 0.9}",
        "loss: {kl_coef: 0.01, surrogate: {epsilon_low: 0.2, epsilon_high: null}}",
        "loss: {kl_coef: {_target_: grpo_lightning.varying.Linear, start: 0.1, end: 0.0, steps: '${steps}'}}",
        "loss: {kl_coef: {_target_: grpo_lightning.varying.Adaptive, metric: policy/kl_divergence, target: 0.1}}",
        "policy: {path: Qwen/Qwen3-0.6B, system_prompt: 'Think. {x}', dtype: bfloat16, gradient_checkpointing: true}",
        "policy: {template_kwargs: {enable_thinking: false}, adapter: {r: 16, target_modules: all-linear}}",
        "data: {path: openai/gsm8k, columns: {prompt: question, answer: answer}, validation_size: 64}",
        "data: {task: basic_arithmetic, task_config: {min_terms: 2, max_terms: 3}}",
        "rollout: {group_size: 16, temperature: 0.6, stop: ['</answer>']}",
        "reward: {length: {weight: 0.2, only_if: 'accuracy >= 1', clip: [0, 0.5]}, format: null}",
        "reward: {mine: {_target_: grpo_lightning.reward.Weighted, weight: 0.1, function: "
        "{_target_: grpo_lightning.reward.length.repetition, _partial_: true, n: 3, max_penalty: 1.0}}}",
        "callbacks: {stop: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1, patience: 3}}",
        "callbacks: {samples: null}",
        "trainer: {precision: 32-true, gradient_clip_val: 1.0, devices: 1}",
        "logger: {wandb: {project: mine, group: a}}",
        "hydra: {sweeper: {params: {seed: '0,1', +optimizer.lr: 'tag(log, interval(1e-4, 2e-3))'}}}",
        "hydra: {sweeper: {params: {algorithm: 'grpo,dapo', reward: '[accuracy],[accuracy,format]'}}}",
    ],
)
def test_recipes_may_be_brought_along(lines):
    assert brought_problems("mine.yaml", OmegaConf.to_container(OmegaConf.create(lines))) == []


@pytest.mark.parametrize(
    "lines",
    [
        "run_dir: x",
        "run_dir: {}",
        "trainer: {callbacks: {}}",
        "logger: {wandb: {settings: {}}}",
        "trusted: [a]",
        "trusted_settings: true",
        "checkpoint: their.ckpt",
        "checkpoint: 1",
        "requeue: true",
        "reward: {judge: {function: {allow_http: true}}}",
        "note: 1",
        "seed: ${task_name}",
        "task_name: '${tags}'",
        "task_name: ../../x",
        "tags: [a, ~/x]",
        "task_name: .bashrc.d",
        "task_name: a/.git",
        "rollout: {temperature: {_target_: grpo_lightning.varying.Stepwise, metric: x/../y, start: 1}}",
        "sweep_metric: /x",
        "data: {revision: a/../../x}",
        "logger: {wandb: {project: ../x}}",
        "task_name: 'a ${steps}'",
        "optimizer: {_target_: my.optimizer}",
        "optimizer: {_partial_: 1}",
        "mine: {_target_: torch.optim.AdamW, lr: 1}",
        "reward: {custom: {function: {x: {_target_: grpo_lightning.reward.length.length, _partial_: true}}}}",
        "reward: {accuracy: {function: {x: {_target_: grpo_lightning.varying.Linear, _partial_: true}}}}",
        "environment: {function: {kwargs: {x: {_target_: grpo_lightning.environment.guess.guess, _partial_: true}}}}",
        "reward: {accuracy: {timeout: {_target_: torch.optim.AdamW}}}",
        "optimizer: {lr: {_target_: grpo_lightning.varying.Linear, start: 1}}",
        "loss: {kl_coef: {_target_: lightning.pytorch.callbacks.EarlyStopping}}",
        "run_dir: {_target_: grpo_lightning.varying.Linear, start: 1}",
        "trainer: {default_root_dir: {_target_: grpo_lightning.varying.Linear, start: 1}}",
        "policy: {trust_remote_code: {_target_: grpo_lightning.varying.Linear, start: 1}}",
        "optimizer: {_args_: [1]}",
        "optimizer: {lr: {a: 1}}",
        "optimizer: {lr: [[1]]}",
        "optimizer: {lr: x}",
        "optimizer: {_target_: torch.optim.SGD, _partial_: 1}",
        "optimizer: {_target_: torch.optim.SGD, box: {a: 1}}",
        "policy: {'adapter.r': 1}",
        "reward: {'length.weight': 1}",
        "optimizer: {1: 1}",
        "loss: {kl_coef: {_target_: grpo_lightning.varying.Linear, start: x}}",
        "loss: {kl_coef: {start: {_target_: my.own}}}",
        "policy: {trust_remote_code: true}",
        "policy: {trust_remote_code: 1}",
        "policy: {attn_implementation: theirs/kernel}",
        "policy: {template_kwargs: {box: {enable_thinking: 1}}}",
        "policy: {template_kwargs: {box: text}}",
        "policy: {template_kwargs: {allow_pickle: true}}",
        "policy: {_convert_: null}",
        "policy: {adapter: {target_modules: '(a+)+'}}",
        "reward: {pattern: {function: {expression: '(a+)+'}}}",
        "policy: {_target_: grpo_lightning.composition.part}",
        "policy: {path: !!binary YQ==}",
        "data: {columns: {prompt: {a: b}}}",
        "data: {_convert_: none}",
        "data: {map_row: {_target_: my.row, _partial_: true}}",
        "data: {metadata: [{a: 1}]}",
        "reward: {custom: {function: {_target_: my.reward}}}",
        "reward: {custom: {function: {strength: 3}}}",
        "reward: {judge: {function: {base_url: 'http://theirs'}}}",
        "reward: {judge: {function: {cache: x}}}",
        "reward: {judge: {function: {cache: null}}}",
        "reward: {mine: {function: {_target_: grpo_lightning.reward.model.RewardModel, path: x}}}",
        "reward: {mine: {function: {_target_: grpo_lightning.reward.length.length, target: '${reward}'}}}",
        "environment: {function: {id: 'theirs:Env'}}",
        "environment: {function: {kwargs: {a: 1}}}",
        "sampler: {url: 'http://theirs'}",
        "sampler: {directory: x}",
        "callbacks: {checkpoint: {directory: x}}",
        "callbacks: {checkpoint: {directory: null}}",
        "callbacks: {export: {directory: 3}}",
        "callbacks: {mine: {_target_: grpo_lightning.callbacks.export.Export, directory: x}}",
        "callbacks: {mine: {_target_: lightning.pytorch.callbacks.LambdaCallback}}",
        "callbacks: {mine: {_target_: EarlyStopping}}",
        "trainer: {devices: 2}",
        "trainer: {num_nodes: 2}",
        "trainer: {callbacks: null}",
        "trainer: {default_root_dir: null}",
        "trainer: {strategy: ddp}",
        "trainer: {logger: true}",
        "logger: {csv: {save_dir: x}}",
        "logger: {tensorboard: {version: 3}}",
        "logger: {wandb: {settings: {disable_git: false}}}",
        "logger: {wandb: {settings: {more: 1}}}",
        "hydra: {sweeper: {params: {trusted: 1}}}",
        "hydra: {sweeper: {params: {++trusted_settings: true}}}",
        "hydra: {sweeper: {params: {policy.trust_remote_code: true}}}",
        "hydra: {sweeper: {params: {policy._convert_: null}}}",
        "hydra: {sweeper: {params: {task_name: 'a,b'}}}",
        "hydra: {sweeper: {params: {algorithm: 'a/b'}}}",
        "hydra: {sweeper: {params: {..: a}}}",
        "hydra: {sweeper: {params: {+: a}}}",
        "hydra: {sweeper: {params: {seed: 'choice(a,b)'}}}",
        "hydra: {sweeper: {params: {~reward.format: null}}}",
    ],
)
def test_nothing_else_may(lines):
    said = OmegaConf.to_container(OmegaConf.create(lines), resolve=False)
    (told,) = brought_problems("theirs.yaml", said)
    assert told.startswith("theirs.yaml: ")
    assert told.endswith(
        "stands in a file that the command brings along; allowed there are choices, numbers, switches and some texts; "
        "anything else on the command line, where trusted_settings=true says that you know the file"
    )


def test_a_message_names_five_keys():
    (told,) = brought_problems("theirs.yaml", {"x": dict.fromkeys("abcdefg", 1)})
    assert "x.a=1; x.b=1; x.c=1; x.d=1; x.e=1 and 2 more stands in" in told


@provocation(
    "a list of defaults, in a file that the command brings along, which places a file of conf/ elsewhere "
    "(`/reward@data.train: custom`), leads out of its folder or chooses one of Hydra's",
    "refused by file and words",
)
@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        ("[/reward@data.x: custom]", "defaults="),
        ("[/reward@data: custom]", "mine: places reward/custom at data; allowed is where it stands in conf/"),
        ("[/reward/custom@data]", "mine: places reward/custom at data; allowed is where it stands in conf/"),
        ("[/optimizer@policy: adamw]", "mine: places optimizer/adamw at policy; allowed is where it stands in conf/"),
        (
            "[/optimizer@_global_: adamw]",
            "mine: places optimizer/adamw at the top; allowed is where it stands in conf/",
        ),
        ("[/data@_here_: rows]", "data@: rows"),
        ("[override /hydra/job_logging: disabled]", "hydra/job_logging@None: disabled"),
        ("[/hydra/sweeper@loss: optuna]", "hydra/sweeper@loss"),
    ],
)
def test_choices_are_names(defaults, told, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    try:
        with pytest.raises(ConfigCompositionException) as caught:
            grpo.compose(f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=mine", run_dir=tmp_path / "run")
    finally:
        start.forget_settings_from()
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "default",
    [
        GroupDefault(group="reward", value="../x"),
        GroupDefault(group="reward", value=["accuracy", "/x/y"]),
        GroupDefault(group="/reward", value="x", package="data.train"),
        GroupDefault(group="reward", value="${seed}"),
        GroupDefault(group="../reward", value="x"),
        GroupDefault(group="hydra/launcher", value="own", override=True),
        GroupDefault(group="hydra/sweeper", value="optuna", package="loss"),
        GroupDefault(group="hydra", value="x"),
        ConfigDefault(path="/x/../y"),
        ConfigDefault(path="/hydra/sweeper/optuna"),
        ConfigDefault(path="x/${seed}"),
        ConfigDefault(path="base", package="mine.function"),
    ],
)
def test_entries_of_a_list_of_defaults_that_are_refused(default):
    (told,) = brought_problems("theirs.yaml", {}, [default])
    assert told.startswith("theirs.yaml: 'defaults=") or told.startswith("theirs.yaml: defaults=")


def test_entries_of_a_list_of_defaults_that_are_not():
    own = [ConfigDefault(path="_self_"), ConfigDefault(path="base", package="mine"), ConfigDefault(path="/train")]
    own += [GroupDefault(group="mine", value=None), GroupDefault(group="/reward", value=["accuracy", "format"])]
    own += [GroupDefault(group="hydra/sweeper", value="optuna", override=True)]
    assert brought_problems("mine.yaml", {}, own) == []


def test_a_file_of_conf_stands_where_it_is_meant_to():
    for path, package, header, is_wrong in (
        ("reward/custom", "reward", None, False),
        ("reward/base", "reward.mine", None, False),
        ("reward/base", "reward.mine.function", None, True),
        ("reward/base", "data.mine", None, True),
        ("reward/custom", "reward.custom", None, True),
        ("policy/hf", "", "_global_", False),
        ("policy/hf", "policy", "_global_", True),
        ("train", "", None, False),
        ("train", "loss", None, True),
    ):
        assert misplaced(ResultDefault(config_path=path, package=package), {"package": header}) == is_wrong


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trusted_settings=true"], True),
        (["seed=1", "trusted_settings=True"], True),
        (["trusted_settings=true", "trusted_settings=false"], False),
        (["trusted_settings=false", "trusted_settings=true"], True),
        (["trusted_settings=${seed}"], False),
        (["trusted_settings='true'"], False),
        (["trusted=[true]"], False),
        (["+trusted_settings=true"], False),
        (["task_name=trusted_settings=true"], False),
        ([], False),
    ],
)
def test_a_word_trusts_what_is_brought_along(words, expected):
    assert is_trusted(words) == expected


USERS = """
def count(completions, **columns):
    open("HIT", "a").write("x")
    return [0.0] * len(completions)


def load(path="", **_):
    open("HIT", "a").write(str(path))
    raise ValueError("loaded")
"""


@provocation(
    "code of the user's that the command names (a reward, a policy's loader, one of a package in `trusted`, a model's "
    "by `trust_remote_code`), and settings that it brings along, whatever they say: they may say what it is given",
    "refused by its key, nothing is imported; with `trusted_settings=true` it runs",
)
@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["reward=[custom]", "reward.custom.function._target_=brought_user.count"], "reward.custom.function._target_"),
        (["policy=hf", "policy.path=x", "policy._target_=brought_user.load"], "policy._target_"),
        (["policy=hf", "policy.path=x", "policy.trust_remote_code=true"], "policy.trust_remote_code"),
        (["+callbacks.own._target_=brought_user.Own", "trusted=[brought_user]"], "callbacks.own._target_"),
    ],
)
def test_code_of_the_users_and_settings_of_others_do_not_go_together(words, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "brought_user.py").write_text(USERS)
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\nseed: 3\n")
    places = (f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=theirs", "debug=default")
    with pytest.raises(ConfigError) as caught:
        grpo.compose(*places, *words, run_dir=tmp_path / "run")
    told = f"this code may be given what settings of {tmp_path}/conf say; if you know them, allowed is trusted_settings"
    assert re.search(rf"  {re.escape(key)}=\S+: {re.escape(told)}=true on the command line", str(caught.value))
    assert "brought_user" not in sys.modules
    assert not (tmp_path / "HIT").exists()
    if key.startswith("reward"):
        try:
            grpo.compose(*places, *words, "trusted_settings=true", run_dir=tmp_path / "run").fit()
        finally:
            sys.modules.pop("brought_user", None)
        assert (tmp_path / "HIT").exists()


@provocation(
    "settings that are brought along and are a link to a file of the user's, such as ~/.cache/huggingface/token, whose "
    "words would stand in a model card",
    "refused in one sentence; links inside a folder are followed, and all with `trusted_settings=true`",
)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "folder", "place"])
@pytest.mark.parametrize("place", ["hydra.searchpath", "callbacks"])
def test_settings_that_are_brought_along_are_no_links(way, place, tmp_path, monkeypatch):
    theirs = tmp_path / "dl" / "theirs"
    (theirs / "experiment").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "token.yaml").write_text("hf_mine: null\n")
    callbacks, private = theirs / "callbacks", tmp_path / "private"
    words = [f"callbacks={os.path.relpath(theirs, CONF / 'callbacks')}/callbacks/token"]
    if place == "hydra.searchpath":
        exp = theirs / "experiment" / "theirs.yaml"
        exp.write_text("# @package _global_\ndefaults:\n  - override /callbacks: [default, token]\n")
        words = [f"hydra.searchpath=[file://{theirs}/own,file://{theirs}]", "experiment=theirs"]
    monkeypatch.setattr(start, "START", theirs if way == "folder" else tmp_path)  # no link in it is the user's own
    if way == "folder" and place == "hydra.searchpath":
        callbacks.symlink_to(private)
    elif way == "place" and place == "hydra.searchpath":
        (tmp_path / "callbacks").symlink_to(private)
        (theirs / "own").symlink_to("../..")
    else:
        callbacks.mkdir()
        (callbacks / "own").symlink_to(private)
        (callbacks / "token.yaml").symlink_to("own/token.yaml" if way == "place" else private / "token.yaml")
    with pytest.raises(SettingsRefused, match=r"callbacks/token: is by a link \S*token\.yaml, which may be no "):
        grpo.compose(*words, "debug=default", run_dir=tmp_path / "run")
    if place != "callbacks":
        run = grpo.compose(*words, "debug=default", "trusted_settings=true", run_dir=tmp_path / "run")
        assert "hf_mine" in run.config["callbacks"]
        (theirs / "own").unlink(missing_ok=True)
        callbacks.unlink(missing_ok=True) if way != "file" else shutil.rmtree(callbacks)
        callbacks.mkdir()
        (theirs / "callbacks" / "own.yaml").write_text("samples: null\n")
        (theirs / "callbacks" / "token.yaml").symlink_to("own.yaml")
        assert grpo.compose(*words, "debug=default", run_dir=tmp_path / "other").config["callbacks"]["samples"] is None


@provocation(
    "objects that a program gives to `compose`, and settings that are brought along, whatever they say",
    "refused by their keys; rows and paths are not",
)
@pytest.mark.slow
def test_nor_do_objects_of_a_program(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\nseed: 3\n")
    words = [f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=theirs", "debug=default"]
    rows = [{"prompt": one, "answer": "1"} for one in "abcdefgh"]

    def letters(completions):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match=r"reward\.letters=\S+letters: this code may be given what settings of "):
        grpo.compose(*words, reward=letters, data=rows, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer=partial: this code may be given what settings of "):
        grpo.compose(*words, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), run_dir=tmp_path / "run")
    run = grpo.compose(*words, "trusted_settings=true", reward=letters, data=rows, run_dir=tmp_path / "run")
    assert run.config["seed"] == 3
    run = grpo.compose(*words, data=rows, logger="csv", run_dir=tmp_path / "other")
    assert run.config["seed"] == 3


@provocation(
    "a stranger's run that is replayed with a reward of the user's own that the command names",
    "refused by its key; with `trusted_settings=true` it scores",
)
@pytest.mark.slow
def test_nor_do_runs_of_others_that_are_scored_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "brought_user.py").write_text(USERS)
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text(json.dumps(["seed=3"]))
    own = ["reward=[custom]", "reward.custom.function._target_=brought_user.count"]
    with pytest.raises(
        ConfigError, match=r"function\._target_=brought_user\.count: this code may be given what settings"
    ):
        recalled(tmp_path / "run", own, ["reward"])
    assert "brought_user" not in sys.modules
    config, build = recalled(tmp_path / "run", [*own, "trusted_settings=true"], ["reward"])
    build("reward", config["reward"])
    assert sys.modules.pop("brought_user")


@pytest.mark.parametrize(
    "lines",
    [
        "policy: {_target_: torch.optim.AdamW, output_loading_info: true}",
        "trainer: {_target_: torch.optim.AdamW, fast_dev_run: true}",
        "sampler: {_target_: torch.optim.AdamW, stale: 3}",
        "logger: {wandb: {_target_: grpo_lightning.logger.wandb.WandbLogger}}",
        "logger: {csv: {_target_: torch.optim.AdamW, flush: 3, save_dir: 4}}",
    ],
)
def test_plain_code_stands_where_conf_has_such(lines):
    (told,) = brought_problems("theirs", OmegaConf.to_container(OmegaConf.create(lines)))
    assert "_target_" in told


def test_words_of_a_run_are_those_of_a_file():
    def told(*words):
        parsed = OverridesParser.create().parse_overrides([*words])
        return [one.partition(" stands")[0] for one in word_problems(parsed)]

    good = ["algorithm=dapo", "reward=[accuracy,format]", "seed=1", "+optimizer.eps=1e-8", "policy.path=x/y"]
    good += ["loss.kl_coef={_target_: grpo_lightning.varying.Linear, start: 0.1, end: 0, steps: 3}", "~reward.format"]
    assert told(*good) == []
    bad = ["algorithm=../x", "reward=[accuracy,/tmp/y]", "reward@data=custom", "seed=1,2", "run_dir=x"]
    bad += ["hydra/launcher=joblib", "hydra.run.dir=x", "reward.custom.function._target_=my.f", "+x={a: 1}"]
    bad += ["task_name=${tags}", "policy={path: {a: b}}"]
    assert told(*good, *bad) == bad


def test_words_that_the_user_gives_anew_are_the_users():
    def told(word, own):
        return word_problems(*map(OverridesParser.create().parse_overrides, ([word], [own])))

    for word, own, is_left in (
        ("reward.custom.function._target_=my.f", "reward.custom.function._target_=mine.f", False),
        ("reward.custom.function={_target_: my.f}", "reward.custom.function={a: 1}", True),  # mappings are joined
        ("reward.custom.function={_target_: my.f}", "reward.custom.function.a=1", True),
        ("+reward.custom.function.a=x", "~reward.custom.function.a", True),
        ("task_name=a/b", "tags=[a]", False),
        ("run_dir=x", "tags=[a]", True),
        ("experiment=../x", "experiment=open_r1", True),
    ):
        assert bool(told(word, own)) == is_left, word


def test_every_setting_of_conf_is_known():
    """Files of this project may be brought along, whatever they say, but for loggers, which are chosen."""
    for path in CONF.rglob("*.yaml"):
        group = ".".join(path.relative_to(CONF).parent.parts)
        said = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        said = {key: value for key, value in said.items() if key != "defaults"}
        if "@package _global_" not in path.read_text():
            for name in reversed(group.split(".") if group else []):
                said = {name: said}
        if path.stem != "train":  # whose settings of Hydra are its own
            said = (
                {"reward": {"any": said["reward"]}} if path.relative_to(CONF).as_posix() == "reward/base.yaml" else said
            )
            refused = re.findall(r"\S+\._target_=", "".join(brought_problems(path.name, said)))
            assert refused == ([f"logger.{path.stem}._target_="] if group == "logger" and path.stem != "none" else [])
