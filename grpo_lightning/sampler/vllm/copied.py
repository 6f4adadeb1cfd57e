"""What holds for both ways to vLLM: the engine has a copy of the policy's weights."""

from collections.abc import Mapping


class CopiedWeights:
    """Weights of a second set, and which the engine has.

    Args:
        dtype: Of the weights: float32, bfloat16 or float16; None: the type in which the policy computes.
    """

    is_engine = True

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self._version: int | None = None
        """The steps behind the weights with which it has drawn last; None before, and after an error."""

    @property
    def is_coarse(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self._version is None else {"sampler/weight_version": float(self._version)}
