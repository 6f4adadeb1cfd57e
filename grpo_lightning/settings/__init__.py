"""Settings are checked as a whole, before any weights load: every mistake is reported at once, by its key.

Hydra catches keys that do not exist; what it lets through is caught here: values of a wrong type or out of range,
arguments that a target does not take, targets outside the trusted packages, and settings that contradict one another.

Nothing heavy is imported for it, so that a wrong value is answered at once: signatures are read from source. What that
cannot tell, `built.check_built` finds out once torch is there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.output.redaction import hide
from grpo_lightning.output.shell import hydra_text, typed_key
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import trust
from grpo_lightning.settings.contradictions import CONTRADICTIONS, Unsound, lookup, reader
from grpo_lightning.settings.engines import engine_problems
from grpo_lightning.settings.episodes import episode_problems
from grpo_lightning.settings.given import is_said
from grpo_lightning.settings.loggers import logger_problems
from grpo_lightning.settings.metrics import sweep_metric_problems
from grpo_lightning.settings.places import place_problems
from grpo_lightning.settings.reach import reach_problems
from grpo_lightning.settings.recorded import recorded_problems
from grpo_lightning.settings.rewards import reward_problems
from grpo_lightning.settings.roles import role_problems
from grpo_lightning.settings.suggestions import unknown_key
from grpo_lightning.settings.targets import adapter_problems, target_problems
from grpo_lightning.settings.trainer import trainer_problems
from grpo_lightning.settings.values import MAY_VARY, VARYING, rules_of
from grpo_lightning.settings.walk import BUILT, PARTS, each_target, leaves
from grpo_lightning.start import settings_from

SMALL_GROUP = 4
"""Groups with fewer completions are warned about: at a success rate of .18, 70 % of groups of 2 are all wrong or all
right, 45 % of groups of 4 and 20 % of groups of 8."""


class ConfigError(ValueError):
    """Settings that cannot work; the message lists everything that is wrong with them, by key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(hide(one_line(problem)) for problem in problems)
        super().__init__("the settings cannot work:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def check(config: Mapping[str, Any]) -> None:
    """Check the resolved settings of a run.

    Raises:
        ConfigError: Something is wrong with them; the error lists everything that is.
    """
    named_so = {f"{key}._target_": node["_target_"] for key, node in each_target(config)}
    if odd := {key: name for key, name in named_so.items() if not isinstance(name, str)}:
        raise ConfigError([f"{typed_key(key)}={name}: allowed is a text, a dotted name" for key, name in odd.items()])
    rewards = config.get("reward")
    if plain := {name: one for name, one in (rewards or {}).items() if not isinstance(one, Mapping)}:
        told = "allowed are the settings of a reward, such as its weight: reward.NAME.weight=1.0"
        raise ConfigError(
            [f"{typed_key(f'reward.{name}')}={one_line(str(one))}: {told}" for name, one in plain.items()]
        )
    values = dict(_values(config))
    contradictions = []
    apart = (trainer_problems, sweep_metric_problems, recorded_problems, engine_problems, episode_problems)
    for rule in (*CONTRADICTIONS, *apart):
        try:
            contradictions += rule(reader(config, values.keys()))
        except Unsound:
            continue  # what it would compare is broken or absent, and reported if broken
    _, trusted = trust.packages(config)
    named = [problem for key, node in each_target(config) for problem in target_problems(node, key, trusted)]
    tried = [problem for key, node in each_target(config) for problem in reward_problems(node, key)]
    adapted = adapter_problems(config.get("policy") or {})
    if problems := [
        *_unknown(config),
        *_unbuilt(config),
        *values.values(),
        *trust.problems(config),
        *role_problems(config),
        *named,
        *tried,
        *adapted,
        *contradictions,
        *logger_problems(config),
        *reach_problems(config),
        *place_problems(config),
    ]:
        raise ConfigError(problems)


def arithmetic(config: Mapping[str, Any]) -> str:
    """How many completions and optimizer steps the settings amount to, in words."""
    steps, prompts = config["steps"], config["data"]["prompts_per_step"]
    if "rollout" not in config["module"]:
        return f"{prompts} demonstrations per step, {steps} steps"
    group = config["rollout"]["group_size"]
    completions, trained, updates = prompts * group, _trained(config), _updates(config)
    return (
        f"{prompts} prompts x {group} completions = {completions} completions per rollout"
        f"{f', of which {trained} are trained on' * (trained != completions)}; "
        f"{updates} optimizer step{'s' * (updates > 1)} per rollout; "
        f"{steps} rollouts = {steps * completions} completions, {steps * updates} optimizer steps in total"
    )


def _trained(config: Mapping[str, Any]) -> int:
    """Completions of a rollout that are trained on."""
    rollout = config["rollout"]
    size: int = config["data"]["prompts_per_step"] * (
        (rollout["downsample"] or {}).get("size") or rollout["group_size"]
    )
    return size


def _updates(config: Mapping[str, Any]) -> int:
    """Optimizer steps per rollout."""
    trained, module = _trained(config), config["module"]
    count: int = module["ppo_epochs"] * (trained // (module["minibatch_size"] or trained))
    return count


def cautions(config: Mapping[str, Any]) -> list[str]:
    """Warnings about settings that work and are probably not meant."""
    warnings: list[str] = []
    if "rollout" not in config.get("module", {}):
        return warnings
    sizes = [size for _, size in _varied("rollout.group_size", lookup(config, "rollout.group_size"))]
    if any(isinstance(size, int) and size < SMALL_GROUP for size in sizes):
        warnings.append(
            f"rollout.group_size={min(sizes)}: the mean of so few completions is a noisy baseline, and most groups are "
            f"all right or all wrong; {SMALL_GROUP} or more compare better, 8 to 16 are usual"
        )
    kind = str(lookup(config, "correction._target_")).rpartition(".")[2]
    if kind.endswith("_truncation") and _updates(config) > 1:
        warnings.append(
            f"correction={kind} has no effect with several optimizer steps per rollout, where the ratio of the loss is "
            "to the sampler already; a mask has, and so has one step: module.ppo_epochs=1 module.minibatch_size=null"
        )
    return warnings


TOP = (
    *(
        "mode",
        "steps",
        "seed",
        "checkpoint",
        "sweep_metric",
        "run_dir",
        "trusted",
        "trusted_settings",
        "requeue",
        "print_settings",
        "preflight",
        "algorithm",
        "experiment",
        "sweep",
        "debug",
        "task_name",
        "tags",
    ),
    *PARTS,
)
"""The parts and the settings that belong to none."""


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings that were added at the top, have no effect there, and are called much like others or as elsewhere.

    Those that only the user may say are not offered with the value that a stranger has given.
    """
    for key, value in config.items():
        is_brought = settings_from() and not is_said(str(key))
        known = [name for name in TOP if not (is_brought and name in ("trusted", "trusted_settings", "run_dir"))]
        if key not in TOP and (said := unknown_key(typed_key(key), hydra_text(str(value)), known)):
            yield one_line(said)


def _unbuilt(config: Mapping[str, Any]) -> Iterator[str]:
    """Parts of which nothing says what they are, as where a file of one's own begins with no other."""
    for part in BUILT:
        node = config.get(part)
        if isinstance(node, Mapping) and "_target_" not in node:
            yield (
                f"{part}: no _target_ says what it is; allowed is a file of conf/{part}, or one of your own that "
                "begins with 'defaults: [NAME]', the name of one of these"
            )


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every value that breaks its rule or is not finite, as pairs of its key and what is wrong."""
    rules = rules_of(config)
    for key, rule in rules.items():
        value = lookup(config, key)
        for name, one in _varied(key, value):
            if one is not KeyError and (problem := rule.problem(name, one)):
                yield key, one_line(problem)
    for key, value in leaves(config, config):
        is_ruled = key in rules or key.rpartition(".")[0] in rules
        if not is_ruled and isinstance(value, float) and not math.isfinite(value):
            yield key, f"{key}={value}: allowed is a finite number"


def _varied(key: str, value: Any) -> list[tuple[str, Any]]:
    """Every value that a number may have during the run, one unless it varies, as pairs of key and value."""
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not (key.startswith(MAY_VARY) and isinstance(target, str) and target.startswith(VARYING)):
        return [(key, value)]
    several = value.get("values")
    named = {f"{key}.{name}": value[name] for name in ("start", "end", "lowest", "highest") if name in value}
    listed = {f"{key}.values.{i}": one for i, one in enumerate(several)} if isinstance(several, list) else {}
    return list({**named, **listed}.items())
