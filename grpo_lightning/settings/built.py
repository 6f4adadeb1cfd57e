"""What the source does not say of targets is asked of the objects themselves, once heavy libraries may be imported."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, get_type_hints

from grpo_lightning.distributed.chosen import device_problems, offload_problems
from grpo_lightning.output.terminal import one_line
from grpo_lightning.sandbox import client
from grpo_lightning.sandbox.limits import Unavailable
from grpo_lightning.settings import ConfigError, trust
from grpo_lightning.settings.rewards import key_problems
from grpo_lightning.settings.source import Absent, NoCallable, Unreadable
from grpo_lightning.settings.targets import target_problems
from grpo_lightning.settings.walk import each_target

_SANDBOXED = ("grpo_lightning.reward.code.code", "grpo_lightning.environment.python.Python")
"""What runs programs in the sandbox."""


def check_built(config: Mapping[str, Any]) -> None:
    """Check resolved settings against what they name and against this machine; `settings.check` comes before.

    Nothing is built: targets are imported, and devices are counted.

    Raises:
        ConfigError: Something is wrong; the error lists everything that is.
    """
    _, trusted = trust.packages(config)
    problems: list[str] = []
    for key, node in each_target(config):
        problems += target_problems(node, key, trusted, read=partial(imported, trusted=trusted, key=key))
    problems += [*device_problems(config["trainer"]), *offload_problems(config), *key_problems(config)]
    if problems := [*problems, *sandbox_problems(config)]:
        raise ConfigError(problems)


def sandbox_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why this machine has no sandbox, if settings need one: a program in it tries to get out."""
    for key, node in each_target(config):
        if node["_target_"] in _SANDBOXED:
            try:
                client.check()
            except Unavailable as error:
                yield one_line(f"{key}: {error}")
            finally:
                client.close()  # workers have their own


def imported(path: str, trusted: Collection[str] = (), key: str = "") -> inspect.Signature:
    """The signature of the object at a dotted path, which is imported.

    Args:
        path: One that `trust.may_name` allows.
        trusted: Packages that the user trusts.
        key: The dotted key of the settings that name it.

    Raises:
        Absent: There is none, or its module cannot be imported.
        NoCallable: It is neither a function nor a class nor an object that can be called.
        Unreadable: It does not say what it takes.
    """
    try:
        member = trust.resolved(path, trusted)
    except trust.Elsewhere as error:
        raise ConfigError([f"{key}.{error}"]) from None
    except trust.NoCode as error:
        raise NoCallable(str(error)) from None
    except Exception as error:  # importing a user's file may raise anything
        raise Absent(one_line(f"{type(error).__name__}: {error}" if not _tells(error) else str(error))) from error
    try:
        hints = get_type_hints(member.__init__ if inspect.isclass(member) else member)
    except Exception:  # whatever evaluating a foreign annotation raises
        hints = {}
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError) as error:
        raise Unreadable(str(error)) from error
    return found.replace(
        parameters=[one.replace(annotation=hints.get(one.name, Any)) for one in found.parameters.values()]
    )


def _tells(error: Exception) -> bool:
    return isinstance(error, ImportError | AttributeError)
