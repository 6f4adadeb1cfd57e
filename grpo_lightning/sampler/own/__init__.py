"""The sampler that needs no engine: the policy computes its completions itself, with the weights that are trained."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Own:
    """Lets the policy draw for itself; nothing is handed over, and nothing is rounded."""

    is_engine = False
    is_coarse = False
    metrics: Mapping[str, float] = {}

    def ready(self, policy: Any, **_: Any) -> AbstractContextManager[None]:
        """Do nothing: a policy is always ready for itself."""
        return nullcontext()
