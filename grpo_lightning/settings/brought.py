"""Settings that a command brings along by ``--config-dir`` or ``hydra.searchpath``, and what may have come with them.

Such settings may be a stranger's, and a folder below the directory of the start may be what they were unpacked in. So
they may name files of Python that lie in that directory itself, and none in its folders but for those that
``trusted=[…]`` lists.
"""

from collections.abc import Collection
from pathlib import Path

from grpo_lightning import start


def may_be_brought(top: str, trusted: Collection[str] = ()) -> bool:
    """Whether a module or package of the user's may have come with settings that the command has brought along."""
    if top in trusted or not start.settings_from():
        return False
    spec = start.spec_of(top)
    is_file = spec is not None and spec.origin is not None and not spec.submodule_search_locations
    return not (is_file and Path(str(spec and spec.origin)).parent.resolve() == start.place())


def refusal(key: str, name: str) -> str:
    """What is said of a path that `may_be_brought` forbids."""
    top, places = name.partition(".")[0], ", ".join(start.settings_from())
    return (
        f"{key}={name}: {top} is a folder, and may have come with the settings in {places}; if you know it, allowed is "
        f"trusted=[{top}] on the command line"
    )
