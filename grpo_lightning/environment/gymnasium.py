"""Environments of gymnasium, played in words: the model names actions, and reads what it sees."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from grpo_lightning.environment.base import BadCall
from grpo_lightning.reward.accuracy import answer_text

_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_SEEDS = 2**31


class Gymnasium:
    """Environment in which each turn is an action of a gymnasium environment.

    The reply is what the model then sees: the environment's rendering as text, or what ``describe`` makes of its
    observation. The reward of a step is the score of the turn, so that an episode's scores sum to its return, and the
    episode ends when the environment says so (terminated or truncated). A turn that names no action is replied to with
    those that are allowed, and changes nothing in the environment; it is counted as a bad call.

    Nothing is kept between two turns: a new environment is reset with the same seed, and plays all actions so far. So
    only environments can be used in which the seed of the reset decides all that chance does.

    Args:
        id: Of an environment that gymnasium knows, such as FrozenLake-v1.
        make: A function of ``kwargs`` that makes the environment, in place of ``id``.
        kwargs: Arguments of the environment, such as ``{is_slippery: false}``.
        actions: Answer text of the turn, in any case -> the action. None: the numbers of a discrete action space.
        parse: A function of the turn's text that returns the action, or None for none, in place of ``actions``.
        describe: A function of observation and info that returns the reply.
        seed_column: The column with the seed of the reset, so that all completions of a prompt begin at the same place.
            None: a seed of its own for each completion.

    Raises:
        ValueError: On construction: gymnasium is not installed, there is no such environment, an action is not one, or
            the environment cannot be shown as text or does not begin at the same place twice.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        make: Callable[..., Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | None = None,
        parse: Callable[[str], Any] | None = None,
        describe: Callable[..., str] | None = None,
        seed_column: str | None = "seed",
    ) -> None:
        if (id is None) == (make is None):
            raise ValueError(f"id: expected the name of an environment, or null and make, got {id!r:.80}")
        self._make = make or partial(_make, id)
        self._kwargs, self._parse, self._describe, self._seed_column = dict(kwargs or {}), parse, describe, seed_column
        try:
            with closing(self._make(**self._kwargs)) as environment:
                modes, self._space = environment.metadata.get("render_modes", []), environment.action_space
        except Exception as error:  # whatever an environment raises of its arguments
            raise ValueError(f"id: cannot make the environment {id or make!r:.80}: {error}") from error
        if describe is None and id is not None:
            if "ansi" not in modes:
                raise ValueError(f"describe: {id} has no text rendering and needs a function of observation and info")
            self._kwargs["render_mode"] = "ansi"
        self._actions = {} if parse else _actions(actions, self._space)
        if self.observed(0) != self.observed(0):
            raise ValueError(f"id: the seed does not decide how {id or make!r} begins, as it has to")
        named = ("turns", seed_column or "rng")
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
        )

    def observed(self, seed: int) -> str:
        """What is seen after a reset with this seed, before the first action: what belongs into the prompt."""
        with closing(self._make(**self._kwargs)) as environment:
            return self._text(environment, *environment.reset(seed=seed))

    def __call__(self, *, turns: Sequence[str], **row: Any) -> str | float | tuple[str, float]:
        """Play the actions of all turns; ``row`` has the column with the seed, or ``rng``."""
        seed = row[self._seed_column] if self._seed_column else row["rng"].randrange(_SEEDS)
        with closing(self._make(**self._kwargs)) as environment:
            environment.reset(seed=seed)
            for turn in turns:
                action = self._action(turn)
                if isinstance(action, BadCall):
                    continue
                observation, reward, terminated, truncated, info = environment.step(action)
                if terminated or truncated:
                    return float(reward)
            if isinstance(action, BadCall):
                return action
            return self._text(environment, observation, info), float(reward)

    def _action(self, turn: str) -> Any:
        """The action that a turn names; a `BadCall` where it names none."""
        if self._parse is not None:
            action = self._parse(turn)
            return BadCall("error: that is no action") if action is None or action not in self._space else action
        words = answer_text(turn)
        if (name := _normal(words)) in self._actions:
            return self._actions[name]
        return BadCall(f"error: {words!r:.50} is no action; the actions are {', '.join(self._actions)}")

    def _text(self, environment: Any, observation: Any, info: Any) -> str:
        text = environment.render() if self._describe is None else self._describe(observation, info)
        if not isinstance(text, str):
            raise ValueError(f"describe: expected a function that returns a text, got {text!r:.80}")
        return text if self._describe else plain(text)


def _make(id: Any, **kwargs: Any) -> Any:
    import gymnasium

    return gymnasium.make(id, disable_env_checker=True, **kwargs)


def plain(rendered: str) -> str:
    """A rendering without ANSI colors: a colored background becomes [x], bold text (x), and another color {x}."""

    def marked(match: re.Match[str]) -> str:
        codes = {int(code) for code in match[1].split(";") if code} - {0}
        opening, closing = "[]" if codes & set(range(40, 48)) else "()" if 1 in codes else "{}"
        return f"{opening}{match[2]}{closing}" if codes else match[2]

    return _ESCAPE.sub("", _COLORED.sub(marked, rendered)).strip("\n")


def _actions(actions: Any, space: Any) -> dict[str, Any]:
    """What the model says -> action, checked."""
    if actions is None and hasattr(space, "n"):
        actions = {number: number for number in range(int(space.start), int(space.start + space.n))}
    if not isinstance(actions, Mapping) or not actions:
        raise ValueError(f"actions: expected a mapping such as {{left: 0}}, or parse, for {space}, got {actions!r:.80}")
    if strange := [f"{name}: {action!r:.80}" for name, action in actions.items() if action not in space]:
        raise ValueError(f"actions: expected actions of {space}, got {', '.join(strange)}")
    return {_normal(str(name)): action for name, action in actions.items()}


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
