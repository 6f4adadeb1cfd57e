"""What is said to somebody who mistyped a key or a choice, or used another project's name for it."""

import json
import re
import shlex

import pytest
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

import grpo_lightning as grpo
from grpo_lightning import start
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.output.shell import program
from grpo_lightning.settings import ConfigError, check
from grpo_lightning.settings.contradictions import lookup
from grpo_lightning.settings.names import SAME, SIMILAR, translated
from grpo_lightning.settings.suggestions import _no_choice, explain, known_keys, nearest, nearest_key
from grpo_lightning.settings.values import RULES
from tests.support.composed import CONF, ROOT, composed
from tests.support.provocations import provocation

NEAREST = "one sentence that names the nearest"
OURS = "answered with this project's name"
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")


def explained(override: str) -> str:
    with pytest.raises((HydraException, OmegaConfBaseException)) as error:
        composed(override)
    return explain(error.value, CONF, words=[override])


@provocation(
    "a file of one's own for a part, such as `loss/mine.yaml`, that says not what it is", "told what brings it"
)
@pytest.mark.slow
def test_a_file_for_a_part_says_what_it_is(tmp_path):
    files = {
        "loss": "kl_coef: 0.1",
        "policy": "path: a",
        "optimizer": "lr: 1",
        "schedule": "a: 1",
        "reward": "mine: {a: 1}",
    }
    for part, line in files.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "mine.yaml").write_text(f"{line}\n")
        with pytest.raises(ConfigError) as error:
            check(composed(f"hydra.searchpath=[{tmp_path}]", f"{part}=mine"))
        told = f"{part}: no _target_ says what it is; allowed is a file of conf/{part}, or one of your own that begins "
        if part == "reward":
            told = "reward.mine: no such reward was chosen; allowed is 'reward=[mine]', and a file of your own for it "
            told += "that begins with 'defaults: [base@mine]'"
        assert any(one.startswith(told) for one in error.value.problems), error.value.problems
    (tmp_path / "loss" / "whole.yaml").write_text("defaults: [dapo]\nkl_coef: 0.1\n")
    check(composed(f"hydra.searchpath=[{tmp_path}]", "loss=whole"))


@provocation("an experiment of one's own without `# @package _global_` in its first line", "the line is named")
def test_a_file_whose_settings_nothing_reads_is_refused(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("steps: 5\n")
    with pytest.raises(ConfigCompositionException) as error:
        grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    assert str(error.value).splitlines()[1:] == [
        "  experiment/mine.yaml: nothing reads the settings below experiment; allowed is a file whose first line is "
        "'# @package _global_'",
        "  experiment/mine.yaml: experiment.steps=5 stands in a file that the command brings along; allowed there are "
        "choices, numbers, switches and some texts; anything else on the command line, where trusted_settings=true "
        "says that you know the file",
    ]


@provocation("`- /size: ???` or `- override /policy: ???` among a file's defaults", "the choices, in one sentence")
def test_a_choice_that_a_file_leaves_open_is_told(tmp_path):
    for name in ("experiment/mine", "size/small", "size/big"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text("a: 1\n")
    told = "a file leaves this choice open; allowed is one of"
    for line, open_one in (
        ("/size: ???", f"size: {told} big, small, on the command line"),
        ("override /loss: ???", f"loss: {told} LOSSES, on the command line"),  # of which base is none
        ('"/model;{touch,x};#\\n@_global_": ???', f"model…touch…x…_global_: {told} none, on the command line"),
        ('"/model;{touch,x};#@_global_": ???', f"model…touch…x…_global_: {told} none, on the command line"),
    ):
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n  - {line}\n")
        with pytest.raises(ConfigCompositionException) as error:
            grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
        losses = sorted(path.stem for path in (CONF / "loss").glob("[!b]*.yaml"))
        assert str(error.value) == open_one.replace("LOSSES", ", ".join(losses))


@provocation("`loss: dapo` in an experiment of one's own", "refused: the file is named, and the line that chooses")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("loss: dapo", "loss=dapo"),
        ("reward: [accuracy, format]", "'reward=[accuracy,format]'"),
        ("schedule: null", "schedule=None"),
        ("policy: ${x}", "'policy=\"$…{x}\"'"),
        ("algorithm: dapo", "algorithm=dapo"),
        ("experiment: open_r1", "experiment=open_r1"),
    ],
)
def test_a_file_chooses_among_its_defaults(line, told, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{line}\n")
    part = line.partition(":")[0]
    with pytest.raises(ConfigCompositionException) as error:
        grpo.compose(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    found = str(error.value).splitlines()[1]
    below = "" if part in ("algorithm", "experiment") else f", or settings below {part}"
    assert found.startswith(f"  experiment/mine.yaml: {told}")
    assert found.endswith(
        f" chooses nothing in a file; allowed is a line '- override /{part}: NAME' among its defaults{below}"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(override, message, id=override, marks=provocation(override, what))
        for what, override, message in [
            (NEAREST, "reward=[accuracy,formt]", "reward=[…,formt]: allowed is one of accuracy, code, cosine_length,"),
            (NEAREST, "algorithm=gpro", "algorithm=gpro: allowed is one of cispo, dapo, dr_grpo,"),
            (NEAREST, "stepps=3", "stepps=3: unknown; the nearest is steps=3"),
            (NEAREST, "algoritm=dapo", "algoritm=dapo: unknown; the nearest is algorithm=dapo, a part"),
            (NEAREST, "rollout.groupsize=3", "rollout.groupsize=3: unknown; the nearest is rollout.group_size=3"),
            (NEAREST, "reward.accuracy.wieght=2", "unknown; the nearest is reward.accuracy.weight=2"),
            (
                "the choices that have it",
                "environment.max_turns=3",
                "environment.max_turns=3: allowed with environment=",
            ),
            (
                "the choices that have it",
                "sampler.url=http://x",
                "sampler.url=http://x: allowed with sampler=vllm_server, which is not chosen",
            ),
            (
                "the setting that has it",
                "data=my.jsonl",
                "data=my.jsonl: allowed is data=jsonl data.path=my.jsonl for a",
            ),
            (
                "the setting that has it",
                "data=openai/math",
                "data=openai/math: allowed is data=hub data.path=openai/math",
            ),
            ("the setting that has it", "data=mine.csv", "data=mine.csv: allowed is data=hub data.path=mine.csv for a"),
            (NEAREST, "data=gms8k", "data=gms8k: allowed is one of calculator, demonstrations, gsm8k,"),
            (
                "the setting that has it",
                "reward=my_rewards.short",
                "reward=[…,my_rewards.short]: allowed is custom in place of it, with "
                "reward.custom.function._target_=my_rewards.short, for a function of your own",
            ),
            (
                "the setting that has it",
                "reward=[accuracy,my.own.short]",
                "allowed is custom in place of it, with reward.custom.function._target_=my.own.short, for",
            ),
            (OURS, "resume=last", "resume=last: allowed here is checkpoint, a path or last"),
            (OURS, "epochs=3", "epochs=3: allowed here is steps, which counts rollouts"),
            (NEAREST, "lr=3e-5", "lr=3e-5: unknown; the nearest is optimizer.lr=3e-5"),
            (NEAREST, "~stepss", "~stepss: there is no such setting; the nearest is ~steps"),
            (NEAREST, "hydra.run.dri=x", "hydra.run.dri=x: unknown; the nearest is hydra.run.dir=x"),
            (
                OURS,
                "num_generations=8",
                "num_generations=8: allowed here is rollout.group_size=8, as this project calls",
            ),
            (OURS, "beta=0.1", "beta=0.1: allowed here is loss.kl_coef=0.1, as this project calls it"),
            (OURS, "learning_rate=1e-5", "learning_rate=1e-5: allowed here is optimizer.lr=1e-5, as this project"),
            (OURS, "max_completion_length=64", "allowed here is rollout.max_new_tokens=64, as this project calls it"),
            (OURS, "rollout.max_completion_length=64", "allowed here is rollout.max_new_tokens=64, as this project"),
            (OURS, "per_device_train_batch_size=8", "allowed here is data.prompts_per_step for a rollout, module.mini"),
            (OURS, "actor_rollout_ref.rollout.n=8", "allowed here is rollout.group_size=8, as this project calls it"),
            (OURS, "data.train_batch_size=8", "allowed here is data.prompts_per_step=8, as this project calls it"),
            (
                "one sentence",
                "reward.exact.weight=1",
                "the reward exact is not chosen; allowed is reward=[…,exact] with",
            ),
            (
                "one sentence",
                "policy=Qwen/Qwen3-0.6B",
                "allowed is policy=hf policy.path=Qwen/Qwen3-0.6B for a model of",
            ),
            ("one sentence", "policy=hf", "policy.path: a value is missing; allowed is policy.path=VALUE"),
            (
                "one sentence",
                "+loss.kl_coef=1",
                "+loss.kl_coef: it is there already; allowed is loss.kl_coef=VALUE, wit",
            ),
            ("one sentence", "+policy=hf", "+policy: one is chosen already; allowed is policy=NAME, without the plus"),
            (
                "one sentence",
                "reward=accuracy,format",
                "allowed is reward=[accuracy,format] for several together, or -m",
            ),
            ("one sentence", "steps", "steps: allowed is KEY=VALUE"),
            ("one sentence", "--lr=3", "--lr=3: allowed is lr=3, without dashes"),
            ("one sentence", "reward.format.only_if=format > 0", "allowed with spaces, commas, brackets, quotes or ="),
            ("one sentence", "steps=${nope}", "data.steps: Interpolation key 'nope' not found"),
            (
                "one sentence",
                "a=1",
                f"a=1: unknown; allowed are the keys that `{program()} --cfg job` prints, and +a",
            ),
            ("one sentence", "hydra.sweeper.params=x", "override hydra.sweeper.params=x; Cannot assign str to Dict"),
        ]
    ],
)
@pytest.mark.grid
def test_an_override_that_cannot_be_applied_is_explained(override, message):
    said = explained(override)
    assert message in said
    assert "\n" not in said
    assert "hydra.cc" not in said
    assert "Traceback" not in said


def test_the_nearest_choice_is_at_the_end():
    assert explained("reward=[accuracy,formt]").endswith("; the nearest is format")
    assert explained("algorithm=gpro").endswith("; the nearest is grpo")
    assert explained("trainer=quantum").endswith("auto, cpu, ddp, fsdp, gpu")


@provocation(
    "settings of a stranger's with names and values of a shell's, which a message repeats in what it says is allowed",
    "a shell reads them as one word",
)
@pytest.mark.parametrize("before", ["stepps=", "algoritm=", "num_generations=", "a="])
def test_what_is_offered_is_a_word_to_a_shell(before):
    said = explained(f"{before}'$(touch x)'")
    key = {"stepps=": "steps=", "algoritm=": "algorithm=", "num_generations=": "rollout.group_size="}.get(before, "+a=")
    assert " " + shlex.quote(f"{key}'$(touch x)'") in said.replace(f"{before}'$(touch x)'", "", 1)


def test_a_model_that_is_offered_is_a_word_to_a_shell():
    assert " policy=hf 'policy.path=\"a/$(touch x)\"' for " in _no_choice(
        "policy/a/$(touch x)", CONF, ["policy=a/$(touch x)"]
    )


def test_a_model_that_a_file_chooses_is_not_offered():
    """The user may trust the code of the model that he names himself."""
    assert "policy.path" not in _no_choice("policy/theirs/model", CONF, ["policy.path=./mine"])


def test_control_characters_of_an_override_stay_in_it():
    said = explained("trainer='\x1b[2Jx'")
    assert "\x1b" not in said
    assert "\\x1b[2Jx" in said


@provocation(
    "`python -m grpo_lightning.replay theirs`, a stranger's run directory with a mistyped override whose value is a "
    "mapping that says what the user's reward is given",
    "refused, and not offered with another key: it would count as the user's word",
)
@pytest.mark.parametrize(
    "word",
    ["reward.rewar={custom: {function: {log_file: /x}}}", "rollout.group_siz=4`touch x`", "+rollout.group_size=`x`"],
)
def test_overrides_of_a_run_are_not_offered(word, tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps([word]))
    with pytest.raises(ConfigError) as caught:
        recalled(tmp_path, ["steps=1"], ["reward"])
    start.forget_settings_from()
    assert "nearest" not in str(caught.value)
    assert word.lstrip("+").partition("=")[0] in str(caught.value)
    assert "allowed is" not in str(caught.value)
    assert " use +" not in str(caught.value)


@pytest.mark.slow
def test_keys_are_those_of_the_files_unless_they_are_given():
    known = known_keys(CONF)
    assert {key for key in RULES if lookup(composed(), key) is not KeyError} <= known
    assert {"reward.pattern.function.expression", "callbacks.reference.alpha", "rollout.downsample.size"} <= known
    assert not {key for key in known if key.startswith(("hydra", "defaults")) or "_target_" in key}
    with pytest.raises(HydraException) as error:
        composed("my.own.kee=3")
    said = explain(error.value, CONF, ["my.own.key"], ["my.own.kee=3"])
    assert said == "my.own.kee=3: unknown; the nearest is my.own.key=3"


@pytest.mark.parametrize(
    "text",
    [
        "An item is already at 'seed`touch x`'",
        "Multiple values for reward. To append",
        "Could not delete from config. 'rollout.grp'",
        "Could not override 'rollout.grp'.\nTo append to your config use +rollout.grp={a: $(touch x)}",
        "Ambiguous value for argument 'reward=$(touch x)'",
        "Cannot.\nEither remove + prefix: 'seed=`touch x`'\nOr add a second + to add or override: '++seed=`touch x`'",
        "No match.\nTo append to your default list use +schedule@foo=`touch x`",
        "Error parsing override 'seed;touch x=1'",
    ],
)
def test_only_what_the_user_has_said_becomes_an_offer(text):
    told = explain(ConfigCompositionException(text), CONF, words=["steps=1", "seed=2"])
    assert "allowed" not in told
    assert "nearest" not in told
    assert "touch x" not in told or text.startswith(("An item", "Ambiguous", "Error"))  # which offer nothing
    said = explain(OverrideParseException("seed;touch x=1", "no rule"), CONF, words=["steps=1"])
    assert "allowed" not in said
    said = explain(ConfigCompositionException("An item is already at 'seed'"), CONF, words=["+seed=2"])
    assert said == "+seed: it is there already; allowed is seed=VALUE, without the plus sign"


def test_the_nearest_word():
    assert nearest("gpro", ["gspo", "grpo"]) == "grpo"  # the same letters
    assert nearest("xyz", ["gspo", "grpo"]) is None
    assert nearest_key("loss.kl_coeff", {"loss.kl_coef", "module.kl_coeff"}) == "loss.kl_coef"  # beside it first
    assert nearest_key("kl_coeff", {"loss.kl_coef", "steps"}) == "loss.kl_coef"
    assert nearest_key("policy.tiny", {"policy.dtype"}) is None


def cells(number: int) -> list[str]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return [row[number] for row in rows if len(row) == 3]


VALUES = {
    *("grpo", "dapo", "dr_grpo", "k1", "k2", "k3", "k3_weighted", "kl", "mse", "low_var_kl", "seq-mean-token-mean"),
    *("token-mean", "seq-mean-token-sum-norm", "constant_with_warmup", "linear", "cosine", "constant", "gdpo", "rloo"),
    *("devices", "GRPOTrainer", "RLOOTrainer"),
}
"""Words of the page that are no names of settings."""
SHORTENED = {"top_p", "top_k", "name", "clip_ratio_high", "adv_estimator", "dual_clip"}
"""Names behind others whose beginning they share."""
EQUAL = {"rollout.temperature", "data.max_prompt_length"}
"""Names that are those of this project."""


def test_names_of_others_are_those_of_the_page():
    words = {word for cell in cells(1) + cells(2) for word in re.findall(r"`([^`]+)`", cell)}
    names = {part.split("=")[0] for word in words for part in re.split(r" \W ", word)} - VALUES - SHORTENED - EQUAL
    assert [name for name in sorted(names) if not translated(name)] == []
    assert len(names) > 60


def test_what_others_are_told_to_use_exists():
    for theirs, key in SAME.items():
        assert key in known_keys(CONF), theirs
        assert f"`{key}`" in SETTINGS or key == "loss.surrogate.dual_clip", theirs
    assert not SAME.keys() & SIMILAR.keys()
    assert translated("num_generations") == "allowed here is rollout.group_size, as this project calls it"
    assert translated("no_such_setting") is None
