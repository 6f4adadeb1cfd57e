"""Settings that a command brings along by ``--config-dir`` or ``hydra.searchpath``, and what may have come with them.

Such settings may be a stranger's, and a folder below the directory of the start may be what they were unpacked in. So
they may name files of Python that lie in that directory itself, and none in its folders but for those that
``trusted=[…]`` lists.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from grpo_lightning import start
from grpo_lightning.settings.allowlist import PLAIN, WATCHING

_CALLBACKS = "lightning.pytorch.callbacks."
_HARMLESS = (
    *("builtins.", "typing.", "abc.", "enum.", "torch.nn.", "torch.optim.", "grpo_lightning.module."),
    *("lightning.pytorch.core.", "lightning.fabric.utilities.device_dtype_mixin."),
    *(f"{name}." for name in PLAIN if name.startswith("grpo_lightning.")),
)
"""Where classes are that load, send, run and write nothing on the word of their arguments."""


def may_be_brought(top: str, trusted: Collection[str] = ()) -> bool:
    """Whether a module or package of the user's may have come with settings that the command has brought along."""
    if top in trusted or not start.settings_from():
        return False
    spec = start.spec_of(top)
    is_file = spec is not None and spec.origin is not None and not spec.submodule_search_locations
    return not (is_file and Path(str(spec and spec.origin)).parent.resolve() == start.place())


def made_as(kind: type, is_of_user: Callable[[str], bool]) -> str | None:
    """The class of a library's that takes the arguments of one of the user's, so that naming this is naming that.

    What writes or sends does so wherever its arguments say, which have rules by the names of classes; those of other
    packages may do anything.

    Args:
        kind: A class of the user's.
        is_of_user: Whether a package or module is the user's.
    """
    for base in kind.__mro__[1:]:
        path = f"{base.__module__}.{base.__qualname__}"
        is_known = path in WATCHING or (path.startswith(_CALLBACKS) and base.__name__ in WATCHING)
        is_known = is_known or path.startswith(_HARMLESS) or is_of_user(path.partition(".")[0])
        if not is_known and {"__init__", "__new__"} & vars(base).keys():
            return path
    return None


def refusal(key: str, name: str) -> str:
    """What is said of a path that `may_be_brought` forbids."""
    top, places = name.partition(".")[0], ", ".join(start.settings_from())
    return (
        f"{key}={name}: {top} is a folder, or lies in one, and may have come with the settings in {places}; if you "
        f"know it, allowed is trusted=[{top}] on the command line"
    )
