"""Loggers of other services: whether their package is installed, and what they must not be told."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.walk import each_target

_FIXED = {"x_disable_meta": True, "console": "off", "disable_git": True}
_WANDB = ("silent", "quiet", "init_timeout", *_FIXED)
_TAKES = ("entity", "group", "job_type", "name", "notes", "offline", "prefix", "project", "save_dir", "tags")
"""Arguments of W&B's logger; others are handed on to what begins a run of W&B's."""
_DATABASE = re.compile(r"sqlite(?:\+\w+)?:///((?!file:)[^?]*\.(?:db|sqlite3?))(?:\?.*)?", re.DOTALL)
"""A database whose file no other program reads as its own, as it would one called ``.vimrc``."""
_SERVER = re.compile(
    r"https?://.*|databricks(-uc)?(://.*)?|file:.*|(postgresql(\+psycopg2?)?|mysql\+pymysql)://[^?]*", re.DOTALL
)
"""Other stores of MLflow's, which load nothing that an address names."""
_ARTIFACTS = re.compile(r"(file|mlflow-artifacts|dbfs):.*|(https?|s3|gs|wasbs|abfss)://.*", re.DOTALL)
"""Places of MLflow's files, likewise."""
_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
"""Class -> the package that it needs, which is also the name of this project's extra that installs it."""


def logger_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the loggers, by key."""
    if "logger" not in config:  # some parts of a run's settings, as replay has them
        return
    loggers = config["logger"]
    if not isinstance(loggers, Mapping):
        yield f"logger={loggers}: allowed is one of csv, mlflow, none, tensorboard, wandb, or a list of them"
        return
    for name, logger in loggers.items():
        if not isinstance(logger, Mapping) or "_target_" not in logger:
            word = typed("logger", [*_chosen(loggers), name])
            yield f"logger.{name}: no such logger was chosen; allowed is {word}"
        elif (package := _PACKAGES.get(str(logger["_target_"]).rpartition(".")[2])) and find_spec(package) is None:
            yield f"logger.{name}: needs the package {package}; pip install 'grpo-lightning[{package}]' brings it"
    for key, node in each_target(config):  # also of one that a callback holds
        if str(node["_target_"]).endswith(".WandbLogger"):
            yield from _wandb_problems(key, node)
        place = node.get("artifact_location")
        if isinstance(place, str) and ":" in place.partition("/")[0] and not _ARTIFACTS.fullmatch(place):
            allowed = "allowed are a directory, file:, mlflow-artifacts:, dbfs:, http, https, s3, gs, wasbs and abfss"
            yield one_line(f"{key}.artifact_location={place}: {allowed}, as others load libraries that lie here")
        store = node.get("tracking_uri")
        if not isinstance(store, str):
            continue
        told = "sqlite:///PATH of a database whose name ends in .db, .sqlite or .sqlite3"
        if store.startswith("sqlite"):
            if not _DATABASE.fullmatch(store):
                yield one_line(f"{key}.tracking_uri={store}: allowed is {told}")
        elif ":" in store.partition("/")[0] and not _SERVER.fullmatch(store):
            yield one_line(
                f"{key}.tracking_uri={store}: allowed are {told}, a directory, and servers: http://, https://, "
                "databricks, postgresql:// and mysql+pymysql:// without ?, as others load libraries that it names"
            )


def _wandb_problems(key: str, logger: Mapping[str, Any]) -> Iterator[str]:
    """What W&B must not be told: to copy files, or to run git in its directory, where settings may name programs."""
    settings = logger.get("settings") or {}
    if not isinstance(settings, Mapping):
        yield f"{key}.settings={settings}: allowed is a mapping"
        return
    fixed = [f"{one}={_FIXED[one]}" if one in _FIXED else one for one in _WANDB]
    wrong = [one for one, value in settings.items() if one not in _WANDB or _FIXED.get(one, value) != value]
    for name in wrong:
        yield f"{key}.settings.{one_line(f'{name}={settings[name]}')}: allowed are {', '.join(fixed)}"
    for name in logger:
        if not name.startswith("_") and name not in (*_TAKES, "settings"):
            yield f"{key}.{one_line(name)}: allowed are {', '.join(_TAKES)}"


def _chosen(loggers: Mapping[str, Any]) -> list[str]:
    return [name for name, logger in loggers.items() if isinstance(logger, Mapping) and "_target_" in logger]
