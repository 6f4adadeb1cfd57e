"""Environments of gymnasium, played in words: the model names actions, and reads what it sees."""

import random
import re
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from grpo_lightning.environment.base import BadCall
from grpo_lightning.reward.accuracy import answer_text

_COLORED = re.compile(r"\x1b\[[\d;]*[1-9][\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


class Gymnasium:
    """Environment in which each turn is an action of a gymnasium environment.

    The reply is what the model then sees: the environment's rendering as text, in which what is colored or bold becomes
    [x], or else the observation. The reward of a step is the score of the turn, so that an episode's scores sum to its
    return, and the episode ends when the environment says so (terminated or truncated). A turn that names no action is
    replied to with those that are allowed, and changes nothing; it is counted as a bad call.

    For every turn a new environment is reset and plays all actions so far, so the seed of the reset has to decide all
    that chance does. It is the column ``seed`` of the data or, without one, another number for each completion.

    Args:
        id: Of an environment that gymnasium knows, such as FrozenLake-v1, or MODULE:ID of one that a module registers.
        kwargs: Arguments of the environment, such as ``{is_slippery: false}``.
        actions: Answer text of the turn, in any case -> the action. None: the numbers of a discrete action space.

    Raises:
        ValueError: On construction: gymnasium is not installed, there is no such environment, or an action is not one.
    """

    def __init__(
        self, id: str, *, kwargs: Mapping[str, Any] | None = None, actions: Mapping[str, Any] | None = None
    ) -> None:
        self._id, self._kwargs = id, dict(kwargs or {})
        try:
            with closing(self._make()) as environment:
                modes, space = environment.metadata.get("render_modes", []), environment.action_space
        except Exception as error:  # whatever an environment raises of its arguments
            raise ValueError(f"id: cannot make the environment {id}: {error}") from error
        if "ansi" in modes:
            self._kwargs["render_mode"] = "ansi"
        if actions is None and hasattr(space, "n"):
            actions = {str(number): number for number in range(int(space.start), int(space.start + space.n))}
        if not actions or not all(action in space for action in actions.values()):
            raise ValueError(f"actions={actions}: expected a mapping from words to actions of {space}")
        self._actions = {_normal(str(name)): action for name, action in actions.items()}

    def observed(self, seed: int) -> str:
        """What is seen after a reset with this seed, before the first action: what belongs into the prompt."""
        with closing(self._make()) as environment:
            return self._text(environment, environment.reset(seed=seed)[0])

    def __call__(self, rng: random.Random, seed: int | None = None) -> Generator[Any, str, float]:
        """One episode; see `grpo_lightning.environment.base.GeneratorEnvironment`."""
        with closing(self._make()) as environment:
            environment.reset(seed=rng.randrange(2**31) if seed is None else seed)
            said = yield
            while True:
                words = answer_text(said)
                if (action := self._actions.get(_normal(words))) is None:
                    allowed = ", ".join(self._actions)
                    said = yield BadCall(f"error: {words!r:.50} is no action; the actions are {allowed}")
                    continue
                observation, reward, terminated, truncated, _ = environment.step(action)
                if terminated or truncated:
                    return float(reward)
                said = yield self._text(environment, observation), float(reward)

    def _make(self) -> Any:
        import gymnasium

        return gymnasium.make(self._id, disable_env_checker=True, **self._kwargs)

    def _text(self, environment: Any, observation: Any) -> str:
        return strip_ansi(environment.render()) if "render_mode" in self._kwargs else str(observation)


def strip_ansi(rendered: str) -> str:
    """A rendering without ANSI codes: colored or bold text becomes [x]."""
    return _ESCAPE.sub("", _COLORED.sub(r"[\1]", rendered)).strip("\n")


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
