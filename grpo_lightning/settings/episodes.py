"""Settings that do not go together with an environment."""

from collections.abc import Mapping

from grpo_lightning.settings.contradictions import Reader, Unsound

_OWN_REWARD = "grpo_lightning.reward.accuracy.of_environment"
_PLACES = {
    "grpo_lightning.sampler.vllm.inside.VLLM": "sampler=vllm",
    "grpo_lightning.sampler.vllm.server.VLLMServer": "sampler=vllm_server",
}


def episode_problems(get: Reader) -> list[str]:
    """What the settings ask for that cannot be done in episodes of several turns."""
    if get("environment") is None:
        return [
            f"reward.{name}: allowed with an environment, whose scores it is: environment=custom, or another one"
            for name in _own_rewards(get)
        ]
    found: list[str] = []
    for rule in (_engine, _scored_anew, _process):
        try:
            found += rule(get)
        except Unsound:
            continue  # broken or absent, which is said elsewhere or is no problem here
    return found


def _own_rewards(get: Reader) -> list[str]:
    """The names of rewards that are what an environment gives."""
    functions = {name: reward.get("function") for name, reward in get("reward").items() if isinstance(reward, Mapping)}
    return [name for name, one in functions.items() if isinstance(one, Mapping) and one.get("_target_") == _OWN_REWARD]


def _engine(get: Reader) -> list[str]:
    name = _PLACES.get(str(get("sampler._target_")))
    if name is None:
        return []
    return [f"{name}: allowed with an environment is sampler=own: engines take no part in episodes"]


def _scored_anew(get: Reader) -> list[str]:
    if get("rollout._target_") != "grpo_lightning.rollout.Recorded" or not get("rollout.rescore"):
        return []
    return [
        f"rollout.rescore=True: allowed with reward.{name} is false: the environment is not asked again"
        for name in _own_rewards(get)
    ]


def _process(get: Reader) -> list[str]:
    if get("advantage._target_") != "grpo_lightning.advantage.process":
        return []
    return [
        "advantage=process: allowed with an environment is advantage=to_go for the scores of turns, or one for whole "
        "episodes, such as advantage=standardized: it compares turns with those of other episodes, which is biased "
        "where what the policy says decides how many there are"
    ]
