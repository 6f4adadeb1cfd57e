"""What settings take from the environment, such as ``${oc.env:HF_TOKEN}``, stays out of everything that is written."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from grpo_lightning.output import redaction
from grpo_lightning.settings import trust

_ENVIRONMENT = re.compile(r"\boc\.env\s*:")
_SURELY_PRIVATE = 12  # characters of a value of the environment that is hidden in any text


def remember_secrets(cfg: DictConfig, config: Mapping[str, Any] | None = None) -> None:
    """Take note of the secrets among settings as composed and, if they are known already, as resolved."""
    composed: Any = OmegaConf.to_container(cfg, resolve=False)
    named = [key for key, value in trust.values(composed) if _ENVIRONMENT.search(str(value))]
    own = config or {key: node for key, node in composed.items() if key != "hydra"}
    redaction.remember(own, keys=named)


def _of_environment(*words: Any) -> Any:
    """OmegaConf's resolver ``oc.env``; what it reads is kept out of all texts."""
    value = oc.env(*words)
    # A directory's name is found in many texts, and is no secret by itself.
    if isinstance(value, str) and len(value) >= _SURELY_PRIVATE and "/" not in value:
        redaction.remember({}, texts=[value])
    return value


OmegaConf.register_new_resolver("oc.env", _of_environment, replace=True)
