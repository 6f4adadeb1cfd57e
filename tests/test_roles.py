"""Every part stands in its own place in the settings, and only functions that are meant for it are called later."""

from functools import partial
from pathlib import PurePath
from typing import Any

import pytest

from grpo_lightning.environment import Environment, EpisodeError
from grpo_lightning.environment import check_columns as check_environment
from grpo_lightning.environment.call import taken
from grpo_lightning.reward.engine.scoring import check_columns as check_rewards
from grpo_lightning.reward.engine.weighted import PerCompletion, RewardError, Weighted, arguments
from grpo_lightning.reward.length import length
from grpo_lightning.settings.allowlist import CALLED, LIBRARIES, OWN, PLACES
from grpo_lightning.settings.roles import part_of, role_problems
from tests.support.composed import composed
from tests.support.provocations import provocation
from tests.test_settings import problems

LOAD = "grpo_lightning.policy.hf.load"


@provocation(
    "a part of this package in the place of another, such as what loads a policy as a reward, which is called with the "
    "columns of a data set",
    "refused by its key",
)
@pytest.mark.parametrize(
    "key, words",
    [
        ("reward.format.function", []),
        ("environment.function", ["environment=guess"]),
        ("rollout.reward.format.function", []),
        ("validation.environment", ["validation.environment={}"]),
        ("module.rollout.environment.function", ["environment=guess"]),
        ("data.filter", ["data=jsonl", "data.path=x"]),
        ("callbacks.progress", []),
        ("trainer.callbacks", ["trainer.callbacks=[]"]),
    ],
)
@pytest.mark.parametrize("partial", [True, False])
def test_what_loads_a_policy_is_nothing_else(key, words, partial):
    config = composed(*words)
    *above, last = key.split(".")
    node = config
    for part in above:
        node = node[part]
    node[last] = {"_target_": LOAD, "_partial_": partial, "path": "x"}
    assert list(role_problems(config)) == [f"{key}._target_={LOAD}: allowed below policy"]


@provocation(
    "`_partial_: true` for what is made once, such as `reward.model.RewardModel` or `environment.gymnasium.Gymnasium`: "
    "columns of a data set would be its arguments",
    "refused by its key",
)
@pytest.mark.parametrize(
    "key, target",
    [
        ("reward.format.function", "grpo_lightning.reward.model.RewardModel"),
        ("reward.format.function", "grpo_lightning.reward.judge.ChatJudge"),
        ("reward.format.function", "grpo_lightning.reward.Weighted"),
        ("environment.function", "grpo_lightning.environment.gymnasium.Gymnasium"),
        ("environment.function", "grpo_lightning.environment.tools.Tools"),
        ("data.filter", "grpo_lightning.data.hub.prompts"),
        ("callbacks.a", "lightning.pytorch.callbacks.ModelCheckpoint"),
        ("logger.a", "lightning.pytorch.loggers.CSVLogger"),
    ],
)
def test_what_is_made_once_is_not_called_with_columns(key, target):
    config = {key.partition(".")[0]: {}}
    node = config[key.partition(".")[0]]
    for part in key.split(".")[1:-1]:
        node = node.setdefault(part, {})
    node[key.rpartition(".")[2]] = {"_target_": target, "_partial_": True}
    assert list(role_problems(config)) == [
        f"{key}._partial_=true: allowed for {target} is false, as it is made once, with arguments of the settings"
    ]


@provocation(
    "`policy.template_kwargs={x: {_target_: …}}`: an object that the chat template of a stranger's model could call",
    "refused by its key",
)
@pytest.mark.parametrize("place", ["policy", "reference", "module.policy"])
def test_a_chat_template_is_given_values(place):
    config = {}
    node = config
    for part in place.split("."):
        node = node.setdefault(part, {})
    target, told = "grpo_lightning.policy.scratch.character_llama", "allowed are plain values, which a chat template"
    part = "grpo_lightning.composition.part"  # an object of a program, which a file may name
    for where, named, given in (
        (".a.b.0", target, {"a": {"b": [{"_target_": target}]}}),
        ("", target, {"_target_": target, "a": 1}),
        (".m", part, {"m": {"_target_": part, "name": "policy.model"}}),
    ):
        node["template_kwargs"] = given
        [problem] = role_problems(config)
        assert problem.startswith(f"{place}.template_kwargs{where}._target_={named}: {told}")


@pytest.mark.parametrize(
    "words",
    [
        ["+x={_target_: grpo_lightning.policy.hf.load, path: y}"],  # nothing is built of it here
        ["reward.format.weight={_target_: grpo_lightning.varying.Linear, start: 1.0, end: 0.5, steps: 5}"],
        ["loss=cispo", "correction=token_mask", "optimizer=adamw_8bit"],
        ["environment=retry", "environment.max_turns=2", "reference=adapter_off"],
        ["+trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler}"],
        ["+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1}"],
    ],
)
def test_parts_in_their_places_are_allowed(words):
    assert list(role_problems(composed(*words))) == []


def test_a_reference_to_another_place_counts_where_it_is_built():
    """Under the name of a setting at the top, too, of which copies are not looked at again."""
    found = problems(
        "+function={_target_: grpo_lightning.policy.hf.load, path: y, _partial_: true}",
        "reward.format.function=${function}",
    )
    assert f"reward.format.function._target_={LOAD}: allowed below policy" in found


def test_places_are_found_in_copies():
    assert part_of("module.rollout.reward.format.function") == "reward"
    assert part_of("rollout.group_filter") == "rollout"
    assert part_of("reward.policy.function") == "reward"
    assert part_of("trainer.callbacks.0") == "callbacks"
    assert part_of("reward") == "reward"


def test_what_may_be_named_has_a_place():
    anywhere = ("composition.part", *(name for name in OWN if name.startswith("varying.")))
    for name in (*(f"grpo_lightning.{one}" for one in OWN if one not in anywhere), *LIBRARIES):
        assert any(name == place or name.startswith(f"{place}.") for place in PLACES), name
    for name in CALLED:
        assert any(name == place or name.startswith(f"{place}.") for place in PLACES), name


def test_columns_are_no_settings_of_functions_of_this_package():
    def mine(completions, *, target):
        return [float(target[0])]

    known = {"completions": ["a"], "target": [7]}
    assert arguments(length, known) == (["target"], {"completions": ["a"]})
    assert arguments(mine, known) == ([], known)


@provocation(
    "a data set with a column `filename`, where a reward or environment of the user's own has an argument "
    "`filename='scores.txt'` or `filename=None`",
    "refused before the run, unless the setting says the argument; other optional arguments come from columns",
)
@pytest.mark.parametrize("name", ["filename", "file", "path", "out", "csvfile", "fname", "logname", "folder"])
def test_a_column_is_no_file_of_the_users(name):
    space: dict[str, Any] = {"__name__": "mine", "PurePath": PurePath}
    exec(f"def mine(completions, {name}='scores.txt', text='x', profile='y'): return {name}", space)
    exec(f"def placed(completions, {name}=PurePath('scores.txt')): return {name}", space)
    exec(f"def looks(completions, {name}=None): return {name}", space)
    known = {"completions": ["a"], name: ["../.bashrc"], "text": ["b"], "profile": ["c"]}
    assert arguments(space["mine"], known)[1] == {"completions": ["a"], "text": ["b"], "profile": ["c"]}
    assert arguments(space["placed"], known)[1] == {"completions": ["a"]}
    assert arguments(space["looks"], known)[1] == {"completions": ["a"]}
    told = f"parameter '{name}' may say where something is written, and the data have such a column; allowed is "
    for function in (space["mine"], space["placed"], space["looks"]):
        with pytest.raises(
            RewardError, match=f"{told}reward.mine.function.{name}=VALUE or, for the column, no default"
        ):
            check_rewards({"mine": Weighted(function, 1.0)}, [name])
        with pytest.raises(
            EpisodeError, match=f"{told}environment.function.{name}=VALUE or, for the column, no default"
        ):
            check_environment(Environment(function, 4), ["completions", name])
        own = partial(function, **{name: "scores.txt"})
        check_rewards({"mine": Weighted(own, 1.0)}, [name])
        check_environment(Environment(own, 4), ["completions", name])


@provocation(
    "a data set with a column `cache`, `directory`, `dirpath`, `log_dir`, `save_dir`, `log_file` and the like, where "
    "a reward or environment "
    "of the user's own has such an argument with a default, or hands on all that it is given",
    "the default holds",
)
@pytest.mark.parametrize(
    "name", ["directory", "events_directory", "dirpath", "log_dir", "save_dir", "cache", "log_file", "savePath"]
)
def test_columns_say_not_where_something_is_written(name):
    space: dict[str, Any] = {"__name__": "mine"}
    exec(f"def mine(completions, answer=None, {name}='scored', **more): return {name}", space)
    exec(f"def asks(completions, {name}): return {name}", space)
    exec(f"def each(completion, {name}='scored'): return {name}", space)
    exec("def hands_on(completions, **more): return mine(completions=completions, **more)", space)
    known = {"completions": ["a"], "answer": ["b"], name: ["../.bashrc.d"], "other": [1]}
    assert arguments(space["hands_on"], known) == arguments(space["mine"], known)
    assert taken(space["hands_on"], ["completions", name]) == ([], ["completions"])
    assert arguments(space["mine"], known) == ([], {"completions": ["a"], "answer": ["b"], "other": [1]})
    assert arguments(space["asks"], known) == ([], {"completions": ["a"], name: ["../.bashrc.d"]})
    assert arguments(PerCompletion(space["each"]), known) == ([], {"completions": ["a"]})
    assert PerCompletion(space["each"])(completions=["a"], **{name: ["../x"]}) == ["scored"]
    assert taken(space["mine"], ["completions", name]) == ([], ["completions"])
