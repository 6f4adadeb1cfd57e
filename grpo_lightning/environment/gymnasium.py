"""An environment of gymnasium, played in words: the model names actions, and is told what it sees."""

import inspect
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from grpo_lightning.environment.answer import BadCall
from grpo_lightning.reward.text import answer_text

_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_SEEDS = 2**31
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class Gymnasium:
    """An environment in which each turn is an action of a gymnasium environment.

    The reply is what the model then sees: the environment's rendering as text, or what ``describe`` makes of its
    observation. The reward of a step is the score of the turn, so that an episode's scores sum to its return, and the
    episode ends when the environment says so (terminated or truncated). A turn that names no action is replied to with
    those that are allowed, and changes nothing in the environment; it is counted as a bad call.

    Nothing is kept between two turns: a new environment is reset with the same seed, and plays all actions so far. So
    only environments can be used in which the seed of the reset decides all that chance does.

    Args:
        id: Of an environment that gymnasium knows, such as FrozenLake-v1.
        make: A function that makes the environment, in place of ``id``: one of one's own or of another package. It is
            called with ``kwargs``.
        kwargs: Arguments of the environment, such as ``{is_slippery: false}``.
        actions: What the model says -> the action. None: the numbers of a discrete action space. The answer text of the
            turn counts (`grpo_lightning.reward.text.answer_text`); upper and lower case are the same.
        parse: A function of the turn's text that returns the action, or None for none, in place of ``actions``.
        describe: A function of observation and info that returns what the model is told.
        seed_column: The column with the seed of the reset, so that all completions of a prompt begin at the same place.
            None: a seed of its own for each completion.

    Raises:
        ValueError: On construction: gymnasium is not installed, there is no such environment, an action is not one, or
            the environment cannot be shown as text or does not begin at the same place twice.
    """

    tools = None
    """No tools are shown by the chat template."""
    role = None
    """The policy's settings say who replies."""

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
            raise ValueError(f"id: expected the name of an environment, or null where make is given, got {id!r:.80}")
        if actions is not None and parse is not None:
            raise ValueError("parse: expected null where actions are given, got both")
        for name, value in (("make", make), ("parse", parse), ("describe", describe)):
            if value is not None and not callable(value):
                raise ValueError(f"{name}: expected a function (`_partial_: true` in YAML), got {value!r:.80}")
        if kwargs is not None and (not isinstance(kwargs, Mapping) or "render_mode" in kwargs):
            raise ValueError(f"kwargs: expected arguments other than render_mode, got {kwargs!r:.80}")
        self._id, self._make, self._kwargs = id, make, dict(kwargs or {})
        self._parse, self._describe, self._seed_column = parse, describe, seed_column
        if id is not None:
            self._kwargs |= _rendering(_checked(id, self._kwargs), self._kwargs, is_needed=describe is None)
        with closing(self._made()) as environment:
            self._actions = None if parse else _actions(actions, environment.action_space)
        if self.observed(0) != self.observed(0):
            raise ValueError(
                f"{'make' if id is None else 'id'}: expected an environment whose beginning the seed decides, got "
                f"{make if id is None else id!r}, which began at two different places with the seed 0"
            )
        kind = inspect.Parameter.KEYWORD_ONLY
        named = ("turns", seed_column or "rng")
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in named])

    def observed(self, seed: int) -> str:
        """What is seen before the first action: what belongs into the prompt.

        Args:
            seed: Of the reset.
        """
        with closing(self._made()) as environment:
            return self._text(environment, *environment.reset(seed=seed))

    def __call__(self, *, turns: Sequence[str], **row: Any) -> str | float | tuple[str, float]:
        """What is seen after the last turn's action.

        Args:
            turns: What the model has said so far; the last is new.
            **row: The column with the seed, or ``rng``.

        Returns:
            What is seen and the reward, the reward alone where the environment is over, or which actions are allowed.

        Raises:
            ValueError: The seed is none, or the environment or ``describe`` return something else than they should.
        """
        seed = self._seed(row)
        with closing(self._made()) as environment:
            environment.reset(seed=seed)
            for number, turn in enumerate(turns, start=1):
                action = self._action(turn, environment.action_space)
                if isinstance(action, BadCall):
                    if number == len(turns):
                        return action
                    continue
                step = dict(zip(_STEP, environment.step(action), strict=True))
                reward = float(step["reward"])
                if not math.isfinite(reward):
                    raise ValueError(f"the environment's reward: expected a finite number, got {reward}")
                if step["terminated"] or step["truncated"]:
                    return reward
            return self._text(environment, step["observation"], step["info"]), reward

    def _made(self) -> Any:
        if self._make is not None:
            return self._make(**self._kwargs)
        return _library().make(self._id, disable_env_checker=True, **self._kwargs)

    def _seed(self, row: Mapping[str, Any]) -> int:
        if self._seed_column is None:
            rng: random.Random = row["rng"]
            return rng.randrange(_SEEDS)
        seed = row[self._seed_column]
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _SEEDS:
            raise ValueError(
                f"{self._seed_column}: expected a whole number from 0 to {_SEEDS - 1}, the seed, got {seed!r:.80}"
            )
        return seed

    def _action(self, turn: str, space: Any) -> Any:
        """The action that a turn names; a `BadCall` where it names none."""
        if self._parse is not None:
            action = self._parse(turn)
            return BadCall("error: that is no action") if action is None or not _holds(space, action) else action
        actions: Mapping[str, Any] = self._actions or {}
        said = answer_text(turn)
        if (named := _normal(said)) in actions:
            return actions[named]
        return BadCall(f"error: {said!r:.50} is no action; allowed: {', '.join(actions)}")

    def _text(self, environment: Any, observation: Any, info: Any) -> str:
        if self._describe is not None:
            text = self._describe(observation, info)
            if not isinstance(text, str):
                raise ValueError(f"describe: expected a function that returns a text, got {text!r:.80}")
            return text
        text = environment.render()
        if not isinstance(text, str):
            raise ValueError(
                "make: expected an environment whose render() returns a text, or a function describe besides, got "
                f"{type(text).__name__}"
            )
        return plain(text)


def plain(rendered: str) -> str:
    """A rendering without colors: what has a colored background as [x], what is bold as (x), other colors as {x}.

    Args:
        rendered: A text with escape sequences of ANSI, with which environments mark places.
    """

    def marked(found: re.Match[str]) -> str:
        codes = {int(code) for code in found[1].split(";") if code} - {0}
        opening, closing = "[]" if codes & set(range(40, 48)) else "()" if 1 in codes else "{}"
        return f"{opening}{found[2]}{closing}" if codes else found[2]

    return _ESCAPE.sub("", _COLORED.sub(marked, rendered)).strip("\n")


def _library() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ValueError(
            "id: needs the package gymnasium; pip install 'grpo-lightning[gymnasium]' brings it"
        ) from error
    return gymnasium


def _checked(id: Any, kwargs: Mapping[str, Any]) -> Any:
    """An environment that gymnasium knows.

    Raises:
        ValueError: There is no such environment.
    """
    gymnasium = _library()
    if not isinstance(id, str) or ":" in id:  # which would import a module that a recipe names
        raise ValueError(f"id: expected an environment that gymnasium knows, or make for others, got {id!r:.80}")
    try:
        return gymnasium.make(id, disable_env_checker=True, **kwargs)
    except Exception as error:  # whatever an environment raises of its arguments
        raise ValueError(f"id: expected an environment that gymnasium can make, got {id!r:.80}: {error}") from error


def _rendering(environment: Any, kwargs: Mapping[str, Any], *, is_needed: bool) -> dict[str, str]:
    with closing(environment):
        modes = environment.metadata.get("render_modes", [])
    if is_needed and "ansi" not in modes:
        raise ValueError(
            f"describe: expected a function of observation and info for {environment.spec.id}, which has no rendering "
            f"as text (it has {', '.join(modes) or 'none'}), got null"
        )
    return {"render_mode": "ansi"} if is_needed else {}


def _actions(given: Any, space: Any) -> dict[str, Any]:
    """What the model says -> action, checked."""
    if given is None:
        if not (hasattr(space, "n") and hasattr(space, "start")):
            raise ValueError(f"actions: expected a mapping, or parse, for the action space {space}, got null")
        given = {number: number for number in range(int(space.start), int(space.start + space.n))}
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"actions: expected a mapping such as {{left: 0, right: 2}}, got {given!r:.80}")
    for name, action in given.items():
        if not _holds(space, action):
            raise ValueError(f"actions: expected actions of {space}, got {name}: {action!r:.80}")
    made = {_normal(str(name)): action for name, action in given.items()}
    if len(made) < len(given) or "" in made:
        raise ValueError(f"actions: expected different words that are not empty, got {', '.join(map(str, given))}")
    return made


def _holds(space: Any, action: Any) -> bool:
    return not isinstance(action, bool) and bool(space.contains(action))


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
