"""What functions of others return and raise, as this program passes it on."""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_lightning.output.redaction import hide
from grpo_lightning.output.terminal import one_line

_MOST_NESTED = 3  # lists in one another: of completions, of steps, of (end, score)
_SHOWN_CHARACTERS = 300


def plain(value: Any, nested: int = _MOST_NESTED) -> Any:
    """What a function returned, as it can be pickled, and read without torch.

    Tensors, arrays, generators and other iterables become lists; inside, a tensor of one number becomes that number.
    """
    if hasattr(value, "tolist"):  # of torch, numpy and others, of which none is imported here
        listed = value.tolist()
        while nested < _MOST_NESTED and isinstance(listed, list) and len(listed) == 1:
            listed = listed[0]
        # Row by row, since a row of one number counts as that number.
        value = value if nested == _MOST_NESTED and isinstance(listed, list) else listed
    if nested == 0 or not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return value
    return [plain(one, nested - 1) for one in value]


def described(error: BaseException) -> str:
    """The beginning of what an exception of foreign code says, with its type, in one line and without secrets."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}: its text cannot be shown"
    return one_line(hide(text)[:_SHOWN_CHARACTERS])
