"""Settings name code, so what they may name is settled before anything is imported for it."""

import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from grpo_lightning import start
from grpo_lightning.composition.hydra_settings import problems
from grpo_lightning.settings import ConfigError, allowlist, check, given, trust
from tests.support.composed import CONF, composed
from tests.support.provocations import provocation

REFUSED = "is refused by its key before anything is imported for it"
REFUSED_IN_A_FILE = "refused by its key; on the command line it is allowed"


LIBRARY = """
class Tool:
    def __call__(self, file):
        return file

    @staticmethod
    def apply(file):
        return file


def load(file):
    return file


def decorated(function):
    def inner(completions):
        return function(completions)

    return inner


another = decorated(load)
tool = Tool()
"""
MINE = """
import os
from functools import lru_cache, partial
from os import system

from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD
from trust_library import Tool, another, decorated, load, tool

from grpo_lightning.environment.tools import Tools
from grpo_lightning.policy.hf import load as load_weights
from grpo_lightning.reward.format import _is_formatted, format

NUMBER = 1


def ok(completions):
    return [1.0]


kept = lru_cache(ok)
bound = partial(ok)
also = decorated(ok)
own = Tool()


class Made:
    @classmethod
    def of(cls):
        return cls()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A directory of the user's with a module, which is the directory of the start; a library lies elsewhere."""
    monkeypatch.setattr(start, "START", tmp_path / "start")
    for place, name, text in (("elsewhere", "trust_library", LIBRARY), ("start", "trust_mine", MINE)):
        (tmp_path / place).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / place))
        (tmp_path / place / f"{name}.py").write_text(text)
    yield "trust_mine"
    for name in ("trust_mine", "trust_library"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "builtins.eval", "subprocess.Popen", "pickle.loads", "runpy.run_path", "numpy.load"),
        *("sympy.sympify", "torch.load", "torch.hub.load", "torch.os.system", "torch.utils.collect_env.run"),
        *("torch.utils.cpp_extension.load", "torch.nn.Linear", "torch.jit.load"),
        *("transformers.pipeline", "transformers.AutoModel.from_pretrained", "transformers.utils.hub.os.system"),
        *("lightning.pytorch.cli.LightningCLI", "lightning.fabric.utilities.cloud_io._load", "lightning.app.x"),
        *("lightning.pytorch.loggers.CometLogger", "lightning.pytorch.loggers.WandbLogger"),
        *("lightning.pytorch.callbacks.BasePredictionWriter", "lightning.pytorch.strategies.DeepSpeedStrategy"),
        *(
            "lightning.pytorch.profilers.XLAProfiler",
            "lightning.pytorch.loggers.MLFlowLogger",
            "datasets.load_dataset",
            "hydra.utils.instantiate",
        ),
        *("hydra._internal.utils._locate", "peft.PeftModel.from_pretrained", "bitsandbytes.nn.Linear4bit"),
        *("grpo_lightning.reward.engine.pool._run", "grpo_lightning.reward.engine.pool.submit"),
        *("grpo_lightning.run.Run", "grpo_lightning.report.main", "grpo_lightning.checkpoint.io.read"),
        *("grpo_lightning.loss.__builtins__.eval", "grpo_lightning.callbacks.export.export", "grpo_lightning.allowed"),
        *(
            "__main__.f",
            "grpo_lightning.composition.main",
            "torch.optim..x",
            "a b.c",
            "grpo_lightning.policy.loading.resolve",
            "torch.optim.__init__",
        ),
    ],
)
def test_what_could_run_code_may_not_be_named(name):
    assert not trust.may_name(name)
    with pytest.raises(ValueError, match="allowed are parts of this package"):
        trust.resolved(name)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=provocation(f"`{key}={{_target_: numpy.load, file: x.npy, …}}`", REFUSED))
        for key in (
            *("reward.format.function.loss", "reward.format.function.trainer", "module.schedule", "loss.kl"),
            *("policy.adapter.x", "callbacks.mine", "anything", "data.task_config.deep.deeper"),
        )
    ],
)
def test_every_target_is_checked_wherever_it_stands(key, tmp_path):
    config = composed()
    *above, last = key.split(".")
    node = config
    for name in above:
        node = node[name] if isinstance(node.get(name), dict) else node.setdefault(name, {}) or node
    node[last] = [{"listed": {"_target_": "numpy.load", "file": "x.npy", "allow_pickle": True}}]
    with pytest.raises(ConfigError, match=r"_target_=numpy\.load: allowed are parts of this package"):
        check(config)


def test_every_target_of_the_settings_files_may_be_named_and_is_found():
    found = set()
    for path in CONF.rglob("*.yaml"):
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert problems(node.pop("hydra", {})) == [], path  # what Hydra itself builds has rules of its own
        found |= {name for _, name in trust.targets(node)}
    found = {name for name in found if name != "???" and "$" not in name}
    assert len(found) > 70
    for name in found:
        assert callable(trust.resolved(name)), name


@pytest.mark.parametrize(
    "name, reason",
    [
        ("torch.optim.AdamW.step", "this is a method"),
        ("torch.optim.sgd.sgd", "is defined in torch.optim"),
        ("grpo_lightning.schedule.math.exp", "leads to the module math"),
        ("grpo_lightning.loss.Rollout", "is defined in grpo_lightning.batch"),
        ("grpo_lightning.checkpoint.io.AtomicCheckpointIO.remove_checkpoint", "this is a method"),
        ("grpo_lightning.callbacks.checkpoint.RunCheckpoint.on_train_end", "this is a method"),
        ("grpo_lightning.loss.dataclass", "is defined in dataclasses"),
        ("lightning.pytorch.callbacks.lambda_function.Callable", "allowed"),
        ("grpo_lightning.reward.verifier.begin", "allowed"),  # its callers look at the row before it is evaluated
        ("grpo_lightning.reward.verifier.make_scorer", "allowed"),
        ("grpo_lightning.reward.engine.weighted.load", "allowed"),
        ("grpo_lightning.policy.adapted.with_adapter", "allowed"),
    ],
)
def test_what_an_allowed_path_leads_to_counts(name, reason):
    with pytest.raises(ValueError, match=reason):
        trust.resolved(name)


@pytest.mark.parametrize(
    "name",
    [
        *("torch.optim.SGD", "torch.optim.adamw.AdamW", "bitsandbytes.optim.AdamW8bit", "transformers.Adafactor"),
        *("lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.loggers.CSVLogger"),
        *("lightning.pytorch.strategies.DDPStrategy", "lightning.pytorch.profilers.SimpleProfiler"),
        *("lightning.pytorch.plugins.environments.SLURMEnvironment", "grpo_lightning.reward.model.RewardModel.of"),
    ],
)
def test_what_users_need_may_be_named(name):
    assert callable(trust.resolved(name))


@provocation(
    "`optimizer._target_=bitsandbytes.optim.AdEMAMix32bit`, of whose states one has half the size that the kernel "
    "writes to, or a base class, which takes any kernel's name",
    REFUSED,
)
@pytest.mark.parametrize(
    "name",
    [
        *("AdEMAMix32bit", "PagedAdEMAMix32bit", "ademamix.AdEMAMix32bit", "GlobalOptimManager"),
        *("optimizer.Optimizer1State", "optimizer.Optimizer2State", "optimizer.Optimizer8bit", "adamw.Optimizer2State"),
    ],
)
def test_an_optimizer_whose_kernel_writes_beyond_its_states_is_refused(name):
    with pytest.raises(ValueError, match=f"_target_=bitsandbytes.optim.{name}: allowed are"):
        trust.resolved(f"bitsandbytes.optim.{name}")


@pytest.mark.parametrize("name", [name for name in allowlist.LIBRARIES if name.startswith("bitsandbytes.")])
def test_states_have_the_sizes_that_kernels_write_to(name):
    weights = [torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(3, 7))]
    required = {"momentum": 0.9} if "SGD" in name or "LARS" in name else {}
    optimizer = trust.resolved(name)(weights, lr=0.1, **required)
    if name.endswith("PytorchLARS"):  # which has no kernel
        return
    for index, weight in enumerate(weights):
        optimizer.is_paged = False  # paged memory is the GPU's
        optimizer.init_state(optimizer.param_groups[0], weight, 0, index)
        state, kernel = optimizer.state[weight], optimizer.optimizer_name
        assert state["state1"].numel() == weight.numel() * (2 if kernel == "ademamix" else 1)
        assert ("state2" in state) is (kernel in ("adam", "ademamix", "lamb"))
        assert all(state[key].numel() == weight.numel() for key in ("state2",) if key in state)
        if state["state1"].dtype == torch.uint8:
            assert state["absmax1"].numel() == -(-5000 // 256) * (2 if kernel == "ademamix" else 1)


@pytest.mark.parametrize("name", ["ok", "kept", "bound", "also", "own", "Made", "Made.of", "format", "SGD"])
def test_what_a_file_of_the_user_has_may_be_named(name, mine):
    assert callable(trust.resolved(f"{mine}.{name}"))


@pytest.mark.parametrize(
    "name, reason",
    [
        ("os.system", "leads to the module os"),
        ("os", "this is the module os"),
        ("system", "is defined in posix"),
        ("lru_cache", "is defined in functools"),
        ("NUMBER", "this is a value of type int"),
        ("load", "is defined in trust_library"),
        ("decorated", "is defined in trust_library"),
        ("another", "is defined in trust_library"),
        ("tool", "is defined in trust_library"),
        ("Tool", "is defined in trust_library"),
        ("Tool.apply", "leads to trust_mine.Tool of another package"),
        ("own.apply", "is defined in trust_library"),
        ("_is_formatted", "allowed are"),
        ("ModelCheckpoint", "is defined in lightning.pytorch.callbacks"),  # rules look for its own name
        ("Tools", "is defined in grpo_lightning.environment.tools"),
        ("load_weights", "is defined in grpo_lightning.policy.hf"),
    ],
)
def test_what_a_file_of_the_user_only_imports_may_not(name, reason, mine):
    with pytest.raises(ValueError, match=reason):
        trust.resolved(f"{mine}.{name}")


def test_what_it_imports_may_be_named_where_the_package_is_trusted(mine):
    for name in ("load", "another", "tool", "Tool", "Tool.apply"):
        assert callable(trust.resolved(f"{mine}.{name}", ["trust_library"]))


def test_a_file_is_not_imported_to_be_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "START", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trust_breaks.py").write_text("raise RuntimeError('imported')\n")
    assert trust.may_name("trust_breaks.reward")


@provocation("starting in `/`, with a `_target_` of Python's library or of an installed package", REFUSED)
@pytest.mark.parametrize("place", [Path("/"), Path(sys.prefix), Path(sys.base_prefix).parent])
def test_python_and_its_packages_are_no_files_of_the_user_wherever_one_starts(place, monkeypatch):
    monkeypatch.setattr(start, "START", place.resolve())
    for name in ("json.load", "shutil.rmtree", "numpy.load", "regex.compile", "pip.main", "site.main"):
        assert not trust.may_name(name), name


def test_below_the_prefix_of_python_ones_own_files_count(tmp_path, monkeypatch):
    """As in a container whose Python is in /usr, and whose programs are in /usr/src."""
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    start._installed.cache_clear()
    place = tmp_path / "src" / "app"
    place.mkdir(parents=True)
    (place / "trust_app.py").write_text("")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(start, "START", place.resolve())
    try:
        assert trust.may_name("trust_app.f")
    finally:
        monkeypatch.undo()
        start._installed.cache_clear()


def test_a_trusted_package_may_be_named_but_leads_nowhere_else():
    assert not trust.may_name("jsonschema.validate")
    assert trust.resolved("jsonschema.validate", ["jsonschema"]).__module__ == "jsonschema.validators"
    with pytest.raises(ValueError, match="leads to the module"):
        trust.resolved("jsonschema.validators.json.loads", ["jsonschema"])
    check(composed("trusted=[jsonschema]"))


@pytest.mark.parametrize("given", ["[os]", "[torch.os]", "[3]", "jsonschema", "[builtins]"])
def test_trust_is_in_packages_by_name_outside_the_standard_library(given):
    with pytest.raises(ConfigError, match=r"trusted=.*: allowed"):
        check(composed(f"trusted={given}"))


@provocation("`pkg://PACKAGE/…` as any value, which would import the package", REFUSED)
@pytest.mark.parametrize("key", ["policy.path", "reference.path", "reward.model.function.path", "+any.where"])
def test_what_is_in_packages_needs_trust(key):
    words = ["reward=[format,model]", "reference=another_model", "reference.path=x/y", "reward.model.function.path=x/y"]
    with pytest.raises(ConfigError, match=r"=pkg://antigravity/x: allowed are weights in this package"):
        check(composed(*words, f"{key}=pkg://antigravity/x"))


@provocation("a `_target_` of `tests` or `benchmarks` in a checkout of this project", REFUSED)
@pytest.mark.parametrize(
    "name", ["benchmarks.process.Worker", "conf.theirs.short", "tests.test_attacks.start", "train.main"]
)
def test_the_projects_own_helpers_are_no_files_of_the_user(name):
    assert not trust.may_name(name)
    assert trust.may_name(name, [name.partition(".")[0]])


@provocation("binary values, which a pickle could be in", REFUSED)
def test_binary_values_are_refused():
    config = composed()
    config["reward"]["format"]["function"]["x"] = [b"pickled"]
    with pytest.raises(ConfigError, match=r"reward\.format\.function\.x\.0: allowed are texts"):
        check(config)


@pytest.mark.parametrize(
    ("config", "words", "found"),
    [
        ({"trusted": []}, [], []),
        ({"trusted": ["trl"]}, [], ["trusted"]),
        ({"trusted": ["trl"]}, ["trusted=[trl]"], []),
        ({"trusted": ["trl", "sympy"]}, ["trusted=[trl]"], ["trusted"]),
        ({"trusted": ["trl"]}, ["+trusted_=[trl]", "a=trl"], ["trusted"]),
        ({"policy": {"trust_remote_code": False}, "reference": {"trust_remote_code": None}}, [], []),
        *(({"policy": {"trust_remote_code": one}}, [], ["policy.trust_remote_code"]) for one in (True, 1, "x", [], {})),
        ({"policy": {"trust_remote_code": True}}, ["policy.trust_remote_code=true"], []),
        ({"policy": {"trust_remote_code": True}}, ["++policy={trust_remote_code: true}"], []),
        (
            {"a": [{"trust_remote_code": True}], "policy": {"trust_remote_code": True}},
            ["policy.trust_remote_code=true"],
            ["a.0.trust_remote_code"],
        ),
        (  # a copy of what is given, and what looks like one
            {name: {"model": {"trust_remote_code": True, "path": name[:3]}} for name in ("reward", "other")}
            | {"rollout": {"reward": {"model": {"trust_remote_code": True, "path": "rew"}}}}
            | {"module": {"reward": {"model": {"trust_remote_code": True, "path": "else"}}}},
            ["reward.model.trust_remote_code=true"],
            ["other.model.trust_remote_code", "module.reward.model.trust_remote_code"],
        ),
    ],
)
def test_only_the_users_words_give_trust(config, words, found):
    assert [text.partition(" ")[0] for text in given.ungiven(config, words)] == found


@pytest.mark.parametrize(
    ("words", "key"),
    [
        pytest.param(words, key, marks=provocation(f"a settings file with `{' '.join(words)}`", REFUSED_IN_A_FILE))
        for words, key in (
            (["callbacks.export.directory=elsewhere"], "callbacks.export.directory=elsewhere"),
            (["callbacks.checkpoint.events_directory=.."], "callbacks.checkpoint.events_directory=.."),
            (["logger=mlflow", "logger.mlflow.directory=/tmp"], "logger.mlflow.directory=/tmp"),
            (
                ["logger=mlflow", "logger.mlflow.tracking_uri=mysql+mine://x"],
                "logger.mlflow.tracking_uri=mysql+mine://x",
            ),
            (["logger=mlflow", "+logger.mlflow.artifact_location=x"], "logger.mlflow.artifact_location=x"),
            *(
                (["logger=mlflow", f"logger.mlflow.tracking_uri={store}"], f"logger.mlflow.tracking_uri={store}")
                for store in ("sqlite:///bundle/x.db", "file:bundle/mlruns", "bundle/mlruns")
            ),
            (["logger=mlflow", "logger.mlflow.tracking_uri=null"], "logger.mlflow.tracking_uri=None"),
            (["logger=mlflow", "~logger.mlflow.tracking_uri"], "logger.mlflow.tracking_uri=None"),
            (
                ["+mine={_target_: mine.Callback, directory: x}", "+callbacks.mine=${mine}"],
                "callbacks.mine.directory=x",
            ),
            (["trainer.callbacks=[{_target_: mine.Callback, directory: x}]"], "trainer.callbacks.0.directory=x"),
            (["trainer.plugins=[{_target_: mine.Callback, directory: x}]"], "trainer.plugins.0.directory=x"),
            (
                [
                    "data=jsonl",
                    "data.path=x",
                    "+taught={_target_: mine.Callback, directory: x}",
                    "+callbacks.taught=${taught}",
                ],
                "callbacks.taught.directory=x",
            ),
            (
                [
                    *("data=jsonl", "data.path=x", "+taught={_target_: mine.Callback, directory: x}"),
                    "+callbacks.mine={_target_: mine.Late, taught: '${taught}'}",
                ],
                "callbacks.mine.taught.directory=x",
            ),
            (
                [
                    "+reward.own={_target_: mine.Callback, directory: x}",
                    "+callbacks.mine={_target_: mine.Late, validation: {reward: '${reward}'}}",
                ],
                "callbacks.mine.validation.reward.own.directory=x",
            ),
        )
    ],
)
@pytest.mark.grid
def test_only_the_user_names_places_outside_of_the_run_directory(words, key, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = composed("trusted=[]", "run_dir=runs/x", *words)
    assert given.ungiven(config, []) == [
        f"{key} stands in a file; allowed is to give it on the command line, or to compose"
    ]
    assert given.ungiven(config, words) == []
    monkeypatch.setenv("GRPO_LIGHTNING_GIVEN", "")
    start.note_words(words)
    assert given.ungiven(config) == []


@provocation(
    "a settings file with `callbacks.export.directory: ~/${hydra:run.dir}/model`, beside a stranger's folder `~`",
    REFUSED_IN_A_FILE,
)
def test_a_folder_called_as_the_home_directory_is_not_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "~/runs/x").mkdir(parents=True)
    node = {"_target_": "grpo_lightning.callbacks.export.Export", "directory": "~/runs/x/model"}
    assert len(given.ungiven({"run_dir": "runs/x", "callbacks": {"export": node}}, [])) == 1
    node = {"_target_": "grpo_lightning.reward.judge.chat.ChatJudge", "cache": "~/runs/x/judge.jsonl"}
    assert len(given.ungiven({"run_dir": "runs/x", "reward": {"judge": node}}, [])) == 1
    assert given.ungiven({"run_dir": "runs/x", "reward": {"judge": node | {"cache": "runs/x/judge.jsonl"}}}, []) == []


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("{a: 1, b: {c: [1, {d: 2}], e: f}, g: h}", {"a", "b", "b.c", "b.c.[].d", "b.e", "g"}),
        ("{a:1,b:{c:2}}", {"a", "b", "b.c"}),
        ("{a: \"x, {b: 1}, c: 2\", 'd': '}', \"e f\": 1}", {"a", "d", "e f"}),
        (r"{a: 'it\'s, b: 1', c: x\, d\: 2, e: \{}", {"a", "c", "e"}),
        ("choice({a: 1}, {b: '{c: 1}'})", {"a", "b"}),
        ("choice('{a: 1}',x)", set()),
        ("'{a: 1}'", set()),
        ("a: 1", set()),
        ("}}{a: 1", {"a"}),
        ("{a: ${b:c}, d: 1}", {"a", "a.b", "d"}),
    ],
)
def test_the_keys_of_a_mapping_on_the_command_line(value, keys):
    assert given._below(f"policy={value}") == keys


@provocation(
    "`policy={…}` with a pasted text in it that holds `, trust_remote_code: none`, and a settings file that says it",
    "refused by its key",
)
def test_words_of_a_text_say_nothing():
    config = composed("trusted=[]", "run_dir=runs/x", *CODE)
    text = "Answer in JSON with the keys answer, trust_remote_code: none, {trust_remote_code: x}"
    for quote in "\"'":
        word = f"policy={{path: ./theirs, system_prompt: {quote}{text}{quote}}}"
        assert any(one.startswith("policy.trust_remote_code ") for one in given.ungiven(config, [word]))
    assert given.ungiven(config, ["policy={path: ./theirs, trust_remote_code: true, system_prompt: 'x'}"]) == []


CODE = ("policy=hf", "policy.trust_remote_code=true", "policy.path=./theirs")
IN_A_FILE = "policy.trust_remote_code stands in a file; allowed is to give it on the command line"


@provocation(
    "`--config-dir theirs policy.trust_remote_code=true policy.path=mine`, whose file may have `policy.path` or for "
    "attention a kernel of the hub, `policy.attn_implementation: theirs/kernel`; or `=false`, and it says true",
    "refused by its key; with `trusted_settings=true` allowed",
)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (CODE, "policy.trust_remote_code=True: this code may be given what settings of theirs say"),
        ((*CODE[:2], "policy.path=${theirs}"), "policy.trust_remote_code=True: this code may be given what settings"),
        (("policy=hf", "policy.trust_remote_code=false", "policy.path=./theirs"), IN_A_FILE),
        (("policy=hf", "policy.trust_remote_code=${theirs}", "policy.path=./theirs"), IN_A_FILE),
    ],
)
def test_trust_in_a_models_code_is_none_in_brought_settings(words, told, monkeypatch):
    config = composed("trusted=[]", "run_dir=runs/x", *CODE)
    monkeypatch.setenv("GRPO_LIGHTNING_SETTINGS_FROM", '["theirs"]')
    (own,) = [one for one in given.ungiven(config, words) if not one.startswith("module.")]
    assert own.startswith(told)
    monkeypatch.setenv("GRPO_LIGHTNING_SETTINGS_FROM", "")
    alone = [one.partition(" ")[0] for one in given.ungiven(config, words) if not one.startswith("module.")]
    assert alone == (["policy.trust_remote_code"] if "policy.trust_remote_code=false" in words else [])


@pytest.mark.parametrize("store", ["http://localhost:5000", "sqlite:///mlflow.db"])
def test_a_settings_file_may_name_mlflows_usual_file_and_a_server_of_this_machine(store):
    assert (
        given.ungiven(
            composed("trusted=[]", "run_dir=runs/x", "logger=mlflow", f"logger.mlflow.tracking_uri={store}"), []
        )
        == []
    )


def test_the_environment_is_the_users(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://host/db")
    assert given.ungiven(composed("trusted=[]", "run_dir=runs/x", "logger=mlflow"), []) == []


@provocation(
    "a settings file that names `sampler.url`, to which weights and the key in `VLLM_API_KEY` would be sent",
    REFUSED_IN_A_FILE,
)
def test_where_weights_are_sent_only_the_command_line_says(monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_GIVEN", "")
    words = ["sampler=vllm_server", "sampler.url=http://elsewhere:1", "sampler.directory=/shared"]
    config = {"sampler": composed(*words)["sampler"]}
    told = [text.partition("=")[0] for text in given.ungiven(config, ["sampler=vllm_server"])]
    assert told == ["sampler.url", "sampler.directory"]
    assert given.ungiven(config, words) == []
    start.note_words(words)
    assert given.ungiven(config) == []
    assert given.ungiven(config, ["sampler={url: http://elsewhere:1, directory: /shared}"]) == []
    odd = {"sampler": config["sampler"] | {"directory": "http://127.0.0.1:8000"}}
    assert len(given.ungiven(odd, words[:2])) == 1
    local = {"sampler": config["sampler"] | {"url": "http://127.0.0.1:8000"}}
    assert given.ungiven(local, words[2:]) == []
